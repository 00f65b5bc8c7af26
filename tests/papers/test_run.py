"""Items are checked, run and resumed; their tables follow from the run folders alone."""

import io
import json
import re
import shutil
from dataclasses import replace

import pytest
import torch
from reproduce_items import LIBRARY, make_items
from rich.console import Console

from linnet.config import ConfigError
from linnet.papers.cli import print_result
from linnet.papers.item import Step
from linnet.papers.library import Library, read_library
from linnet.papers.markdown import write_markdown
from linnet.papers.page import write_reproductions
from linnet.papers.prepare import prepare
from linnet.papers.run import COSTS, RESULT, read_results, run
from linnet.papers.table import Request, table
from linnet.papers.verbs import train as train_verb
from linnet.papers.verbs.base import Outcome, Record
from linnet.study.sensitivity import UNKNOWN
from linnet.train import read_training, train


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return make_items(tmp_path_factory.mktemp("library"))


@pytest.fixture(scope="module")
def trained(library, tmp_path_factory):
    """The training item at full size, run: (request, result)."""
    request = Request(scale="full", out=tmp_path_factory.mktemp("out"))
    (work,) = prepare(library, library.find("900", ["table1"]), request)
    return request, run(work)


def test_the_table_holds_printed_and_measured_numbers(trained):
    _, result = trained
    cell = result["rows"]["tnl"]["loss"]
    assert cell["printed"] == 2.0 and set(cell["values"]) == {"0", "1"}
    low, high = cell["interval"]
    assert low < cell["measured"] < high and cell["inside"] is False
    assert result["rows"]["attention"]["loss"]["corrected"] == 2.4
    assert "printed_difference" not in result["rows"]["tnl"]["loss"]  # the base is corrected, so no paper prints it
    assert result["rows"]["tnl"]["loss"]["corrected_difference"] == pytest.approx(2.0 - 2.4)
    assert result["rows"]["tnl"]["parameters"]["values"].keys() == {"exact"}  # equal for all seeds
    assert "measured" not in result["rows"]["missing"]["loss"]


def test_verdicts_and_outcome(trained):
    _, result = trained
    found = {one["claim"]: one for one in result["verdicts"]}
    assert found["0 < tnl on parameters"]["verdict"] == "holds"
    assert found["missing < tnl on loss"]["verdict"] == "not run"
    assert found["tnl < attention on loss"]["verdict"] in ("holds", "does not hold", "cannot be told")
    outcome = result["outcome"]
    assert outcome["says"] == "not reproduced" and (outcome["compared"], outcome["printed"]) == (2, 3)
    assert outcome["outside"] == ["tnl, loss", "attention, loss"] and not outcome["not_measured"]


def test_a_full_form_is_reproduced_by_the_numbers_of_its_own_runs(library, trained):
    """A row that no step trains does not stand in the way, a run that is not finished does."""
    request, _ = trained
    (work,) = prepare(library, library.find("900", ["table1"]), request)
    records = [
        Record(row, seed, {"loss": loss}) for row, loss in (("tnl", 2.01), ("attention", 2.41)) for seed in (0, 1)
    ]
    outcome = table(work, {"train": Outcome(records)})["outcome"]
    assert outcome == {"says": "reproduced", "compared": 2, "printed": 3, "outside": [], "not_measured": []}
    for other in (Outcome(records, unfinished=1), Outcome([*records[:3], Record("attention", 1, failed="diverged")])):
        found = table(work, {"train": other})["outcome"]
        assert found["says"] == "not reproduced" and found["not_measured"] == ["missing, loss"]
    assert table(work, {})["outcome"]["says"] == "not reproduced"


def test_a_row_that_two_labels_measure_has_no_number_and_a_note(library, trained):
    request, _ = trained
    (work,) = prepare(library, library.find("900", ["table1"]), request)
    step = work.every["train"].step
    mapped = step.model_copy(update={"rows": {**step.rows, "other": "tnl"}})
    work = replace(work, every={**work.every, "train": replace(work.every["train"], step=mapped)})
    records = [Record(label, seed, {"loss": loss}) for label, loss in (("tnl", 2.0), ("other", 3.0)) for seed in (0, 1)]
    result = table(work, {"train": Outcome([*records, Record("attention", 0, {"loss": 2.5})])})
    assert "measured" not in result["rows"]["tnl"]["loss"] and result["rows"]["attention"]["loss"]["measured"] == 2.5
    assert any("tnl and other are all row tnl" in note for note in result["notes"])


