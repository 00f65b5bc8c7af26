"""The page in a real browser without a network: every figure is drawn, and pointing, clicking and sorting work."""

import json
import re
import shutil
import subprocess

import pytest

pytestmark = pytest.mark.system

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-dev-shm-usage --virtual-time-budget=20000 "
    "--window-size=1280,3000 --enable-logging=stderr"
).split()

# Once all figures are drawn: points at a run, clicks it, brings tnl forward, sorts by loss; then writes what it saw.
PROBE = """
<script>
const timer = setInterval(async () => {
  if (document.body.dataset.drawn === undefined) return;
  clearInterval(timer);
  const pause = () => new Promise((resolve) => setTimeout(resolve, 300));
  const at = (path) => [...document.querySelectorAll("#isoflop-curves " + path)];
  const fire = (type) => point.dispatchEvent(new PointerEvent(type, {bubbles: true, clientX: 1, clientY: 1}));
  const seen = {drawn: Number(document.body.dataset.drawn), marks: {}};
  for (const figure of document.querySelectorAll(".figure")) {
    seen.marks[figure.id] = figure.querySelectorAll(".role-mark path").length;
    seen.width = Math.max(seen.width || 0, figure.scrollWidth - figure.clientWidth);
  }
  const point = at(".mark-symbol.role-mark path")[0];
  fire("pointermove"); await pause();
  seen.tooltip = document.getElementById("vg-tooltip-element").textContent;
  fire("click"); await pause();
  seen.found = document.querySelector("tr.found")?.id;
  const strong = () => at(".mark-line.role-mark path").filter((p) => Number(p.getAttribute("stroke-opacity")) > 0.5);
  seen.before = strong().length;
  document.querySelector('.key button[data-name="tnl"]').click(); await pause();
  seen.after = strong().length;
  const header = [...document.querySelectorAll("#runs thead th")].find((th) => th.textContent.startsWith("Loss"));
  header.querySelector("button").click();
  const column = header.cellIndex;
  seen.losses = [...document.querySelectorAll("#runs tbody tr")].map((row) => row.cells[column].dataset.v);
  const report = document.createElement("pre");
  report.id = "probe";
  report.textContent = JSON.stringify(seen);
  document.body.append(report);
}, 50);
</script>
"""


# Measures which boxes are wider than their place, and whether a reader sees it and the keyboard reaches them.
TELEPHONE = "main { max-width: 400px; margin: 0; }"
WIDTHS = """
<script>
const timer = setInterval(() => {
  if (document.body.dataset.drawn === undefined) return;
  clearInterval(timer);
  document.querySelectorAll("main > details").forEach((part) => (part.open = true));
  setTimeout(() => {
    const boxes = [...document.querySelectorAll(".figure, .scroll, .tall")].map((box) => ({
      name: box.id || box.querySelector("table")?.id,
      figure: box.className.includes("figure"),
      over: getComputedStyle(box).overflowX === "visible" ? 0 : box.scrollWidth - box.clientWidth,
      sign: getComputedStyle(box, "::before").content,
      tab: box.tabIndex,
      region: box.getAttribute("aria-label"),
      label: box.querySelector('[role="graphics-document"]')?.getAttribute("aria-label"),
    }));
    const main = document.querySelector("main");
    const report = document.createElement("pre");
    report.id = "probe";
    report.textContent = JSON.stringify({ boxes, over: main.scrollWidth - main.clientWidth });
    document.body.append(report);
  }, 500);
}, 50);
</script>
"""


# Brings tnl forward while a resize draws the second figure again, and writes the opacities of lines in the first one.
EARLY = """
<script>
const figures = document.querySelectorAll(".figure");
const timer = setInterval(() => {
  if (document.body.dataset.drawn === undefined) return;
  clearInterval(timer);
  new MutationObserver((changes, observer) => {
    if (!figures[1].querySelector("svg.marks")) return;
    observer.disconnect();
    document.querySelector('.key button[data-name="tnl"]').click();
  }).observe(figures[1], { childList: true, subtree: true });
  window.innerWidth -= 1;
  window.dispatchEvent(new Event("resize"));
  setTimeout(() => {
    const lines = [...figures[0].querySelectorAll(".mark-line.role-mark path")];
    const report = document.createElement("pre");
    report.id = "probe";
    report.textContent = JSON.stringify(lines.map((line) => Number(line.getAttribute("stroke-opacity"))));
    document.body.append(report);
  }, 3000);
}, 50);
</script>
"""


