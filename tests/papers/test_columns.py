"""What the columns of a step measure is checked before any work, and is what the step then measures."""

import pytest
from reproduce_items import make_items

from linnet.config import ConfigError
from linnet.papers.library import read_library
from linnet.papers.prepare import prepare
from linnet.papers.run import run
from linnet.papers.table import Request
from linnet.papers.verbs import evaluate, find_verb
from linnet.papers.verbs.base import Outcome, read_planned

ITEM = """
title: every verb
state: complete
published:
  source: Table 3
  columns: {one: nats, two: nats, three: nats}
  rows: {tnl: {}, mean: {}}
claims: [tnl < mean on one]
reduced:
  minutes: 1
  differs: it is small
  steps:
    - verb: train
      config:
        {seq_len: 32, batch_size: 4, steps: 2, optimizer: {learning_rate: 3e-3}, evaluate_tokens: 1024,
         average: {decay: 0.9}, data: {source: TEXT, tokenizer: byte}, model: {layout: tnl+sglu, d_model: 16}}
      rows: {train: tnl}
      columns: {one: LOSS, two: LOSSES / 2, three: 2 * STEPS}
    - verb: evaluate
      of: train
      config:
        needle: {lengths: [256], depths: [0.0], samples: 1, digits: 1}
        recall: {lengths: [64], pairs: [4], samples: 1}
        text: {paths: [TEXT]}
        blocks: {paths: [TEXT]}
      columns: {one: needle-easy.NIAH}
    - verb: study
      config: study/demo-quick.yaml
      best: LOSS
      set: {budgets: [1e9], sizes: [[8, 1, 2]], tokens_per_param: [1, 1000], data.source: TEXT, executor.kind: inline,
            train.evaluate_tokens: 2048, architectures: [{name: llama, family: llama}]}
    - {verb: fit, of: study, config: {bootstrap: 0}, columns: {one: ALPHA}}
    - {verb: fit, name: laws, of: study, config: {laws: [gap, over-training]}, columns: {one: not known before}}
    - {verb: models, config: {recipes: [tnl-10m]}, columns: {one: PARAMS / 1e6}}
    - {verb: mean, config: {steps: [train], column: LOSS}}
"""
MORE = """\
    - {verb: bench, config: {models: [tnl-10m]}, columns: {one: SPEED}}
    - {verb: mad, config: {architectures: [tnl+sglu], budget: smoke, tasks: [compression]}, columns: {one: RECALL}}
    - {verb: fit, name: gap, of: study, config: {laws: [gap]}, columns: {one: GAP}}
"""
RIGHT = {"LOSSES": "loss", "LOSS": "raw_loss", "STEPS": "steps", "NIAH": "niah_score", "ALPHA": "alpha"}
RIGHT |= {"PARAMS": "params_total", "SPEED": "token_ms", "RECALL": "compression", "GAP": "gap(-0.5)"}


def item(folder, changes=(), more=""):
    """Returns a library with the item, and its only entry."""
    make_items(folder)
    text = (ITEM + more).replace("TEXT", str(folder / "text.txt"))
    for name, key in (RIGHT | dict(changes)).items():
        text = text.replace(name, key)
    text = text.replace("best: raw_loss", "best: loss")
    (folder / "items" / "900" / "table3.yaml").write_text(text)
    library = read_library(folder / "items")
    return library, library.find("900", ["table3"])


@pytest.mark.parametrize("planning", [True, False])
def test_columns_that_a_verb_cannot_measure_are_named_together_before_any_work(planning, tmp_path):
    wrong = {"LOSSES": "raw_losses", "LOSS": "lose", "STEPS": "stepz", "NIAH": "niah", "ALPHA": "Alpha"}
    wrong |= {"PARAMS": "params", "SPEED": "speed", "RECALL": "fuzzy_recall", "GAP": "gap"}
    library, entries = item(tmp_path, wrong, MORE)
    with pytest.raises(ConfigError) as error:
        prepare(library, entries, Request(out=tmp_path / "out", planning=planning))
    told = [line.partition("; ")[0] for line in error.value.problems]
    assert told == [
        "900 table3, train: columns.one: 'lose' is not measured by train",
        "900 table3, train: columns.two: 'raw_losses / 2' is not measured by train",
        "900 table3, train: columns.three: '2 * stepz' is not measured by train",
        "900 table3, evaluate: columns.one: 'needle-easy.niah' is not measured by evaluate",
        "900 table3, study: best: 'lose' is not measured by study",
        "900 table3, fit: columns.one: 'Alpha' is not measured by fit",
        "900 table3, models: columns.one: 'params / 1e6' is not measured by models",
        "900 table3, mean: column: 'lose' is not measured by 'train'",
        "900 table3, bench: columns.one: 'speed' is not measured by bench",
        "900 table3, mad: columns.one: 'fuzzy_recall' is not measured by mad",
        "900 table3, gap: columns.one: 'gap' is not measured by fit",
    ]
    assert "use one of gap(-0.5), slope of gap(-0.5) on attention_share" in error.value.problems[-1]
    assert not list(tmp_path.glob("out/*-table3"))  # but for prepared data


def test_a_step_measures_no_other_columns_than_it_promises(tmp_path):
    library, entries = item(tmp_path)
    (work,) = prepare(library, entries, Request(out=tmp_path / "out"))
    assert work.costs["laws"].columns is None  # a law that names its numbers after the table
    run(work)
    outcomes = {}
    for name, job in work.jobs.items():
        outcomes[name] = find_verb(job.step.verb).collect(job, read_planned(job), outcomes)
        found = {column for record in outcomes[name].records for column in record.values}
        promised = work.costs[name].columns
        assert promised is None or found <= promised, name
        if name in ("train", "evaluate", "study", "models", "mean"):
            assert set(step_columns(job)) <= found
    assert {"raw_loss", "perplexity", "flops_paper"} <= {*outcomes["train"].records[0].values}


def step_columns(job):
    return [source.split(" / ")[0].removeprefix("2 * ") for source in job.step.columns.values()]


def test_what_an_evaluation_does_not_have_is_named_by_its_key(tmp_path):
    library, entries = item(tmp_path, {"text: {paths": "text: {windw: 9, stride: 0, paths"})
    with pytest.raises(ConfigError) as error:
        prepare(library, entries, Request(out=tmp_path / "out"))
    keys = {line.split(": ")[1] for line in error.value.problems}
    assert keys == {"text.windw", "text.stride"}, error.value.problems
    assert any("window" in line for line in error.value.problems)


def test_evaluations_keep_their_digest_so_that_finished_ones_are_not_repeated(tmp_path, monkeypatch):
    library, entries = item(tmp_path)
    (work,) = prepare(library, entries, Request(out=tmp_path / "out"))
    asked = []
    monkeypatch.setattr(evaluate, "digest", lambda content: asked.append(content) or "digest")
    evaluate.run(work.jobs["evaluate"], {"train": Outcome([])}, None)
    text = str(tmp_path / "text.txt")
    assert asked[0][1] == [
        f"TextEvaluator(paths=('{text}',), method='auto', window=None, stride=None, text_key='text')",
        f"BlocksEvaluator(paths=('{text}',), block=None, text_key='text')",
        "NeedleEvaluator(settings={'lengths': [256], 'depths': [0.0], 'samples': 1, 'digits': 1})",
        "RecallEvaluator(settings={'lengths': [64], 'pairs': [4], 'samples': 1})",
    ]