def test_a_reduced_form_names_its_models_and_shows_no_print_that_no_claim_compares(tmp_path):
    (work,) = prepare(LIBRARY, LIBRARY.find("000", ["table4"]), Request(scale="reduced", out=tmp_path, planning=True))
    trained = [Record("llama 16x1", seed, {"loss": 2.0, "params_total": 14304}) for seed in (0, 1)]
    scored = [Record("llama 16x1", seed, {"everyday.acc_norm": 0.25 + seed / 100}) for seed in (0, 1)]
    result = table(work, {"study": Outcome(trained), "everyday": Outcome(scored)})
    assert result["stand_ins"] == {"llama-70m": "llama 16x1, 14,304 parameters"}
    cells = {row: columns["everyday"] for row, columns in result["rows"].items()}
    assert "measured" in cells["llama-70m"] and all(cell["printed"] is None for cell in cells.values())
    assert result["rows"]["llama-70m"]["csr"]["printed"] is not None  # no model of the form stands beside it
    shown = io.StringIO()
    print_result(result, work, Console(file=shown, width=100))
    assert "llama 16x1, 14,304 parameters" in shown.getvalue() and "for llama-70m" in shown.getvalue()


def test_a_plan_counts_the_claims_that_it_cannot_decide(library, tmp_path):
    (entry,) = library.find("900", ["table1"])
    request = Request(scale="full", out=tmp_path, planning=True)
    (work,) = prepare(library, [entry], request)
    rows = "1 of 3 claims name rows that these steps do not measure, and will not be decided: missing (loss)"
    assert work.notes == (rows,)
    (work,) = prepare(library, [entry], replace(request, seeds=(0,)))
    seed = "1 of 3 claims compare numbers that one seed cannot decide"
    assert work.notes == (rows, f"{seed}; give --seeds 0,1,2, at three times the cost")


def test_a_comparison_at_one_learning_rate_says_so(library, trained):
    request, result = trained
    assert result["rates"] == f"train: {UNKNOWN}"
    assert UNKNOWN in write_reproductions(request.out).read_text()
    (work,) = prepare(library, library.find("900", ["table1"]), request)
    ((name, job),) = work.every.items()
    for change in ({"step": job.step.model_copy(update={"verb": "mad"})}, {"values": {"rate_sensitivity": True}}):
        other = replace(work, every={name: replace(job, **change)})
        assert table(other, {name: Outcome([])})["rates"] is None
    counts = replace(work, entry=replace(work.entry, item=work.entry.item.model_copy(update={"claims": []})))
    assert table(counts, {name: Outcome([])})["rates"] is None


@pytest.mark.parametrize(
    "interval, verdict", [((0.1, 0.2), "holds"), ((-0.1, 0.2), "cannot be told"), (None, "cannot be told")]
)
def test_a_fitted_number_decides_by_its_interval(library, trained, interval, verdict):
    request, _ = trained
    (work,) = prepare(library, library.find("900", ["table1"]), request)
    (step,) = work.jobs
    record = Record("tnl", None, {"params_total": 0.15}, {"params_total": interval})
    found = {one["claim"]: one["verdict"] for one in table(work, {step: Outcome([record])})["verdicts"]}
    assert found["0 < tnl on parameters"] == verdict


def test_coefficients_of_laws_are_also_those_for_pf_days(library, tmp_path):
    """Table 3 of 000 prints L = 3.7087 C^-0.0798 with C in PF-days."""
    table = tmp_path / "table.csv"
    budgets = (1e17, 3e17, 1e18, 3e18, 1e19)
    rows = [f"llama,{C**0.5 / 6},{C**0.5},{C},{3.7087 * (C / 8.64e19) ** -0.0798:.8g}" for C in budgets]
    table.write_text("\n".join(["architecture,N,D,C,loss", *rows]) + "\n")
    entry = LIBRARY.items["000", "table3"]
    config = {"table": str(table), "method": "power"}
    step = Step(verb="fit", config=config, columns={"loss_coefficient": "beta_pf_days"})
    form = entry.item.reduced.model_copy(update={"steps": [step]})
    entry = replace(entry, item=entry.item.model_copy(update={"reduced": form}))
    (work,) = prepare(LIBRARY, [entry], Request(out=tmp_path / "out"))
    result = run(work)
    cell = result["rows"]["llama"]["loss_coefficient"]
    assert cell["measured"] == pytest.approx(3.7087, rel=1e-4) and cell["printed"] == 3.7087, result["notes"]
    assert cell["interval"] == pytest.approx([3.7087, 3.7087], rel=1e-4)


