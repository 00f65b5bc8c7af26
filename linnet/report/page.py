"""The report of a study: one HTML page that needs no network, and a PNG and an SVG file of each figure beside it."""

import functools
import json
import re
from html import escape
from importlib.resources import files
from pathlib import Path

import yaml

import linnet
from linnet.config import ConfigError
from linnet.report import style, tables
from linnet.report.figures import draw
from linnet.report.findings import findings, summary
from linnet.report.marks import Figure
from linnet.report.records import Study, read_study
from linnet.study.fit import StudyFit


def write_report(
    study_folder: str | Path, out: str | Path | None = None, *, fit: StudyFit | None = None, bootstrap: int = 1000
) -> Path:
    """Writes the report of a study from its records alone; nothing is trained.

    Args:
        study_folder: a folder that `linnet study` made: study.yaml, table.csv, runs/.
        out: the page; default `report/index.html` in the study folder. The figures go beside it.
        fit: the laws, where the caller has fitted them to this folder already.
        bootstrap: resamples for the 95 % intervals of the laws; 0 for none.

    Returns:
        The path of the page.

    Raises:
        ConfigError: the folder or its table is not there or unusable, or the extra `study` is not installed.
    """
    _check_extra()
    study = read_study(study_folder, fit, bootstrap)
    page = Path(out) if out is not None else Path(study_folder) / "report" / "index.html"
    if page.suffix.lower() not in (".html", ".htm"):
        raise ConfigError([f"--out {str(page)!r}: name a page, for example {str(page / 'index.html')!r}"], "report")
    page.parent.mkdir(parents=True, exist_ok=True)
    figures = draw(study)
    for figure in figures:
        _write_pictures(page.parent, figure)
    page.write_text(_page(study, figures, page.parent), encoding="utf-8")
    return page


def _check_extra() -> None:
    missing = []
    for module in ("altair", "vl_convert", "pandas", "scipy"):
        try:
            __import__(module)
        except ImportError:
            missing.append(module)
    if missing:
        fix = "the report needs the extra `study`: pip install 'linnet[study]'"
        raise ConfigError([f"{name}: not installed; {fix}" for name in missing], "report")


def _write_pictures(folder: Path, figure: Figure) -> None:
    import vl_convert

    themed = figure.spec | {"config": style.theme(font=style.PICTURE_FONT), "padding": 12}
    svg = vl_convert.vegalite_to_svg(themed, vl_version=_vegalite())
    svg = re.sub(r'(id="clip|url\(#clip)(\d+)', _Renumber(), svg)  # counted through the process by vega
    (folder / f"{figure.name}.svg").write_text(svg, encoding="utf-8")
    (folder / f"{figure.name}.png").write_bytes(vl_convert.svg_to_png(svg, scale=2))


class _Renumber:
    """Counts ids from 0 in each file, so that the same figure is the same file."""

    def __init__(self):
        self.known: dict[str, int] = {}

    def __call__(self, match: re.Match) -> str:
        return match[1] + str(self.known.setdefault(match[2], len(self.known)))


@functools.cache
def _bundle() -> str:
    """vega, vega-lite and vega-embed as one script."""
    import vl_convert

    return vl_convert.javascript_bundle(vl_version=_vegalite())


def _vegalite() -> str:
    """The vega-lite release that Altair writes for, as vl-convert names it: 6.4."""
    import altair as alt

    return ".".join(alt.SCHEMA_VERSION.removeprefix("v").split(".")[:2])


def _page(study: Study, figures: list[Figure], folder: Path) -> str:
    command = f"linnet report {study.folder.name}"
    title = f"Scaling laws: {study.name}"
    themes = {"light": style.theme(), "dark": style.theme(dark=True)}
    parts = [
        "<!DOCTYPE html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title>",
        f"<style>{_resource('page.css')}</style></head><body><main>",
        f"<h1>{escape(title)}</h1>",
        f'<p class="lead">{summary(study)}</p>',
        *(f'<p class="notice">{escape(problem)}.</p>' for problem in study.problems),
        "<h2>What was found</h2>",
        f'<ul class="findings">{"".join(f"<li>{line}</li>" for line in findings(study))}</ul>',
        _key(study),
        *_laws(study),
        *(_figure(figure, command) for figure in figures),
        *_conventions(study),
        *_runs(study, folder),
        *_making(study, command),
        "</main>",
        f'<script type="application/json" id="themes">{_json(themes)}</script>',
        f"<script>{_bundle()}</script>",
        f"<script>{_resource('page.js')}</script>",
        "</body></html>\n",
    ]
    return "\n".join(parts)


