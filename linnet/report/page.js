// Draws the figures as wide as the page, lets the key at the top bring one architecture forward in all of them, sorts
// tables, and marks what is wider than the page, so that a reader sees that it scrolls.
// In a function of its own: the bundle of vega before it leaves short names behind.
(() => {
  "use strict";
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const themes = JSON.parse(document.getElementById("themes").textContent);
  const LEAST = 0.75; // figures are scaled down to this share of their size; smaller ones would be hard to read
  const AXIS = 75; // pixels beside a panel
  let views = [];
  let focus = "";
  let turn = 0;

  const widthOf = (figure) => Number(figure.querySelector("svg.marks").getAttribute("width"));

  // As many panels beside one another as fit, none wider than `room`, and legends below them. Panels without an axis of
  // their own stay in their row.
  function narrow(spec, room) {
    const bare = (part) => part.encoding?.y?.axis === null || (part.layer || []).some(bare);
    if (spec.hconcat && !spec.hconcat.some(bare)) {
      spec.vconcat = spec.hconcat;
      delete spec.hconcat;
    }
    if (spec.concat) {
      const fit = Math.floor((room + AXIS) / (Math.min(spec.concat[0].width || room, room) + AXIS));
      spec.columns = Math.max(1, Math.min(spec.columns || fit, fit));
    }
    if (typeof spec.width === "number") spec.width = Math.min(spec.width, room);
    for (const channel of Object.values(spec.encoding || {})) {
      if (!channel.legend) continue;
      const gradient = { direction: "horizontal", gradientLength: Math.min(room, 240) };
      const symbols = { direction: "vertical", columns: Math.max(1, Math.floor(room / 110)) };
      Object.assign(channel.legend, { orient: "bottom" }, channel.type === "quantitative" ? gradient : symbols);
    }
    for (const part of [spec.vconcat, spec.concat, spec.layer].flat()) if (part) narrow(part, room);
    return spec;
  }

  async function embed(figure, room) {
    const spec = JSON.parse(document.getElementById("spec-" + figure.id).textContent);
    spec.config = structuredClone(dark.matches ? themes.dark : themes.light);
    if (room) {
      narrow(spec, room);
      Object.assign(spec.config.legend, { orient: "bottom", columns: Math.max(1, Math.floor(room / 110)) });
    }
    const embedded = await vegaEmbed(figure, spec, {
      renderer: "svg",
      actions: { export: true, source: false, compiled: false, editor: false },
      downloadFileName: figure.id,
      tooltip: { theme: dark.matches ? "dark" : "light" },
    });
    figure.querySelector("svg.marks").style.minWidth = LEAST * widthOf(figure) + "px";
    return embedded;
  }

  async function draw() {
    const mine = ++turn;
    views = [];
    for (const figure of document.querySelectorAll(".figure")) {
      try {
        let embedded = await embed(figure);
        for (let room = figure.clientWidth - AXIS, tries = 0; tries < 2; tries++) {
          const over = widthOf(figure) - figure.clientWidth;
          if (over <= (tries ? 0 : figure.clientWidth * (1 / LEAST - 1))) break;
          embedded.finalize();
          room = Math.max(140, tries ? room - over : room);
          embedded = await embed(figure, room);
        }
        if (mine !== turn) return;
        embedded.view.addEventListener("click", (event, item) => item && item.datum && show(item.datum.run));
        embedded.view.signal("focus", focus).run();
        views.push(embedded.view);
      } catch (error) {
        if (mine !== turn) return;
        figure.textContent = "This figure could not be drawn here (" + error.message + "); its PNG and SVG files are beside this page.";
        console.error(error);
      }
    }
    mark();
    document.body.dataset.drawn = views.length;
  }

  // Boxes that scroll: the keyboard reaches them, and those that scroll sideways say so.
  function mark() {
    for (const box of document.querySelectorAll(".scroll, .tall, .figure, pre")) {
      const wide = box.scrollWidth > box.clientWidth + 1 && getComputedStyle(box).overflowX !== "visible";
      box.classList.toggle("wide", wide);
      for (const name of ["tabindex", "role", "aria-label"]) box.removeAttribute(name);
      if (!wide && box.scrollHeight <= box.clientHeight + 1) continue;
      const before = (heading) => heading.compareDocumentPosition(box) & Node.DOCUMENT_POSITION_FOLLOWING;
      const heading = [...document.querySelectorAll("h1, h2, main > details > summary")].filter(before).pop();
      box.tabIndex = 0;
      box.setAttribute("role", "region");
      box.setAttribute("aria-label", heading.textContent);
    }
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
  for (const header of document.querySelectorAll("table.sortable thead th")) {
    const button = document.createElement("button"); // the keyboard reaches it
    button.type = "button";
    button.append(...header.childNodes);
    header.append(button);
    header.addEventListener("click", () => sort(header));
  }
  dark.addEventListener("change", draw);
  let width = window.innerWidth;
  let waiting = 0;
  window.addEventListener("resize", () => {
    if (window.innerWidth === width) return;
    width = window.innerWidth;
    clearTimeout(waiting);
    waiting = setTimeout(draw, 200);
  });
  window.addEventListener("beforeprint", () => document.querySelectorAll("main > details").forEach((part) => (part.open = true)));
  document.querySelectorAll("details").forEach((part) => part.addEventListener("toggle", mark));
  draw();
})();
