"""The page of a denoiser, from a run folder alone."""

import re
from dataclasses import replace

from typer.testing import CliRunner

from linnet.cli import app
from linnet.evaluate.results import Evaluation, Result
from linnet.report.downstream import over_steps
from linnet.train import read_training, train
from linnet.vision.report import _denoiser_scores, _samples, read_denoiser


def record(extractor: str, step: int, value: float) -> Evaluation:
    results = (
        Result("samples", f"fd-{extractor}", value, better="lower", n=100),
        Result("samples", f"kd-{extractor}", 0.125, better="lower", n=100),
        Result("samples", "asked_class", 0.9, n=100),
        Result("samples", "memorised", 0.5, better="lower", n=100),
        *(
            [Result("samples", "precision", 0.71875, n=100), Result("samples", "recall", 0.25, n=100)]
            if step > 2
            else []
        ),
    )
    asked = {"extractor": extractor, "samples": 100, "sampler": "ddim", "steps": 50, "guidance": 2.0}
    real = {"images": 1500, "held_out": 297, f"fd-{extractor}": 1.0625}
    detail = {"real": real, "kernel_error": 0.01, "samples_per_second": 12.0}
    return Evaluation("samples", {"step": step}, asked, results, detail, "abc")


def test_a_page_of_a_denoiser(tmp_path):
    values = {
        "objective": "diffusion",
        "model": {"recipe": "dit-8px", "num_layers": 1},
        "data": {"source": "digits"},
        "batch_size": 16,
        "steps": 4,
        "run": {"device": "cpu", "log_every": 1, "evaluate_every": 2, "pictures": 1},
    }
    run = train(read_training(values), tmp_path, tmp_path / "cache")
    for one in (record("first", 4, 5.5), record("second", 4, 77.25), record("first", 2, 9.25)):
        one.save(run.path)
    replace(record("first", 4, 3.875), kind="images").save(run.path)  # another kind is not shown
    done = CliRunner().invoke(app, ["report", str(run.path)])
    assert done.exit_code == 0, done.output
    page = (run.path / "report" / "index.html").read_text()
    assert len(re.findall(r"data:image/png", page)) == 3  # the last picture, and both in the strip
    assert "0, 1, 2, 3, 4, 5, 6, 7, 8, 9" in page and "step 2<" in page and "750 to 999" in page
    assert (run.path / "report" / "training.png").is_file()
    first, second = re.findall(r"<table.*?</table>", page, re.S)[:2]  # one table per extractor: never in one column
    assert first.index("9.250") < first.index("5.500") and "77.250" not in first and "77.250" in second
    assert first.count("71.9%") == first.count("25.0%") == 1
    assert "90.0%" in first and "1.062" in page and "3.875" not in page
    found = read_denoiser(run.path)
    (notice,) = _denoiser_scores(replace(found, records=[]))
    assert "linnet evaluate samples" in notice
    row = {"step": 2, "evaluation": "samples", "metrics": {"fd-x": 3.5}, "shown": ["fd-x"], "chance": {}}
    measured = replace(found, records=[], evaluations=[row, row | {"step": 4, "metrics": {"fd-x": float("nan")}}])
    assert _denoiser_scores(measured) == []  # the training has measured samples itself
    values = [one["value"] for rows in over_steps(measured).spec["datasets"].values() for one in rows]
    assert values == [3.5] and over_steps(found) is None
    (notice,) = _samples(replace(found, pictures={}))
    assert "linnet sample" in notice