def _key(study: Study) -> str:
    """The sticky bar that names the colours and brings one architecture forward in all figures."""
    buttons = "".join(
        f'<button type="button" aria-pressed="false" data-name="{escape(name)}">{tables.swatch(study, name)}</button>'
        for name in study.architectures
    )
    return f'<div class="key"><span>Bring forward</span>{buttons}</div>'


def _laws(study: Study) -> list[str]:
    if not study.fits:
        return []
    method = study.fit.headline
    preferred = "" if method == "isoflop" else ", since too few optima lie between the sizes for the IsoFLOP method"
    caption = (
        f"Power laws as in paper 000's Table 3, C in FLOPs, by the {_METHODS[method]}{preferred}. Under each law stand "
        "the 95 % bootstrap intervals of its exponent and coefficient, its value at the largest compute, and for the "
        "loss the same law with an irreducible constant. Exponent and coefficient move together, so compare values "
        "rather than coefficients. The held-out error is that of a law fitted to less compute. "
        f"<code>linnet fit {escape(study.folder.name)} --json</code> prints all of it, by all methods and in full."
    )
    return ["<h2>The laws</h2>", f'<p class="caption">{caption}</p>', tables.law_table(study)]


_METHODS = {
    "isoflop": "IsoFLOP method (the optimum of a parabola in each budget)",
    "power": "lowest losses of each budget",
    "envelope": "envelope of the training curves",
    "parametric": "parametric surface L(N, D)",
}


def _figure(figure: Figure, command: str) -> str:
    return (
        f"<section><h2>{escape(figure.title)}</h2>"
        f'<p class="caption">{escape(figure.caption)}</p>'
        f'<div class="figure" id="{figure.name}"></div>'
        f'<noscript><img src="{figure.name}.svg" alt="{escape(figure.title)}" width="1080"></noscript>'
        f'<script type="application/json" id="spec-{figure.name}">{_json(figure.spec)}</script>'
        f'<p class="files"><a href="{figure.name}.png">PNG</a> · <a href="{figure.name}.svg">SVG</a> · '
        f"redrawn by <code>{escape(command)}</code></p></section>"
    )


def _conventions(study: Study) -> list[str]:
    table = tables.convention_table(study)
    if not table:
        return []
    caption = (
        "Exponents depend on what is counted: embeddings are a large part of small models, and 6ND leaves out "
        "everything that is not a weight. Compare architectures, and papers, under one convention only."
    )
    return ["<h2>How counting changes the exponents</h2>", f'<p class="caption">{caption}</p>', table]


def _runs(study: Study, folder: Path) -> list[str]:
    lost = tables.left_out_table(study, folder)
    parts = ["<h2>Runs that took no part in the fits</h2>", lost] if lost else []
    caption = (
        "Every number above comes from these runs. A name leads to the run's folder (config.yaml, metrics.jsonl, "
        "result.json). Clicking a point in a figure leads here, clicking a column sorts, and pointing at a number "
        "shows all its digits."
    )
    return [
        *parts,
        "<h2>All runs</h2>",
        f'<p class="caption">{caption}</p>',
        f'<div class="tall">{tables.run_table(study, folder)}</div>',
    ]


def _making(study: Study, command: str) -> list[str]:
    import altair
    import vl_convert

    versions = {"altair": altair.__version__, "vega-lite": _vegalite(), "vl-convert": vl_convert.__version__}
    versions = {"linnet": linnet.__version__, **versions}
    facts = {
        "Redraw": f"<code>{escape(command)}</code>, from study.yaml, table.csv and the run folders alone",
        "Seeds": escape(", ".join(str(seed) for seed in study.seeds)),
        "Trained with": escape(_pairs({name: " or ".join(values) for name, values in study.environments.items()})),
        "Drawn with": escape(_pairs(versions)),
        "Intervals": escape(_bootstrap(study)),
    }
    facts = {name: text for name, text in facts.items() if text}
    items = "".join(f"<dt>{escape(name)}</dt><dd>{text}</dd>" for name, text in facts.items())
    parts = ["<h2>How this was made</h2>", f"<dl>{items}</dl>"]
    if study.config:
        text = yaml.safe_dump(study.config, sort_keys=False, allow_unicode=True, width=100)
        parts.append(f"<details><summary>study.yaml</summary><pre>{escape(text)}</pre></details>")
    return parts


def _pairs(values: dict[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def _bootstrap(study: Study) -> str:
    made = [fit.best.bootstrap for fit in study.fits.values() if fit.best.bootstrap.resamples]
    if not made:
        return ""
    return f"{made[0].resamples} bootstrap resamples ({made[0].scheme}), seed {made[0].seed}"


def _json(value) -> str:
    """JSON that may stand inside a script element."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False).replace("</", "<\\/")


def _resource(name: str) -> str:
    return files("linnet.report").joinpath(name).read_text(encoding="utf-8")