def test_a_reduced_form_is_never_called_reproduced(library, trained):
    request, _ = trained
    folder = request.out / "own-900-table1"
    if not (folder / "reduced").exists():
        shutil.copytree(folder / "full", folder / "reduced")  # the same steps, so nothing is trained
    (work,) = prepare(library, library.find("900", ["table1"]), replace(request, scale="reduced"))
    result = run(work)
    assert result["outcome"] is None and result["differs"] == "it is small"
    assert "reproduced" not in json.dumps(result["verdicts"])


def test_a_run_that_is_missing_is_trained_again_to_the_same_table(library, trained):
    request, result = trained
    folder = request.out / "own-900-table1" / "full"
    before = (folder / RESULT).read_bytes()
    kept, lost = sorted(path for path in (folder / "train").iterdir() if path.is_dir())[:2]
    stamp = (kept / "result.json").stat().st_mtime_ns
    shutil.rmtree(lost)
    (folder / RESULT).unlink()
    (work,) = prepare(library, library.find("900", ["table1"]), request)
    assert run(work) == result
    assert (folder / RESULT).read_bytes() == before
    assert (kept / "result.json").stat().st_mtime_ns == stamp
    assert json.loads((folder / COSTS).read_text())["seconds"]["train"] > 0


def test_trainings_are_counted_and_use_one_thread_of_a_cpu(library, tmp_path, monkeypatch):
    threads, before = [], torch.get_num_threads()
    kept = train_verb.train
    monkeypatch.setattr(train_verb, "train", lambda *given: (threads.append(torch.get_num_threads()), kept(*given))[1])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    said = []
    torch.set_num_threads(2)
    try:
        for seeds, given in (((0,), None), ((0, 1), "2")):
            if given is None:
                monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
            else:
                monkeypatch.setenv("OMP_NUM_THREADS", given)
            (work,) = prepare(library, library.find("900", ["table1"]), Request(out=tmp_path, seeds=seeds))
            run(work, Console(file=(text := io.StringIO()), width=200))
            said.append(text.getvalue())
        assert torch.get_num_threads() == 2 and threads == [1] * 2 + [2] * 4
    finally:
        torch.set_num_threads(before)
    assert "1 of 2: tnl, seed 0\n" in said[0] and re.search("2 of 2: attention, seed 0, about .* left\n", said[0])
    assert "1 of 4: tnl, seed 0, done before\n" in said[1] and re.search("2 of 4: tnl, seed 1, about .* left", said[1])


def test_steps_without_their_data_are_skipped_with_the_reason(library, tmp_path):
    (work,) = prepare(library, library.find("900", ["table2"]), Request(out=tmp_path))
    result = run(work)
    assert result["skipped"] == {"second": "needs --data books=FOLDER"}
    (verdict,) = result["verdicts"]
    assert (verdict["verdict"], verdict["reason"]) == ("not run", "second is not run: needs --data books=FOLDER")
    with pytest.raises(
        ConfigError, match=r"table2: no step can run here \(second: needs --data books=FOLDER\); .*models"
    ):
        prepare(library, library.find("900", ["table2"]), Request(out=tmp_path, only=("second",)))


def test_data_with_another_content_are_told_and_used(library, tmp_path):
    books = tmp_path / "books"
    books.mkdir()
    (books / "one.txt").write_text("text")
    request = Request(out=tmp_path / "out", data={"books": str(books)})
    (work,) = prepare(library, library.find("900", ["table2"]), request)
    assert "one.txt" in work.notes[0]
    assert run(work)["rows"]["b"]["loss"]["measured"] > 0


@pytest.mark.parametrize("form", ["wiki.{}.raw", "wiki.{}.tokens", "{}-00000-of-00001.parquet", "{}.txt"])
def test_folders_of_wikitext_are_those_that_a_training_reads(form, tmp_path):
    folder = tmp_path / "wt"
    folder.mkdir()
    for part in ("train", "valid"):
        (folder / form.format(part)).write_text(" a line \n")
    request = Request("full", data={"wikitext-103": str(folder)}, out=tmp_path / "out", planning=True)
    entries = LIBRARY.find("002", ["table5"])
    with pytest.raises(ConfigError) as error:  # not the parts that are there
        prepare(LIBRARY, entries, request)
    (line,) = error.value.problems
    assert f"--data wikitext-103={folder}: has no file of its part 'test'" in line
    (folder / form.format("test")).write_text(" a line \n")
    (work,) = prepare(LIBRARY, entries, request)
    told = "wiki.valid.raw is not the published file" if form.endswith("raw") else "is read in place of wiki.valid.raw"
    assert (
        told in work.notes[0] and sum(note.startswith("data") for note in work.notes) == 2
    )  # the training file has no known SHA-256


