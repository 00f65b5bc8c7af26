"""Whole runs: what is recorded, what they come to, and what changes nothing."""

import functools
import json
import math
import re

import pytest
import torch

from linnet.config import ConfigError
from linnet.data import prepare, validation_batches
from linnet.evaluate import score
from linnet.models import (
    ModelConfig,
    build_model,
    count_parameters,
    flops_exact,
    flops_paper,
    get_recipe,
    state_bytes,
)
from linnet.runs import RunFolder, latest_good
from linnet.train import loop, train
from linnet.train.identity import run_folder
from linnet.train.objectives.text import TextObjective, scored_rows
from linnet.train.preflight import unused_problems
from linnet.train.session import load_model

TRAINING = {
    "step", "tokens", "flops", "loss", "bits_per_byte", "learning_rate", "grad_norm", "tokens_per_second",
    "flop_utilisation", "memory_bytes", "seconds",
}  # fmt: skip
VALIDATION = {"step", "tokens", "flops", "validation_loss", "validation_bits_per_byte"}


def losses(run: RunFolder) -> list[float]:
    return [row["loss"] for row in run.metrics() if "loss" in row]


def test_a_run_from_start_to_result(settings, cache, tmp_path):
    config = settings(evaluate_every=6, checkpoint_every=5, peak_tflops=0.5)
    seen = []
    run = train(config, tmp_path, cache, progress=seen.append)

    rows = run.metrics()
    assert [set(row) for row in rows] == [TRAINING] * 3 + [VALIDATION] + [TRAINING] * 3 + [VALIDATION]
    assert [row["step"] for row in rows] == [2, 4, 6, 6, 8, 10, 12, 12]
    assert [row for row in seen if "event" not in row] == rows
    [start] = [row for row in seen if row.get("event") == "start"]
    assert start == {"event": "start", "step": 0, "steps": 12, "path": str(run.path)}

    step_flops = flops_exact(config.model, 32, 4)
    for row in rows:
        assert row["tokens"] == row["step"] * 4 * 32 and row["flops"] == row["step"] * step_flops
    first, last = rows[0], rows[-2]
    assert first["loss"] == pytest.approx(math.log(256), abs=0.2) and last["loss"] < first["loss"] - 0.1
    assert last["bits_per_byte"] == pytest.approx(last["loss"] / math.log(2), rel=1e-3)
    assert last["learning_rate"] == pytest.approx(0.1 * config.optimizer.learning_rate)
    assert last["flop_utilisation"] == pytest.approx(last["tokens_per_second"] * step_flops / (4 * 32) / 0.5e12)
    assert 0 < first["seconds"] < last["seconds"] and last["memory_bytes"] > 1e8 and last["grad_norm"] > 0

    assert [path.name for path in run.checkpoints()] == ["step-00000010", "step-00000012"]
    result = run.result()
    expected = {
        "status": "done",
        "architecture": "tnl",
        "params_total": count_parameters(config.model)[0],
        "params_non_embedding": count_parameters(config.model)[1],
        "tokens": 12 * 4 * 32,
        "flops": 12 * step_flops,
        "flops_paper": 48 * flops_paper(config.model, 32),
        "train_loss": last["loss"],
        "loss": rows[-1]["validation_loss"],
        "bits_per_byte": rows[-1]["validation_bits_per_byte"],
        "state_bytes": state_bytes(config.model, 32),
        "seq_len": 32,
        "batch_size": 4,
        "steps": 12,
    }
    assert expected == {key: result[key] for key in expected}
    assert result["tokens_per_second"] > 0 and result["seconds"] > 0 and result["environment"]["threads"] == 1

    # The last checkpoint is the model that was scored.
    corpus = prepare(config.data, cache)
    model = build_model(config.model, seed=99)
    load_model(model, latest_good(run.checkpoint_folder)[1]["model"])
    batches = validation_batches(corpus.validation, 32, scored_rows(config), 512)
    assert len(batches) == 1, "not in batches of the training's 4 rows"
    again = score(model, batches, corpus.tokenizer.byte_lengths)
    assert (again.loss, again.bits_per_byte) == (result["loss"], result["bits_per_byte"])
    assert result["loss"] == pytest.approx(
        score(model, validation_batches(corpus.validation, 32, 4, 512)).loss, rel=1e-6
    )


@pytest.mark.parametrize(
    "seq_len, batch, parts, rows", [(32, 2, 1, 128), (512, 64, 1, 64), (512, 64, 4, 16), (8192, 1, 1, 1)]
)
def test_scoring_takes_a_sensible_number_of_tokens_at_once(settings, seq_len, batch, parts, rows):
    assert scored_rows(settings(seq_len=seq_len, batch_size=batch, accumulation=parts)) == rows
    overridden = settings(seq_len=seq_len, batch_size=batch, parallel={"accumulation": parts})
    assert scored_rows(overridden) == rows
    assert scored_rows(settings(seq_len=seq_len, batch_size=batch), ranks=parts) == rows


