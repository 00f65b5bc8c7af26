// Draws the figures, lets the key at the top bring one architecture forward in all of them, and sorts tables.
// In a function of its own: the bundle of vega before it leaves short names behind.
(() => {
  "use strict";
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const themes = JSON.parse(document.getElementById("themes").textContent);
  let views = [];
  let focus = "";

  async function draw() {
    views = [];
    for (const figure of document.querySelectorAll(".figure")) {
      const spec = JSON.parse(document.getElementById("spec-" + figure.id).textContent);
      spec.config = dark.matches ? themes.dark : themes.light;
      try {
        const embedded = await vegaEmbed(figure, spec, {
          renderer: "svg",
          actions: { export: true, source: false, compiled: false, editor: false },
          downloadFileName: figure.id,
          tooltip: { theme: dark.matches ? "dark" : "light" },
        });
        embedded.view.addEventListener("click", (event, item) => item && item.datum && show(item.datum.run));
        embedded.view.signal("focus", focus).run();
        views.push(embedded.view);
      } catch (error) {
        figure.textContent = "This figure could not be drawn here (" + error.message + "); its PNG and SVG files are beside this page.";
        console.error(error);
      }
    }
    document.body.dataset.drawn = views.length;
  }

  function bring(name) {
    focus = focus === name ? "" : name;
    for (const button of document.querySelectorAll(".key button")) {
      button.setAttribute("aria-pressed", String(button.dataset.name === focus));
    }
    for (const view of views) view.signal("focus", focus).runAsync();
  }

  function show(run) {
    const row = run && document.getElementById("run-" + run);
    if (!row) return;
    document.querySelectorAll("tr.found").forEach((other) => other.classList.remove("found"));
    row.classList.add("found");
    row.scrollIntoView({ block: "center" });
  }

  function sort(header) {
    const index = [...header.parentNode.children].indexOf(header);
    const body = header.closest("table").tBodies[0];
    const up = header.getAttribute("aria-sort") !== "ascending";
    for (const other of header.parentNode.children) other.removeAttribute("aria-sort");
    header.setAttribute("aria-sort", up ? "ascending" : "descending");
    const value = (row) => {
      const cell = row.cells[index];
      if (cell.dataset.v === undefined) return cell.textContent;
      return cell.dataset.v === "" ? (up ? Infinity : -Infinity) : Number(cell.dataset.v);
    };
    const before = (a, b) => (typeof a === "string" ? a.localeCompare(b) : a - b);
    [...body.rows].sort((a, b) => (up ? 1 : -1) * before(value(a), value(b))).forEach((row) => body.append(row));
  }

  document.querySelectorAll(".key button").forEach((button) => button.addEventListener("click", () => bring(button.dataset.name)));
  document.querySelectorAll("table.sortable thead th").forEach((header) => header.addEventListener("click", () => sort(header)));
  dark.addEventListener("change", draw);
  draw();
})();