def test_folders_of_a_vocabulary_are_those_that_a_training_reads(tmp_path):
    folder = tmp_path / "bpe"
    folder.mkdir()
    (folder / "vocab.json").write_text("{}")
    request = Request("full", data={"gpt2-bpe": str(folder)}, out=tmp_path / "out", planning=True)
    entries = LIBRARY.find("002", ["table5"])
    with pytest.raises(ConfigError, match=f"--data gpt2-bpe={folder}: has no vocab.bpe, dict.txt;"):
        prepare(LIBRARY, entries, request)
    (folder / "merges.txt").write_text("")
    (folder / "dict.txt").write_text("")
    (work,) = prepare(LIBRARY, entries, request)
    assert [line.partition(" is not")[0] for line in work.notes if line.startswith("data")] == [
        "data gpt2-bpe: vocab.json",
        "data gpt2-bpe: merges.txt",
    ]


def test_only(library, tmp_path):
    request = Request(out=tmp_path, only=("second",), planning=True)
    (work,) = prepare(library, library.find("900", ["table2"]), request)
    assert list(work.jobs) == ["second"] and work.skipped == {"models": "left out by --only"}


def test_a_plan_prices_without_data_or_devices(library, tmp_path):
    request = Request(scale="full", out=tmp_path / "none", planning=True)
    first, second = prepare(library, library.find("900", []), request)
    cost = first.costs["train"]
    assert cost.runs == 4 and cost.flops > 0 and cost.seconds == pytest.approx(cost.flops / 1e9)
    assert second.costs["models"].runs == 1
    assert not (tmp_path / "none").exists()