# Draws again twice. The first time, a figure fails after the second time has drawn it. Writes what figures contain.
LATE = """
<script>
const timer = setInterval(async () => {
  if (document.body.dataset.drawn === undefined) return;
  clearInterval(timer);
  const pause = (time) => new Promise((resolve) => setTimeout(resolve, time));
  const embed = window.vegaEmbed;
  const resize = () => (window.innerWidth -= 1, window.dispatchEvent(new Event("resize")));
  window.vegaEmbed = () => pause(2000).then(() => { throw new Error("late"); });
  resize(); await pause(500);
  window.vegaEmbed = embed;
  resize(); await pause(4000);
  const report = document.createElement("pre");
  report.id = "probe";
  report.textContent = JSON.stringify([...document.querySelectorAll(".figure")].map((figure) => figure.textContent));
  document.body.append(report);
}, 50);
</script>
"""


@pytest.fixture(scope="module")
def browsed(ladder, tmp_path_factory):
    """What the probe saw, and what the browser logged."""
    return browse(ladder[1], PROBE, tmp_path_factory)


@pytest.fixture(scope="module")
def narrow(ladder, tmp_path_factory):
    """The widths of a page as narrow as a telephone."""
    return browse(ladder[1], WIDTHS, tmp_path_factory, TELEPHONE)[0]


def browse(drawn, probe, tmp_path_factory, style=""):
    if CHROMIUM is None:
        pytest.skip("no chromium here: install it to see the report drawn (apt-get install chromium)")
    folder = tmp_path_factory.mktemp("browser")
    page = folder / "index.html"
    body, _, end = drawn.read_text().replace("</style></head>", f"{style}</style></head>").rpartition("</body>")
    page.write_text(f"{body}{probe}</body>{end}")
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={folder / 'profile'}", "--dump-dom", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    seen = re.search(r'<pre id="probe"[^>]*>(.*?)</pre>', done.stdout, re.S)
    assert seen, done.stderr[-2000:]
    text = seen[1].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")
    return json.loads(text), [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def test_every_figure_is_drawn_without_a_complaint(browsed):
    seen, console = browsed
    assert console == []
    assert seen["drawn"] == 6
    assert all(count > 5 for count in seen["marks"].values()), seen["marks"]


def test_figures_fit_a_laptop(browsed):
    assert browsed[0]["width"] <= 1


def test_on_a_telephone_figures_fit_and_wide_tables_show_that_they_scroll(narrow):
    assert narrow["over"] <= 1, "the page itself does not scroll sideways"
    figures = [box for box in narrow["boxes"] if box["figure"]]
    assert len(figures) == 6 and all(box["over"] <= 1 for box in figures), figures
    wide = {box["name"]: box for box in narrow["boxes"] if box["over"] > 1}
    assert {"laws", "runs"} <= wide.keys()
    assert all("Scroll sideways" in box["sign"] and box["tab"] == 0 for box in wide.values()), wide
    assert wide["laws"]["region"] == "The laws" and wide["runs"]["region"] == "All runs"
    assert all("Scroll" not in box["sign"] for box in narrow["boxes"] if box["name"] not in wide)


def test_an_architecture_that_is_brought_forward_early_is_so_in_all_figures(ladder, tmp_path_factory):
    opacities, _ = browse(ladder[1], EARLY, tmp_path_factory)
    assert 0 < sum(opacity < 0.5 for opacity in opacities) < len(opacities), opacities


def test_a_drawing_that_a_later_one_replaced_leaves_no_error(ladder, tmp_path_factory):
    texts, _ = browse(ladder[1], LATE, tmp_path_factory)
    assert texts[0] and not any("could not be drawn" in text for text in texts)


def test_figures_have_a_text_for_readers_who_do_not_see_them(narrow):
    labels = {box["name"]: box["label"] for box in narrow["boxes"] if box["figure"]}
    assert labels["loss-against-compute"].startswith("Loss against compute. The lowest held-out loss")
    assert all(len(label) > 50 for label in labels.values())


def test_pointing_at_a_run_tells_what_it_is_and_clicking_leads_to_its_row(browsed):
    seen, _ = browsed
    run = seen["found"].removeprefix("run-")
    assert f"runs/{run}" in seen["tooltip"] and "nats per token" in seen["tooltip"]
    assert "FLOPs" in seen["tooltip"] and "with embeddings" in seen["tooltip"]


def test_key_brings_one_architecture_forward(browsed):
    seen, _ = browsed
    assert seen["before"] == 12  # three architectures of four budgets
    assert seen["after"] == 4


def test_runs_are_sorted_by_what_is_clicked(browsed):
    losses = browsed[0]["losses"]
    known = [float(loss) for loss in losses if loss]
    assert known == sorted(known) and len(known) == 70
    assert losses[-2:] == ["", ""]  # the run that failed and the one that diverged
