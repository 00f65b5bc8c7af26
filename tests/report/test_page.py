"""The report as a whole: what it says, what it holds, and that it is a pure function of the study folder."""

import csv
import importlib.util
import itertools
import json
import math
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import yaml
from rich.console import Console
from synthetic_study import LAWS, RESAMPLES

from linnet.cli.fit.page import show_summary
from linnet.config import ConfigError
from linnet.laws.fit import fit_study
from linnet.laws.orders import orders
from linnet.report import shell, write_report
from linnet.report.figures import CROSS, laws, optima
from linnet.report.findings import _speed, _state, conclude, findings
from linnet.report.records import as_study, read_study
from linnet.report.run import state_size, training_curves
from linnet.report.tables import law_table
from linnet.runs.record import BY_WEIGHTS
from linnet.study.collect import load_study

FIGURES = {
    "loss-against-compute",
    "training-curves",
    "isoflop-curves",
    "optimal-size-and-tokens",
    "loss-against-state",
    "cost-of-runs",
}


class Page(HTMLParser):
    """What a test asks of a page: text, links, resources, specifications, table cells."""

    def __init__(self, path: Path):
        super().__init__()
        self.path, self.links, self.resources, self.words, self.scripts = path, [], [], [], {}
        self.ids, self._script = set(), None
        self.source = path.read_text(encoding="utf-8")
        self.feed(self.source)
        self.text = " ".join("".join(self.words).split())

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self.ids.add(values.get("id"))
        if tag not in ("b", "i", "code", "sub", "sup", "a"):
            self.words.append(" ")
        if tag == "a":
            self.links.append(values["href"])
        self.resources += [values[name] for name in ("src", "srcset", "data", "action") if name in values]
        if tag == "link":
            self.resources.append(values["href"])
        self._script = (values.get("id") or f"script-{len(self.scripts)}") if tag in ("script", "style") else None

    def handle_endtag(self, tag):
        if tag in ("script", "style"):
            self._script = None

    def handle_data(self, data):
        if self._script is None:
            self.words.append(data)
        else:
            self.scripts[self._script] = self.scripts.get(self._script, "") + data

    def specs(self) -> dict[str, dict]:
        return {
            name.removeprefix("spec-"): json.loads(text)
            for name, text in self.scripts.items()
            if name.startswith("spec-")
        }


@pytest.fixture(scope="module")
def page(ladder):
    return Page(ladder[1])


@pytest.fixture
def quick_fits(monkeypatch):
    """One method of fitting and no intervals, which take most of the time."""

    def isoflop(table, curves, bootstrap):
        return fit_study(table, curves, method="isoflop", bootstrap=0, conventions=False)

    monkeypatch.setattr("linnet.report.records.fit_study", isoflop)


@pytest.fixture
def write(monkeypatch, quick_fits):
    """Writes the page of a folder, without the pictures."""
    monkeypatch.setattr("linnet.report.shell.write_pictures", lambda folder, figure: None)
    return lambda folder, **options: Page(write_report(folder, **{"laws": False} | options))