def test_all_problems_are_told_before_any_work(library, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    data = {"books": str(empty), "music": str(tmp_path), "film": "x"}
    request = Request(scale="full", only=("trian",), data=data, out=tmp_path / "out")
    with pytest.raises(ConfigError) as error:
        prepare(library, library.find("900", []), request, ["--seeds 'x': wrong"])
    text = str(error.value)
    for word in ("--seeds 'x'", "--only 'trian'", "no *.txt", "--data music", "--data film", "needs a cluster"):
        assert word in text, word
    assert not (tmp_path / "out").exists()


BEST = """
title: the best checkpoint
state: complete
published: {source: Table 4, columns: {best: perplexity, last: perplexity}, rows: {train: {best: 1}}}
claims: [train within 1 % on best]
reduced:
  minutes: 1
  differs: it is small
  steps:
    - verb: train
      config:
        {seq_len: 32, batch_size: 4, steps: 12, optimizer: {learning_rate: 3e-2}, evaluate_tokens: null,
         data: {source: TEXT, validation: HELD, tokenizer: byte}, model: {layout: tnl+sglu, d_model: 16},
         run: {checkpoint_every: 3, evaluate_every: 3, keep_checkpoints: 1, keep_best: true}}
    - {verb: evaluate, name: best, of: train, config: {blocks: {paths: [HELD]}, checkpoint: best},
       columns: {best: blocks.perplexity}}
    - {verb: evaluate, name: last, of: train, config: {blocks: {paths: [HELD]}}, columns: {last: blocks.perplexity}}
"""


def test_an_item_scores_the_checkpoint_of_the_lowest_validation_loss(tmp_path):
    make_items(tmp_path)
    text, held, file = tmp_path / "learnt.txt", tmp_path / "held.txt", tmp_path / "items" / "900" / "table4.yaml"
    text.write_text("abcdefgh" * 500)
    held.write_text("the quick brown fox jumps over a lazy dog. " * 24)
    item = BEST.replace("TEXT", str(text)).replace("HELD", str(held))
    file.write_text(item.replace(", keep_best: true", ""))
    request = Request(out=tmp_path / "out")
    with pytest.raises(ConfigError, match="table4, best: checkpoint: best is not kept; set run.keep_best: true in"):
        prepare(library := read_library(tmp_path / "items"), library.find("900", ["table4"]), request)
    file.write_text(item)
    library = read_library(tmp_path / "items")
    (work,) = prepare(library, library.find("900", ["table4"]), request)
    row = run(work)["rows"]["train"]
    assert row["best"]["measured"] < 0.9 * row["last"]["measured"]


SAMPLES = """
title: distances of samples
state: partial
published: {source: Table 5, columns: {first: d, last: d, later: d, memorised: share}, rows: {train: {}, other: {}}}
reduced:
  steps:
    - verb: train
      config: {objective: diffusion, model: {recipe: dit-8px, num_layers: 1}, data: {source: digits, max_images: 100},
               steps: 2, batch_size: 8, run: {pictures: 0, checkpoint_every: 0, evaluate_every: 0},
               evaluations: [{kind: samples, extractor: RUN, number: 4, steps: 1, every: 1}]}
      columns: {first: samples.fd-NAME@1, last: samples.fd-NAME@2}
    - {verb: evaluate, of: train, config: {samples: {extractor: RUN, count: 4, settings: {steps: 1}}},
       columns: {later: samples.fd-NAME, memorised: samples.memorised}}
"""


def test_an_item_measures_samples_while_denoisers_train_and_after(tmp_path):
    make_items(tmp_path)
    values = {"objective": "images", "model": {"recipe": "vit-8px", "num_layers": 1}, "steps": 1}
    values |= {"data": {"source": "digits", "max_images": 100}, "run": {"device": "cpu", "checkpoint_every": 0}}
    path = train(read_training(values), tmp_path / "runs", tmp_path / "out" / "cache").path
    file, text = tmp_path / "items" / "900" / "table5.yaml", SAMPLES.replace("NAME", path.name)
    file.write_text(text.replace("RUN", str(tmp_path / "absent")))
    library, request = read_library(tmp_path / "items"), Request(out=tmp_path / "out")
    with pytest.raises(ConfigError, match="table5, evaluate: .*absent"):
        prepare(library, library.find("900", ["table5"]), request)
    file.write_text(text.replace("RUN", str(path)))
    library = read_library(tmp_path / "items")
    (work,) = prepare(library, library.find("900", ["table5"]), request)
    row = {column: cell["measured"] for column, cell in run(work)["rows"]["train"].items()}
    assert row["last"] == pytest.approx(row["later"], rel=1e-4) != row["first"] and 0 <= row["memorised"] <= 1


def test_problems_of_steps_name_item_and_step(tmp_path):
    library = make_items(tmp_path)
    entry = library.items["900", "table1"]
    step = entry.item.reduced.steps[0]
    wrong = step.model_copy(update={"config": {**step.config, "stepz": 3}})
    form = entry.item.reduced.model_copy(update={"steps": [wrong]})
    broken = replace(entry, item=entry.item.model_copy(update={"reduced": form}))
    with pytest.raises(ConfigError, match="900 table1, train: .*stepz"):
        prepare(library, [broken], Request(out=tmp_path / "out"))


@pytest.mark.parametrize("length", ["steps", "epochs"])
def test_labels_of_one_training_are_refused(length, tmp_path):
    """They would share a run folder, so fewer runs than planned would fill equal rows."""
    entry = make_items(tmp_path).items["900", "table1"]
    (step,) = entry.item.reduced.steps
    twin = {"model": {"layout": "tnl+sglu", "d_model": 16, "options": {"tnl": {"lrpe": "none"}}}}  # the default
    config = {name: value for name, value in step.config.items() if name != "steps"} | {length: 2}
    step = step.model_copy(update={"vary": {**step.vary, "twin": twin}, "rows": {"twin": "missing"}, "config": config})
    form = entry.item.reduced.model_copy(update={"steps": [step]})
    entry = replace(entry, item=entry.item.model_copy(update={"reduced": form}))
    for planning in (True, False):
        with pytest.raises(ConfigError, match="train: vary: 'tnl' and 'twin' are the same training .* leave it out"):
            prepare(Library(), [entry], Request(out=tmp_path / "out", planning=planning))


def test_trainings_on_lessons_of_needles(tmp_path):
    entry = make_items(tmp_path).items["900", "table1"]

    def changed(lessons):
        (step,) = entry.item.reduced.steps
        data = {**step.config["data"], "source": "stdlib"}
        step = step.model_copy(update={"config": {**step.config, "data": data, "lessons": lessons}})
        form = entry.item.reduced.model_copy(update={"steps": [step]})
        return replace(entry, item=entry.item.model_copy(update={"reduced": form}))

    library = Library()
    (work,) = prepare(library, [changed({"count": 60, "sentences": 1})], Request(out=tmp_path / "out", seeds=(0,)))
    assert "measured" in run(work)["rows"]["tnl"]["loss"]
    (path,) = (tmp_path / "out" / "cache").glob("lessons-*.jsonl")
    assert len(path.read_text().splitlines()) == 60
    with pytest.raises(ConfigError, match="lessons: .*sentence"):
        prepare(library, [changed({"count": 60, "sentence": 1})], Request(out=tmp_path / "other"))
    with pytest.raises(ConfigError, match="--out .*is a file") as error:
        prepare(library, [changed({"count": 50, "sentences": 1})], Request(out=path / "below a file"))
    assert len(error.value.problems) == 1  # the cache is in it, and the user named no cache


def test_a_step_with_another_configuration_says_so_and_columns_without_numbers_take_one_line(tmp_path):
    entry = make_items(tmp_path).items["900", "table1"]
    said = []
    for width in (16, 24):
        step = entry.item.reduced.steps[0].model_copy(
            update={"vary": {"tnl": {"model": {"layout": "tnl+sglu", "d_model": width}}}}
        )
        published = entry.item.published.model_copy(
            update={"columns": {**entry.item.published.columns, "memory": "GB"}}
        )
        form = entry.item.reduced.model_copy(update={"steps": [step]})
        item = entry.item.model_copy(update={"reduced": form, "published": published})
        (work,) = prepare(Library(), [replace(entry, item=item)], Request(out=tmp_path / "out", seeds=(0,)))
        console = Console(file=(shown := io.StringIO()), width=120)
        print_result(run(work, console), work, console)
        said.append(shown.getvalue())
    text = "seed 0 was made with another configuration and leaves the table"
    assert text not in said[0] and text in said[1]
    assert "printed, and not measured: memory" in said[0] and "memory (GB)" not in said[0]


def test_intervals_stay_on_one_line_of_a_narrow_terminal(library, trained):
    request, result = trained
    (work,) = prepare(library, library.find("900", ["table1"]), request)
    print_result(result, work, Console(file=(shown := io.StringIO()), width=80))
    low, high = (f"{end:.4g}" for end in result["rows"]["tnl"]["loss"]["difference"])
    head, *_ = [line for line in shown.getvalue().splitlines() if "attention," in line]
    assert "from attention," in head and f"{low} to {high}" in shown.getvalue()


TASK = """
task: pairs
dataset_path: json
dataset_kwargs: {data_files: {test: pairs.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{start}}"
doc_to_choice: ends
doc_to_target: answer
metric_list: [{metric: acc}]
"""


def test_questions_beside_an_item(tmp_path):
    entry = make_items(tmp_path).items["900", "table1"]
    folder = entry.path.parent / "tasks"
    folder.mkdir()
    (folder / "pairs.yaml").write_text(TASK)
    (folder / "pairs.jsonl").write_text('{"start": "1 is followed by", "ends": ["2", "7"], "answer": 0}\n' * 2)
    asked = Step(
        verb="evaluate", of="train", config={"tasks": ["pairs"], "include": "tasks"}, columns={"loss": "pairs.acc"}
    )
    form = entry.item.reduced.model_copy(update={"steps": [*entry.item.reduced.steps, asked]})
    entry = replace(entry, item=entry.item.model_copy(update={"reduced": form}))
    (work,) = prepare(Library(), [entry], Request(out=tmp_path / "out", seeds=(0,)))
    for said in ("1 of 2: tnl, seed 0\n", "1 of 2: tnl, seed 0, done before\n"):
        result = run(work, Console(file=(shown := io.StringIO()), width=120))
        assert result["rows"]["tnl"]["loss"]["measured"] in (0.0, 1.0)
        assert said in shown.getvalue().partition("(evaluate)")[2]


def test_results_of_a_folder(trained, tmp_path):
    request, result = trained
    found = read_results(request.out)
    assert {one["item"] for one in found} == {"table1"} and found[0]["costs"]["made"]
    with pytest.raises(ConfigError, match="no item was run there"):
        read_results(tmp_path)
    (tmp_path / "900-a" / "full").mkdir(parents=True)
    (tmp_path / "900-a" / "full" / RESULT).write_text("{")
    with pytest.raises(ConfigError, match="is damaged or of another version .* run the item again"):
        read_results(tmp_path)


def test_the_page_of_papers_lists_every_item(library):
    text = write_markdown(library)
    assert "`linnet reproduce 900 table1`" in text and "`layers/mixers/linear/tnl.py`" in text
    assert "attention, loss: printed 2.5, right 2.4. a slip" in text
    assert "`books`" in text and "partial" in text