def test_scoring_is_told_to_who_watches(settings, cache, tmp_path, monkeypatch):
    monkeypatch.setattr("linnet.train.objectives.text.SCORED", 256)
    seen = []
    run = train(settings(), tmp_path, cache, seen.append)
    told = [(row["step"], row["done"]) for row in seen if row.get("event") == "scoring"]
    assert told == [(12, 0), (12, 256)]
    assert all(row.get("event") != "scoring" for row in run.metrics()), "the record leaves it out"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"schedule": {"warmup": 100}}, "schedule.warmup: 100 .*12 steps"),
        ({"batch_ramp": 40, "accumulation": 2}, "batch_ramp: 40 .*12 steps"),
    ],
)
def test_phases_longer_than_the_training_are_refused_before_a_folder_is_made(
    settings, cache, tmp_path, changes, expected
):
    with pytest.raises(ConfigError, match=expected):
        train(settings(**changes), tmp_path / "runs", cache)
    assert not (tmp_path / "runs").exists()
    begun = run_folder(settings(**changes), tmp_path / "runs", cache)  # as an old release began it
    train(settings(**changes), tmp_path / "runs", cache)
    assert begun.done
    assert train(settings(**changes, curve_every=5), tmp_path / "ladder", cache).done  # of a study, whose plan notes it


def test_a_run_that_is_done_is_not_trained_again(settings, cache, tmp_path):
    run = train(settings(), tmp_path, cache)
    before = {path: path.stat().st_mtime_ns for path in run.path.rglob("*")}

    def never(row):
        raise AssertionError("trained again")

    assert train(settings(), tmp_path, cache, progress=never).path == run.path
    assert {path: path.stat().st_mtime_ns for path in run.path.rglob("*")} == before


def test_the_same_configuration_gives_the_same_losses_whatever_the_global_seed(settings, cache, tmp_path):
    torch.manual_seed(1)
    first = losses(train(settings(), tmp_path / "a", cache))
    torch.manual_seed(2)
    state = torch.get_rng_state()
    assert losses(train(settings(), tmp_path / "b", cache)) == first
    assert torch.equal(torch.get_rng_state(), state), "training left the caller's random numbers alone"
    assert losses(train(settings(seed=1), tmp_path / "c", cache)) != first


@pytest.mark.parametrize("parts", [3, 4])
def test_accumulation_is_the_same_training(settings, cache, tmp_path, parts):
    """Also with parts of different size (3 of 4 sequences): every token has the same weight.

    With a large eps: Adam would else make whole steps of gradients that are rounding alone.
    """
    same = {"log_every": 1, "optimizer": {"eps": 1e-2}}
    whole = train(settings(**same), tmp_path, cache)
    split = train(settings(**same, accumulation=parts), tmp_path, cache)
    norms = [[row["grad_norm"] for row in run.metrics() if "loss" in row] for run in (whole, split)]
    assert norms[1][0] == pytest.approx(norms[0][0], rel=1e-5)
    assert norms[1] == pytest.approx(norms[0], rel=1e-2)  # nothing is left of the step before
    assert losses(split) == pytest.approx(losses(whole), rel=1e-4)


def test_accumulation_weighs_targets_not_parts(settings, cache, tmp_path, monkeypatch):
    """With most targets of one part left out, the gradient is that of the mean over all targets that are left."""
    from linnet.train import loop, session

    def masked(self, position):
        tokens, targets = get(self, position)
        targets[0, 4:] = -100
        return tokens, targets

    get = session.Prefetch.get
    monkeypatch.setattr(session.Prefetch, "get", masked)
    found = []
    for parts in (1, 4):
        config = settings(accumulation=parts)
        cpu = torch.device("cpu")
        run = session.Session(config, TextObjective.prepare(config, cpu, cache), cpu)
        run.gradients()
        found.append({name: p.grad for name, p in run.model.named_parameters()})
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-4, atol=1e-7)
    assert loop.Session is session.Session


@pytest.mark.parametrize("mode", ["block", "selective"])
def test_recomputation_is_the_same_training(settings, cache, tmp_path, mode):
    assert losses(train(settings(recompute=mode), tmp_path, cache)) == losses(train(settings(), tmp_path, cache))


def test_bfloat16_is_close_and_keeps_float32_weights(settings, cache, tmp_path):
    exact, rounded = train(settings(), tmp_path, cache), train(settings(precision="bfloat16"), tmp_path, cache)
    relative = torch.tensor(losses(rounded)) / torch.tensor(losses(exact)) - 1
    assert 0 < relative.square().mean().sqrt() < 0.02
    tensors = latest_good(rounded.checkpoint_folder)[1]
    assert {t.dtype for group in ("model", "optimizer") for t in tensors[group].values()} == {torch.float32}