def test_page_and_pictures_are_where_they_were_promised(ladder):
    folder, path = ladder
    assert path == folder / "report" / "index.html"
    source = path.read_text()
    assert "its band is the 95 %" in source and "Bands and bars are 95 %" in source and "Dashes lie" in source
    for name in FIGURES:
        assert (path.parent / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        svg = (path.parent / f"{name}.svg").read_text()
        assert svg.startswith("<svg") and svg.count("<path") > 10


def test_a_page_can_be_asked_for_without_further_laws(page):
    assert "Further laws" not in page.text


def test_page_needs_no_network(page):
    assert all(not re.match(r"(https?:)?//", link) for link in page.links + page.resources)
    style = page.scripts[next(name for name in page.scripts if ":root" in page.scripts[name])]
    assert "@import" not in style and "url(" not in style
    assert page.source.count("window.vegaEmbed=") == 1
    assert page.path.stat().st_size < 2_500_000


def test_every_figure_is_on_the_page_with_its_command(page):
    assert set(page.specs()) == FIGURES <= page.ids
    study, bootstrap = page.path.parents[1], f"--bootstrap {RESAMPLES}"
    assert page.text.count(f"redrawn by linnet report {study} {bootstrap}") == len(FIGURES)
    assert all("focus" in json.dumps(spec["params"]) for spec in page.specs().values())


def test_every_run_of_the_table_can_be_reached(ladder, page):
    folder, path = ladder
    runs = {run.name for run in (folder / "runs").iterdir()}
    assert {f"run-{run}" for run in runs} <= page.ids
    linked = {(path.parent / link).resolve().name for link in page.links if (path.parent / link).resolve().is_dir()}
    assert linked == runs


def test_marks_of_runs_name_runs_of_the_table(ladder, page):
    runs = {run.name for run in (ladder[0] / "runs").iterdir()}
    for spec in page.specs().values():
        named = {row["run"] for rows in spec["datasets"].values() for row in rows if row.get("run")}
        assert named <= runs
    drawn = page.specs()["isoflop-curves"]["datasets"].values()
    shown = [row for rows in drawn for row in rows if "folder" in row]
    assert len(shown) == len(runs) - 2
    assert all({"N", "D", "C", "loss", "folder"} <= row.keys() for row in shown)


def test_findings_agree_with_the_table(ladder, page):
    import pandas as pd

    table = pd.read_csv(ladder[0] / "table.csv")
    top = table[(table["budget"] == table["budget"].max()) & (table["status"] == "done")]
    best = top.loc[top["loss"].idxmin()]
    assert re.search(rf"1\.2×10¹² FLOPs.*{best['loss']:.4f} nats.*of {best['architecture']} ", page.text)
    assert re.search(r"2 of 72 runs .*\(1 diverged and 1 failed\)", page.text)
    assert "RuntimeError: out of memory" in page.text
    assert "72 runs of 3 architectures" in page.text


def test_laws_on_the_page_are_those_that_made_the_data(page):
    """L(C) of E + A/N^alpha + B/D^beta has N_opt ~ C^(beta/(alpha+beta)) up to what embeddings add to the cost."""
    rows = re.findall(r"<tr><th scope=\"row\"><span class=\"arch\">.*?</tr>", page.source)
    for row, name in zip(rows, ("llama", "tnl", "hgrn2"), strict=False):
        _, _, alpha, _, beta = LAWS[name][:5]
        assert name in row
        exponents = [float(x.replace("−", "-")) for x in re.findall(r'class="law">[^<]+<sup>([^<]+)</sup>', row)]
        assert -0.3 < exponents[0] < -0.1  # with or without a constant
        assert exponents[1] == pytest.approx(beta / (alpha + beta), abs=0.06)
        assert row.count(" to ") >= 6  # the 95 % intervals


def test_same_folder_gives_the_same_bytes(study, tmp_path, quick_fits, monkeypatch):
    write = shell.write_pictures  # of one figure with curves and marks, because the others are drawn by the same code

    def of_one(folder, figure):
        if figure.name == "isoflop-curves":
            write(folder, figure)

    monkeypatch.setattr(shell, "write_pictures", of_one)
    folder = study(architectures=("tnl",), budgets=(2e11, 4e11, 8e11), widths=(16, 24, 32, 48))
    copy, made = shutil.copytree(folder, tmp_path / "copy" / folder.name), []
    for path in (folder, copy):
        monkeypatch.chdir(path.parent)  # the page says the command as it was typed
        made.append(write_report(path.name).parent.resolve())
    first, second = made
    assert {path.name for path in first.iterdir()} == {path.name for path in second.iterdir()}
    assert {path.suffix for path in first.iterdir()} >= {".html", ".png", ".svg"}
    for path in first.iterdir():
        assert path.read_bytes() == (second / path.name).read_bytes(), path.name


def test_architectures_that_intervals_do_not_tell_apart_are_not_ranked(study, write):
    """Two names for one law: the page gives the lowest loss seen, no order, and no crossing without its interval."""
    folder = study(architectures=("tnl", "copy"), curves=False)
    fits = fit_study(load_study(folder)[0], method="isoflop", bootstrap=40, conventions=False)
    page = write(folder, fit=fits)
    text, shown = page.text, page.source
    assert "cannot be told apart (the intervals of all differences together hold 0): the lowest that each" in text
    assert "How fast the loss falls with compute cannot be told apart between tnl and copy" in text
    assert "falls faster" not in text and "has the lower loss" not in text
    assert "not by whether their bands overlap" in text  # beside the figure, whose bands may be separate
    cells = shown.count('class="refused"')
    counted = f"{cells} cell" if cells else "No law of the headline had to be refused."
    assert counted in text
    assert shown.index('id="loss-against-compute"') < shown.index("What you may conclude")
    assert "<details><summary>How the headline was chosen" in shown
    assert "How the headline was chosen" in text and "Where the laws of loss meet" in text


def test_two_budgets_give_no_compute_outside_the_data(study, write):
    """Two points fix a law, so its crossings have no interval, and those beyond the data have no compute."""
    folder = study(architectures=("llama", "tnl", "hgrn2", "lightnet"), budgets=(2e11, 8e11), curves=False)
    laws = fit_study(load_study(folder)[0], method="power", bootstrap=RESAMPLES, conventions=False)
    table = re.search(r'<table id="crossings".*?</table>', write(folder, fit=laws).source, re.S)[0]
    rows = [re.sub("<[^>]+>", "|", row).split("|") for row in table.split("<tr>")[2:]]
    outside = [row for row in rows if any("outside the data of both" in cell for cell in row)]
    assert outside and not any(crossing.inside for crossing in laws.crossings if crossing.C is None)
    for row in outside:
        cells = [cell for cell in row if cell]
        assert cells[3:5] == ["–", "–"] and "2×10¹¹ to 8×10¹¹ FLOPs" in cells[-1] and "no interval" in cells[-1], cells
    names = [tuple(cell for cell in row if cell in LAWS) for row in rows]
    assert names == [*itertools.combinations(("llama", "tnl", "hgrn2", "lightnet"), 2)], "in the order of the study"


def test_refused_optima_are_shown_as_refused(study, write):
    """Without the small models of an architecture its optima lie at the edge: N_opt is refused, L(C) still given."""
    folder = study(architectures=("llama", "tnl"), widths=(16, 24, 32, 48, 64, 80, 96, 128, 160), curves=False)
    _edit(folder, lambda row: row if row["architecture"] == "tnl" or int(row["params_non_embedding"]) > 9e4 else None)
    page = write(folder)
    assert "4 of 8 optima" in page.text
    assert re.search("Refused laws.*: Nopt and Dopt of llama", page.text)
    assert page.source.count('<span class="refused">') == 2
    assert re.search("The loss of tnl falls as .*C−", page.text)
    assert re.search("law of llama .*lowest losses", page.text)
    marks = [row for rows in page.specs()["isoflop-curves"]["datasets"].values() for row in rows]
    refused = [row for row in marks if row.get("refused because")]
    assert len(refused) == 4 and not any(row["inside"] for row in refused)
    assert {row["architecture"] for row in refused} == {"llama"}
    assert "training-curves" not in page.specs()
    reasons = re.search(r'<table id="refused-optima".*?</table>', page.source, re.S)[0]
    assert reasons.count("train smaller models") == 4 and "tnl" not in reasons, "not only where a pointer hovers"
    assert "no training curve" in page.text
    # A run's dot lies beneath a refused optimum and would fill a hollow diamond.
    panels = page.specs()["isoflop-curves"]["concat"]
    looks = [layer["mark"] for panel in panels for layer in panel["layer"] if layer["mark"]["type"] == "point"]
    assert sorted((look["shape"], look["filled"]) for look in looks) == [(CROSS, False), ("diamond", True)]


def test_sizes_of_another_method_than_the_headline_are_named(study, write, capsys):
    """Three sizes per budget have no parabola, but a surface: L(C) of hgrn2 runs through lowest losses all the same."""
    folder = study(architectures=("tnl", "hgrn2"), curves=False)
    kept = re.compile("tnl|-24-|-48-|-96-")
    _edit(folder, lambda row: row if kept.search(row["run"]) else None)
    fits = fit_study(load_study(folder)[0], bootstrap=0, conventions=False)
    assert (fits.headline, fits.allocation) == ("isoflop", "parametric") and not fits["hgrn2"].N_opt.refused
    named = r"N_?opt and D_?opt come from the method parametric, which gives them for 2 of 2 .*, isoflop for 1"
    page = write(folder, fit=fits)
    assert re.search(named, page.text)
    assert "law of hgrn2 runs through the lowest losses seen" in page.text and "The loss of tnl falls as" in page.text
    assert page.source.count("through the lowest losses seen</div>") == 1
    assert "The best model size grows as Ca with a between" in page.text
    assert "The laws follow from the surface L(N, D) fitted to all runs, the points from a parabola" in page.text
    methods = page.source[page.source.index("The other methods") :]
    assert f"{fits['tnl'].methods['isoflop'].N_opt.exponent:.3f}" in methods
    show_summary(Console(width=200), fits)
    shown = capsys.readouterr().out
    assert re.search(named, shown)
    assert "IsoFLOP, exponents with 95 %" in shown


@pytest.fixture
def tnl_and_hgrn2(study):
    """A study folder, and its fits by parabolas with intervals: a of tnl 0.40 to 0.60, of hgrn2 0.45 to 0.65."""
    folder = study(architectures=("tnl", "hgrn2"), widths=(16, 24, 32, 48), budgets=(2e11, 4e11, 8e11), curves=False)
    table, curves, _ = load_study(folder)
    fits = fit_study(table, curves, method="isoflop", bootstrap=0, conventions=False)
    for fit, a in zip(fits.values(), (0.5, 0.55), strict=True):
        assert not fit.N_opt.refused
        fit.best.bootstrap.resamples = 100
        fit.N_opt.exponent, fit.N_opt.intervals = a, {"a": (a - 0.1, a + 0.1)}
        fit.D_opt.exponent, fit.D_opt.intervals = a, {"b": (a - 0.1, a + 0.1)}
    return folder, fits


def test_laws_of_optimal_size_are_stated_with_their_intervals(tnl_and_hgrn2, write):
    folder, fits = tnl_and_hgrn2
    shown = "between 0.50 and 0.55 (architectures cannot be told apart)"
    text = write(folder, fit=fits).text
    assert f"grows as Ca with a {shown}, and the tokens to train it on as Cb with b {shown}." in text
    fits["hgrn2"].N_opt.exponent = 0.5
    assert "with a = 0.50 for both (95 % intervals within 0.40 to 0.65)" in write(folder, fit=fits).text


def test_wide_intervals_of_optimal_size_are_no_finding(tnl_and_hgrn2, write):
    folder, fits = tnl_and_hgrn2
    fits["hgrn2"].N_opt.intervals = {"a": (0.04, 0.93)}
    unknown = "How the best model size and its tokens grow with compute is unknown for"
    text = write(folder, fit=fits).text
    assert "grows as Ca with a = 0.50 for tnl (95 %: 0.40 to 0.60), and the tokens" in text
    assert f"{unknown} hgrn2 (the 95 % interval of a, 0.040 to 0.93, is wider than 0.5)." in text
    fits["tnl"].D_opt.intervals = {}
    text = write(folder, fit=fits).text
    assert "The best model size grows" not in text
    assert f"{unknown} tnl (too few resamples give b for an interval); for hgrn2 (the 95 %" in text


def test_sizes_at_the_edge_say_nothing_of_the_best_ones(study, write):
    """Where no optimum lies between the sizes, the smallest is the best seen at every budget: no N_opt as C^0."""
    folder = study(architectures=("llama", "tnl"), widths=(64, 80, 96, 128, 160), curves=False)
    table, curves, _ = load_study(folder)
    laws = fit_study(table, curves, method="power", bootstrap=0, conventions=False)
    page = write(folder, fit=laws)
    assert "The best model size grows" not in page.text and "falls faster" not in page.text
    assert re.search("laws of llama and tnl .*lowest losses", page.text)


def test_unfinished_study_of_one_architecture_written_elsewhere(study, write, tmp_path):
    folder = study(architectures=("tnl",), budgets=(2e11, 4e11, 8e11))
    (folder / "plan.json").write_text(json.dumps({"runs": [{"run": f"run-{index}"} for index in range(25)]}))
    page = write(folder, out=tmp_path / "elsewhere" / "tnl.html")
    assert page.path == tmp_path / "elsewhere" / "tnl.html"
    assert "7 of 25 planned runs" in page.text
    assert re.search("The loss of tnl falls as .*C−", page.text)
    assert set(page.specs()) == FIGURES
    linked = [link for link in page.links if (page.path.parent / link).is_dir()]
    assert len(linked) == 18 and not any(Path(link).is_absolute() for link in page.links)


def test_too_few_budgets(study, write):
    page = write(study(architectures=("tnl", "hgrn2"), budgets=(2e11,), curves=False))
    assert re.search("Refused laws.*: L, Nopt and Dopt of tnl and hgrn2", page.text)
    assert {"isoflop-curves", "loss-against-state", "cost-of-runs"} <= set(page.specs())


def test_two_budgets_have_reasons_in_place_of_intervals(study):
    records = read_study(study(architectures=("tnl", "hgrn2"), budgets=(2e11, 4e11), widths=(16, 24, 32), curves=False))
    table, figure = law_table(records), laws(records)
    assert table.count("points of L(C) leave nothing to show the noise") == 2
    assert table.count("the fit cannot be checked") == 2
    assert figure is not None and "no law has an interval" in figure.caption and "its band is" not in figure.caption
    sizes = optima(records)
    assert sizes is not None and "Bands" not in sizes.caption and "Dashes" not in sizes.caption


def test_a_whole_envelope_is_not_called_that_of_sizes_between_others(study):
    several = training_curves(read_study(study(architectures=("tnl",), budgets=(2e11, 4e11))))
    two = training_curves(read_study(study(architectures=("hgrn2",), budgets=(2e11, 4e11), widths=(16, 24))))
    one = training_curves(read_study(study(architectures=("llama",), budgets=(2e11,), widths=(16,))))
    assert several is not None and several.caption.endswith("a larger model were worse.")
    assert two is not None and "For hgrn2 it is drawn whole" in two.caption and "were worse" not in two.caption
    assert one is not None and "envelope" not in one.caption


def test_an_architecture_of_which_nothing_ended_well(study, write):
    folder = study(architectures=("tnl", "hgrn2"), budgets=(2e11, 4e11, 8e11), widths=(16, 24, 32, 48, 64))
    _edit(folder, lambda row: row | {"status": "diverged", "loss": ""} if row["architecture"] == "hgrn2" else row)
    page = write(folder)
    assert re.search(r"15 of 30 runs .*\(15 diverged\)", page.text)
    assert re.search("The loss of tnl falls as .*C−", page.text)


def test_an_architecture_that_diverged_at_once_has_no_panel_of_curves(study, quick_fits):
    """Its only points lie below the compute that is drawn; a panel without a layer cannot be drawn as a picture."""
    records = read_study(study(architectures=("tnl", "hgrn2"), budgets=(2e11,), widths=(16, 24)))
    early = records.curves["architecture"] == "hgrn2"
    records.curves.loc[early, "flops"] = 1e3
    figure = training_curves(records)
    assert figure is not None and [panel["title"]["text"] for panel in figure.spec["concat"]] == ["tnl"]
    records.curves["flops"] = 1e3
    assert training_curves(records) is None


def test_runs_with_the_same_state_are_joined_by_their_mean(study, quick_fits):
    records = read_study(study(architectures=("tnl",), budgets=(2e11,), widths=(16, 24)))
    records.table = pd.concat([records.table, records.table.assign(loss=records.table["loss"] + 0.2)])
    spec = state_size(records).spec
    [line] = [layer["data"]["name"] for layer in spec["layer"] if layer["mark"]["type"] == "line"]
    losses = [row["value"] for row in spec["datasets"][line]]
    assert losses == pytest.approx([loss + 0.1 for loss in records.table["loss"][:2]], abs=1e-4)


def test_no_run_ended_well(study, write):
    folder = study(architectures=("tnl",), budgets=(2e11,), widths=(16, 24))
    _edit(folder, lambda row: row | {"status": "failed", "loss": ""})
    page = write(folder)
    assert "finite loss" in page.text
    assert "No laws" in page.text


def test_laws_of_the_parametric_surface(study, write):
    """Its L(C) has a constant; without parabolas there are no points of budgets to draw, but the laws are."""
    folder = study(architectures=("tnl", "hgrn2"), curves=False, noise=0.0005)
    table, curves, _ = load_study(folder)
    page = write(folder, fit=fit_study(table, curves, method="parametric", bootstrap=0, conventions=False))
    assert re.search(r'class="law">0\.\d+ \+ \d+ C<sup>−0\.1\d+</sup>', page.source)
    assert "L(C) = E + β C" in page.source and "for the loss the other form" not in page.text
    assert re.search("twice the compute of .* takes", page.text) and "by the parametric surface L(N, D)" in page.text
    assert "isoflop-curves" not in page.specs()
    for name in ("optimal-size-and-tokens", "loss-against-compute"):
        rows = [row for rows in page.specs()[name]["datasets"].values() for row in rows]
        assert {row["architecture"] for row in rows} == {"tnl", "hgrn2"} and not any(row.get("run") for row in rows)


def test_study_at_fixed_tokens_has_no_budgets(study, write):
    folder = study(architectures=("tnl",), budgets=(2e11, 4e11), widths=(16, 24, 32, 48))
    _edit(folder, lambda row: row | {"budget": row["flops"]})
    config = yaml.safe_load((folder / "study.yaml").read_text())
    config["tokens"] = [1e6]
    del config["budgets"]
    (folder / "study.yaml").write_text(yaml.safe_dump(config))
    page = write(folder)
    assert re.search("lowest held-out loss seen is .*of tnl", page.text)
    assert "Lines join" not in page.text


def test_seeds_of_a_study_at_fixed_tokens_are_no_budget(study, write):
    """Equal seeds spend equal FLOPs; the lowest loss is that of all runs, and it is not said that intervals hold 0."""
    folder = study(architectures=("tnl", "hgrn2"), budgets=(2e11,), widths=(16,), curves=False)
    config = yaml.safe_load((folder / "study.yaml").read_text())
    (folder / "study.yaml").write_text(yaml.safe_dump({**config, "tokens": [1e6], "budgets": []}))
    with open(folder / "table.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    # The architecture of more FLOPs per token has the higher loss.
    change = {"tnl": {"flops": 3e9, "loss": 4.3}, "hgrn2": {"flops": 1e9, "loss": 4.1}}
    seeds = [
        row | change[row["architecture"]] | {"seed": seed, "run": f"{row['run']}{seed}"}
        for row in rows
        for seed in range(3)
    ]
    with open(folder / "table.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, list(seeds[0]))
        writer.writeheader()
        writer.writerows(row | {"budget": row["flops"], "loss": row["loss"] + 0.01 * row["seed"]} for row in seeds)
    text = write(folder).text
    assert "At the largest budget" not in text
    assert re.search(
        r"Over all runs, the losses of tnl and hgrn2 cannot be told apart \(there are no .*\): .*4.1000 and 4.3000",
        text,
    ), "in the order of the study, not of the losses"


def test_control_characters_of_names_are_spelled_out(tmp_path):
    """They would move the cursor of a terminal, turn the direction of a line, and end the process that draws."""
    lines = ["run,architecture,params_non_embedding,tokens,flops,loss"]
    for name in ("a\x1b[31mb", " c\u202ed"):
        lines += [f"r{n:g}{name},{name},{n},{1e12 / (6 * n)},1e12,{1 + 30 / n**0.35}" for n in (1e4, 2e4, 4e4, 8e4)]
    (tmp_path / "table.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    study = read_study(tmp_path, bootstrap=0)
    assert sorted(study.architectures) == ["a\\x1b[31mb", "c\\u202ed"] == sorted(study.fits)
    assert "a\\x1b[31mb" in " ".join(findings(study))
    drawn = shell._printable({"data": [{"name": "a\x07", "n": 1}], "title": "two\nlines"})
    assert drawn == {"data": [{"name": "a\\x07", "n": 1}], "title": "two\nlines"}


def test_hand_made_table_without_study_or_runs(tmp_path, write):
    """The least that a report is made of: a table."""
    lines = ["run,architecture,params_non_embedding,tokens,flops,loss"]
    for budget in (1e12, 3e12, 9e12):
        for n in (1e4, 2e4, 4e4, 8e4, 1.6e5):
            d = budget / (6 * n)
            lines.append(f"r{n:g}-{budget:g},<b>mine</b>,{n},{d},{budget},{1 + 30 / n**0.35 + 200 / d**0.37}")
    (tmp_path / "table.csv").write_text("\n".join(lines) + "\n")
    page = write(tmp_path)
    assert "study.yaml" in page.text
    assert "&lt;b&gt;mine&lt;/b&gt;" in page.source and "<b>mine</b>" not in re.sub(
        r"<script.*?</script>", "", page.source, flags=re.S
    )
    assert page.specs().keys() == {"loss-against-compute", "isoflop-curves", "optimal-size-and-tokens"}


@pytest.mark.parametrize(
    "spoil, problem",
    [
        (lambda folder: shutil.rmtree(folder), "there is no such folder"),
        (lambda folder: (folder / "table.csv").unlink(), "table.csv: there is no such file"),
        (lambda folder: (folder / "table.csv").rename(folder / "config.yaml"), "this is one run; `linnet runs tail"),
        (lambda folder: (folder / "table.csv").write_text("run,architecture\n"), "column 'loss' is not there"),
        (lambda folder: (folder / "table.csv").write_bytes(b"\xff\xfe\x00\x80"), "not a CSV table"),
    ],
)
def test_what_is_no_study_is_said_before_any_work(study, spoil, problem):
    folder = study(architectures=("tnl",), budgets=(2e11,), widths=(16,), curves=False)
    spoil(folder)
    with pytest.raises(ConfigError, match=problem):
        write_report(folder)
    assert not (folder / "report").exists()


def test_out_must_be_a_page(study, tmp_path):
    with pytest.raises(ConfigError, match="index.html"):
        write_report(study(architectures=("tnl",), budgets=(2e11,), widths=(16,), curves=False), out=tmp_path / "here")


def test_missing_extra_is_named(study, monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "altair" else real(name))
    with pytest.raises(ConfigError, match=r"altair: not installed; .*\[study\]"):
        write_report(study(architectures=("tnl",), budgets=(2e11,), widths=(16,), curves=False))


def test_numbers_that_are_not_finite_do_not_reach_the_page(ladder, page):
    for spec in page.specs().values():
        for rows in spec["datasets"].values():
            values = [value for row in rows for value in row.values() if isinstance(value, float)]
            assert all(math.isfinite(value) for value in values)


def _edit(folder: Path, change) -> None:
    """Changes the rows of the table; a row that becomes None is dropped."""
    import csv

    with open(folder / "table.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    rows = [new for row in rows if (new := change(row)) is not None]
    with open(folder / "table.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def test_a_run_that_nobody_can_read_hides_no_other(tmp_path, write):
    """Among loose runs there may be one that was begun with another release, whose model this one does not know."""
    for name, model, done in (("good", {}, True), ("odd", {"layout": "unheard-of x2"}, False)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text(yaml.safe_dump({"model": model, "architecture": name}))
        numbers = {"params_non_embedding": 1e4, "tokens": 1e6, "flops": 6e10, "loss": 2.5}
        if done:
            (tmp_path / name / "result.json").write_text(json.dumps({"status": "done"} | numbers))
    page = write(tmp_path)
    assert "nats per token, of good" in page.text and "1 unfinished" in page.text
    assert not read_study(tmp_path).problems[1:]
    for name, text in (("empty", ""), ("damaged", "model: ["), ("no-run", "")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text(text)
        if name != "no-run":
            (tmp_path / name / "result.json").write_text(json.dumps({"status": "done"} | numbers))
    told = [problem for problem in read_study(tmp_path).problems if "left out" in problem]
    assert [problem.split()[0] for problem in told] == ["damaged", "empty"]


@pytest.mark.parametrize("other", [{"tokenizer": {"kind": "bpe"}}, {"source": ["b.txt"]}, "tokenizer.json", None])
def test_losses_of_other_texts_or_tokenizers_are_in_no_order(tmp_path, write, other):
    for name, loss in (("tnl", 2.5), ("llama", 5.0)):
        (tmp_path / name).mkdir()
        data = {"source": ["a.txt"], "tokenizer": {"kind": "byte"}}
        if name == "llama":
            data |= other if isinstance(other, dict) else {"packing": "cross"}
            if other == "tokenizer.json":  # the same settings, and a text that changed
                (tmp_path / name / other).write_text("{}")
        config = {"model": {}, "architecture": name, "data": data}
        (tmp_path / name / "config.yaml").write_text(yaml.safe_dump(config))
        numbers = {"params_non_embedding": 1e4, "tokens": 1e6, "flops": 6e10, "loss": loss, "state_bytes": 64}
        (tmp_path / name / "result.json").write_text(json.dumps({"status": "done"} | numbers))
    text = write(tmp_path).text
    assert ("losses of these runs do not compare: the runs have 2 settings of `data`" in text) == bool(other)
    assert ("nats per token" in "".join(findings(read_study(tmp_path)))) == (other is None)
    assert ("the smallest state" in text) == (other is None)


def test_a_table_whose_tokens_have_other_lengths_is_in_no_order(study):
    folder = study(architectures=("tnl", "llama"), widths=(16, 24, 32), curves=False)
    table, _, _ = load_study(folder)
    fits = fit_study(table, method="power", bootstrap=0, conventions=False)
    bytes_per_token = {"tnl": 1.0, "llama": 1.0}
    for tokens, told in ((1.02, False), (3.0, True)):
        bytes_per_token["llama"] = tokens
        rows = table.assign(bits_per_byte=table["loss"] / table["architecture"].map(bytes_per_token) / np.log(2))
        rows.attrs = table.attrs
        shown = conclude(as_study(Path("table.csv"), rows, fits))
        assert ("a token has 1 to 3 bytes" in shown["conclusions"][0]) == told
        assert ("L" in shown["orders"]) != told


def test_the_smallest_state_counts_losses_that_are_not_told_apart(study):
    """A state is not called the smallest because a run has a loss that is lower by less than the intervals."""
    folder = study(architectures=("tnl", "copy"), curves=False)
    one = read_study(folder, fit=fit_study(load_study(folder)[0], method="isoflop", bootstrap=40, conventions=False))
    assert not orders(one.fits)["L"].apart
    one.table["state_bytes"] = one.table["architecture"].map({"tnl": 10_000, "copy": 100})
    one.table.loc[one.table["architecture"] == "copy", "loss"] *= 1.03
    assert "the smallest state is that of <b>copy</b>" in _state(one)


def test_a_damaged_result_hides_no_other_run(study, write):
    folder = study(architectures=("tnl",), budgets=(2e11, 4e11, 8e11), widths=(16, 24, 32, 48), curves=False)
    sound, damaged, *_ = sorted((folder / "runs").iterdir())
    part = {"source": "books", "digest": "0123", "tokens": 1000, "passes": 0.5, "validation_loss": 2.5}
    (sound / "result.json").write_text(json.dumps({"status": "done", "sources": [part]}))
    (damaged / "result.json").write_text('{"status": "do')
    page = write(folder)
    assert "books (0123)" in page.text and damaged.name in page.text


def test_mixers_that_are_counted_by_their_weights_are_named(study, write, monkeypatch):
    monkeypatch.setattr("linnet.report.tables.convention_table", lambda study: "<table></table>")
    folder = study(architectures=("tnl",), budgets=(2e11, 4e11, 8e11), widths=(16, 24, 32, 48))
    assert "by weights alone" not in write(folder).text
    first = min((folder / "runs").iterdir())
    (first / "result.json").write_text(json.dumps({"status": "done", BY_WEIGHTS: ["mine"]}))
    assert "The count of paper 000 takes the mixer mine by weights alone" in write(folder).text
    assert any("the mixer mine by weights alone" in note for note in load_study(folder)[2])


@pytest.mark.parametrize("runs", [2, 4])
def test_equal_speeds_of_few_runs_are_not_ranked(runs):
    told = 0
    for seed in range(60):
        noise = np.exp(0.05 * np.random.default_rng(seed).normal(size=2 * runs))
        flops = 1e15 * 3.0 ** np.arange(runs)
        rows = {"architecture": ["a"] * runs + ["b"] * runs, "flops": [*flops, *flops]}
        rows["seconds"] = np.array(rows["flops"]) / 1e10 * noise
        told += "cannot be told apart" not in _speed(SimpleNamespace(usable=pd.DataFrame(rows)))
    assert told <= 3, f"{told} of 60 pages rank equal speeds"
    rows["seconds"] = rows["seconds"] * np.repeat([1, 3], runs)
    if runs > 2:
        assert "times as long" in _speed(SimpleNamespace(usable=pd.DataFrame(rows)))