def test_compiled_is_the_same_training(settings, cache, tmp_path, monkeypatch):
    calls = []

    def compile(function):
        calls.append(function)
        return torch_compile(function, backend="aot_eager", fullgraph=True)

    torch_compile = torch.compile
    monkeypatch.setattr(torch, "compile", compile)
    compiled = losses(train(settings(compile=True, steps=4), tmp_path, cache))
    assert len(calls) == 1
    assert compiled == pytest.approx(losses(train(settings(steps=4), tmp_path, cache)), rel=1e-5)


@pytest.mark.parametrize("name", ["constant", "cosine", "wsd", "inverse_sqrt", "linear"])
def test_every_schedule_reaches_the_optimizer(settings, cache, tmp_path, name):
    from linnet.train.optimizer import factor

    final = {} if name in ("constant", "inverse_sqrt") else {"final": 0.2}
    config = settings(schedule={"name": name, "warmup": 3, **final}, log_every=1, optimizer={"name": "muon"})
    rows = [row for row in train(config, tmp_path, cache).metrics() if "loss" in row]
    expected = [1e-2 * factor(config.schedule, step, 12) for step in range(12)]
    assert [row["learning_rate"] for row in rows] == expected


@pytest.mark.parametrize(
    ("values", "key", "fix"),
    [
        ({"optimizer": {"momentum": 0.5}}, "optimizer.momentum: 0.5", "0.95.* muon"),
        ({"schedule": {"name": "constant", "final": 0.0}}, "schedule.final: 0", "0.1.* cosine or linear or wsd"),
        ({"schedule": {"name": "cosine", "decay": 5.0}}, "schedule.decay: 5", "0.2.* wsd"),
        ({"guard": {"spike": None, "margin": 2.0}}, "guard.margin: 2", "spike: null.* set spike"),
        ({"guard": {"spike": None, "window": 8}}, "guard.window: 8", "64.* set spike"),
        ({"guard": {"policy": "skip", "skip_batches": 3}}, "guard.skip_batches: 3", "policy: skip.* rollback"),
    ],
)
def test_a_key_that_no_one_reads_is_refused_in_a_new_run(settings, cache, tmp_path, monkeypatch, values, key, fix):
    config = settings(steps=2, **values)
    with pytest.raises(ConfigError, match=rf"{key} has no effect .*{fix}"):
        train(config, tmp_path, cache)
    assert not any(tmp_path.glob("*/config.yaml"))
    with monkeypatch.context() as patch:  # as an earlier release began it
        patch.setattr("linnet.train.loop.unused_problems", lambda *_: [])
        patch.setattr("linnet.train.loop.Run.advance", lambda *_: (_ for _ in ()).throw(KeyError("stop")))
        with pytest.raises(KeyError):
            train(config, tmp_path, cache)
    assert train(config, tmp_path, cache).result()["status"] == "done"


UNREAD = [
    (
        "attention+swiglu",
        {"attention": {"rope": False, "rope_scaling": {"kind": "linear", "factor": 2.0}}},
        "rope_scaling",
    ),
    ("mla+swiglu", {"mla": {"rope": False, "rope_scaling": {"kind": "linear", "factor": 2.0}}}, "rope_scaling"),
    ("lightnet+swiglu", {"lightnet": {"num_heads": 2, "lrpe": False, "lrpe_shared_heads": True}}, "lrpe_shared_heads"),
    ("attention", {"attention": {"rope": False, "rope_base": 77.0}}, "rope_base"),
    ("mla", {"mla": {"rope": False, "rope_interleaved": True}}, "rope_interleaved"),
    ("tnl", {"tnl": {"decay": "none", "slopes": "geometric"}}, "slopes"),
    ("tnl", {"tnl": {"lrpe": "none", "lrpe_shared_heads": True}}, "lrpe_shared_heads"),
    ("cosformer2", {"cosformer2": {"gate": "none", "gate_first": True}}, "gate_first"),
    ("tnl", {"tnl": {"gate": "full", "gate_rank": 3}}, "gate_rank"),
    ("gdn", {"gdn": {"head_dim": 8, "expand_k": 0.5}}, "expand_k"),
    ("kda", {"kda": {"gate": "full", "gate_bias": False}}, "gate_bias"),
    ("mamba2", {"mamba2": {"inner": 32, "expand": 3}}, "expand"),
    ("mamba2", {"mamba2": {"norm": False, "norm_eps": 1e-3}}, "norm_eps"),
    ("hyena", {"hyena": {"filter_length": 32}}, "filter_length"),
    ("hyena_experts", {"hyena_experts": {"filter": "implicit", "num_modes": 3}}, "num_modes"),
    ("mh_hyena", {"mh_hyena": {"head_dim": 8, "num_heads": 2}}, "num_heads"),
]


@pytest.mark.parametrize(("layout", "options", "key"), UNREAD)
def test_an_option_that_has_no_effect_is_refused_in_a_new_run(settings, layout, options, key):
    def problems(values):
        return unused_problems(settings(model={"d_model": 16, "layout": layout, "options": {layout: values}}))

    [(name, given)] = options.items()
    layout = layout.partition("+")[0]
    [problem] = problems(given)
    assert re.match(
        rf"model.options.{name}.{key}: .* has no effect with \w+: .*; leave it out, or change \w+$", problem
    )
    without = {option: value for option, value in given.items() if option != key}
    assert problems(without) == []
    models = (ModelConfig(d_model=16, layout=layout, options={layout: values}) for values in (given, without))
    with_it, without_it = (build_model(model, seed=0)(torch.arange(24)[None])[0] for model in models)
    assert torch.equal(with_it, without_it), "it has an effect"


def test_a_value_of_a_recipe_may_have_no_effect(settings):
    model = {"recipe": "lfm2-350m", "options": {"attention": {"rope": False}}}
    assert get_recipe("lfm2-350m").options["attention"]["rope_base"] == 1e6 and not unused_problems(
        settings(model=model)
    )
    model["options"]["attention"]["rope_base"] = 3e6
    assert len(unused_problems(settings(model=model))) == 1


@pytest.mark.parametrize(("layout", "options", "key"), UNREAD[:3], ids=[case[0] for case in UNREAD[:3]])
def test_an_option_that_another_one_switches_off_is_refused_in_a_new_run(settings, layout, options, key):
    def problems(options, layout=layout, **more):
        model = {"d_model": 16, "layout": layout, "options": options, **more}
        return unused_problems(settings(model=model))

    [(name, given)] = options.items()
    switch = "lrpe" if name == "lightnet" else "rope"
    [problem] = problems(options)
    assert re.match(rf"model.options.{name}.{key}: .* has no effect with {switch}: false; leave it out", problem)
    assert problems({name: {option: value for option, value in given.items() if option != key}}) == []
    alias = {"off": {"layer": layout, "options": {name: {switch: False}}}}
    assert problems({name: given | {switch: True}}, f"{layout} off", aliases=alias) == [], "the other block reads it"
    alias["off"]["options"] = options
    [problem] = problems({name: {**given, switch: True}}, f"{layout} off", aliases=alias)
    assert problem.startswith(f"model.aliases.off.options.{name}.{key}: ")


def test_a_share_to_hold_out_beside_held_out_text_is_refused(settings, cache, tmp_path, text):
    config = settings(data={"source": "stdlib", "validation": [str(text)], "validation_fraction": 0.2})
    with pytest.raises(ConfigError, match="data.validation_fraction: 0.2 has no effect .*remove validation"):
        train(config, tmp_path, cache)


def test_sequences_shorter_than_a_chunk_and_longer_than_the_text(settings, cache, tmp_path):
    assert train(settings(seq_len=3, steps=2), tmp_path, cache).result()["status"] == "done"
    with pytest.raises(ConfigError, match="seq_len: 10000000 "):
        train(settings(seq_len=10_000_000), tmp_path, cache)
    [done] = tmp_path.iterdir()
    assert RunFolder(done).done


def test_a_crash_is_recorded_and_taken_back(settings, cache, tmp_path):
    def crash(row):
        if "step" in row:  # there is a folder
            raise RuntimeError("the terminal is gone")

    with pytest.raises(RuntimeError):
        train(settings(), tmp_path, cache, progress=crash)
    [run] = [RunFolder(path) for path in tmp_path.iterdir()]
    assert "the terminal is gone" in run.error() and "Traceback" in run.error()
    assert train(settings(), tmp_path, cache).error() is None


def test_metrics_are_strict_json(settings, cache, tmp_path):
    run = train(settings(), tmp_path, cache)
    refuse = functools.partial(pytest.fail, "not a JSON number")
    for line in (run.path / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=refuse)


@pytest.mark.parametrize("minutes, steps", [(1e-9, [1, 2, 3, 4]), (1e3, [4])])
def test_checkpoints_by_the_clock(settings, cache, tmp_path, monkeypatch, minutes, steps):
    saved = []

    class Seen(loop.Saver):
        def save(self, step, *given):
            saved.append(step)
            super().save(step, *given)

    monkeypatch.setattr(loop, "Saver", Seen)
    train(settings(steps=4, checkpoint_every=0, checkpoint_minutes=minutes), tmp_path, cache)
    assert saved == steps


def test_a_rollback_refuses_checkpoints_by_the_clock(settings):
    with pytest.raises(ConfigError, match="run.checkpoint_minutes=null"):
        settings(checkpoint_minutes=2.0, guard={"policy": "rollback"})
