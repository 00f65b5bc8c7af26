"""The benchmark as data: 66 settings, 396 runs, and subsets of them."""

import pytest

from linnet.config import ConfigError
from linnet.mad.settings import BUDGETS, GRID, MAD_TASKS, MQAR_SETTINGS, mad_settings, plan


@pytest.mark.parametrize("spec", ["paper", "mad-lab"])
def test_66_settings(spec):
    settings = mad_settings(spec)
    counts = {task: sum(setting.task.name == task for setting in settings) for task in MAD_TASKS}
    assert counts == {
        "in_context_recall": 11,
        "fuzzy_recall": 11,
        "noisy_recall": 14,
        "selective_copying": 13,
        "compression": 11,
        "memorization": 6,
    }
    assert len({setting.name for setting in settings}) == 66 == len(set(settings))
    assert {setting.task.spec for setting in settings} == {spec}
    assert [setting.name for setting in settings if not setting.varied] == [f"{task}/baseline" for task in MAD_TASKS]


def test_baselines_and_one_change_at_a_time():
    base = {setting.task.name: setting for setting in mad_settings() if not setting.varied}
    shapes = {name: (s.task.vocab_size, s.task.seq_len, s.train_samples) for name, s in base.items()}
    assert shapes == {
        "in_context_recall": (16, 128, 12_800),
        "fuzzy_recall": (16, 128, 12_800),
        "noisy_recall": (16, 128, 12_800),
        "selective_copying": (16, 256, 12_800),
        "compression": (16, 32, 12_800),
        "memorization": (256, 32, 256),
    }
    assert base["noisy_recall"].task.frac_noise == 0.2 and base["selective_copying"].task.tokens_to_copy == 16
    for setting in mad_settings():
        own, other = setting.to_dict(), base[setting.task.name].to_dict()
        flat = [entry["options"] | {"samples": entry["train_samples"]} for entry in (own, other)]
        changed = {key for key in flat[0] if flat[0][key] != flat[1][key]}
        assert changed == ({setting.varied} if setting.varied else set()) and setting.held_out == 1280


def test_values_of_each_variable():
    """Beside the baselines, as paper 004 varies them."""
    sizes, fewer = (32, 64, 128), (6400, 3200, 1600, 800)
    recall = {"vocab_size": sizes, "seq_len": (256, 512, 1024), "samples": fewer}
    values = {
        "in_context_recall": recall,
        "fuzzy_recall": recall,
        "noisy_recall": recall | {"frac_noise": (0.4, 0.6, 0.8)},
        "selective_copying": recall | {"seq_len": (512, 1024), "tokens_to_copy": (32, 64, 96)},
        "compression": recall | {"seq_len": (64, 128, 256)},
        "memorization": {"vocab_size": (512, 1024, 2048, 4096, 8192)},
    }
    names = {f"{task}/{key}={value}" for task, own in values.items() for key, one in own.items() for value in one}
    assert {setting.name for setting in mad_settings() if setting.varied} == names


def test_vocabulary_of_noise():
    """paper: noise on top of 16, 32, 64, 128. mad-lab: 32, 48, 80, 144 with it. As many ids, either way."""
    tokens = {}
    for spec in ("paper", "mad-lab"):
        found = [s.task for s in mad_settings(spec) if s.task.name == "noisy_recall" and s.varied in ("", "vocab_size")]
        tokens[spec] = [task.num_tokens for task in found]
    assert tokens["paper"] == tokens["mad-lab"] == [32, 48, 80, 144]
    assert [task.vocab_size for task in found] == [32, 48, 80, 144]


def test_runs_of_budgets():
    assert sorted(GRID) == [(1e-4, 0.0), (1e-4, 0.1), (5e-4, 0.0), (5e-4, 0.1), (1e-3, 0.0), (1e-3, 0.1)]
    full, core, smoke = (plan(name) for name in ("full", "core", "smoke"))
    assert (len(full), len(core)) == (396, 36)
    assert sum(run.steps for run in full) == 5_384_400 and sum(run.steps for run in core) == 602_400
    assert {run.setting.short_name for run in core + smoke} == {"baseline"}
    assert len(full) == len({run.name for run in full})
    assert [name for name, budget in BUDGETS.items() if not budget.comparable] == ["smoke", "mqar-short"]
    assert sum(run.steps for run in smoke) < 3000 and max(run.setting.train_samples for run in smoke) == 800
    assert {run.setting.held_out for run in smoke} == {320}


def test_steps_an_epoch():
    steps = {run.setting.train_samples: run.steps // 200 for run in plan("full")}
    assert steps == {12_800: 100, 6400: 50, 3200: 25, 1600: 13, 800: 7, 256: 2}


def test_subsets():
    def names(**subset):
        return list(dict.fromkeys(run.setting.name for run in plan("full", **subset)))

    assert names(tasks=["fuzzy-recall"], settings=["seq_len"]) == [
        f"fuzzy_recall/seq_len={n}" for n in (256, 512, 1024)
    ]
    assert names(settings=["frac_noise=0.6", "memorization/baseline"]) == [
        "noisy_recall/frac_noise=0.6",
        "memorization/baseline",
    ]
    assert len(names(settings=["baseline"])) == 6 and len(plan("core", tasks=["compression"])) == 6


def test_wrong_names_come_together():
    with pytest.raises(ConfigError) as caught:
        plan("cor", tasks=["mqar", "fuzzy"], spec="lab")
    assert len(caught.value.problems) == 4 and "'core'" in str(caught.value)
    with pytest.raises(ConfigError, match="'seq_len=257' .*'seq_len=256'"):
        plan("full", settings=["seq_len=257"])
    with pytest.raises(ConfigError, match="seq_len .*core .*full"):
        plan("core", settings=["seq_len"])
    with pytest.raises(ConfigError, match="frac_noise .*core .*--tasks"):
        plan("core", tasks=["memorization"], settings=["frac_noise"])


def test_mqar_settings():
    assert [(s.task.seq_len, s.task.num_pairs) for s in MQAR_SETTINGS] == [(64, 4), (128, 8), (256, 16), (512, 64)]
    assert {(s.train_samples, s.held_out) for s in MQAR_SETTINGS} == {(100_000, 3000)}


def test_mqar_has_budgets_of_its_own():
    """Zoology's Figure 2: 64 epochs of 100,000 samples, batches of 512, 512, 256 and 128, four rates."""
    runs = plan("mqar")
    assert len(runs) == 2 * 4 * 4 and len({run.name for run in runs}) == 32
    assert {(run.setting.task.seq_len, run.batch_size) for run in runs} == {
        (64, 512),
        (128, 512),
        (256, 256),
        (512, 128),
    }
    assert {run.setting.width for run in runs} == {64, 128} and {run.point.weight_decay for run in runs} == {0.1}
    assert sum(run.steps for run in runs) == 2 * 4 * 64 * (196 + 196 + 391 + 782)
    assert "mqar/512x64,width=128" in {run.setting.name for run in runs}
    assert len(plan("mqar", settings=["width=64"])) == 16 and len(plan("mqar", settings=["64x4"])) == 8
    assert len(plan("mqar-short", tasks=["mqar"])) == 8 * len(BUDGETS["mqar-short"].grid)
    short = plan("mqar-short")
    assert {(run.setting.task.seq_len, run.batch_size) for run in short} == {
        (64, 512),
        (128, 256),
        (256, 128),
        (512, 64),
    }
    assert {run.setting.train_samples for run in short} == {100_000} and sum(run.steps for run in short) == 140_736
    with pytest.raises(ConfigError, match="mqar .*core.*mqar, mqar-short"):
        plan("core", tasks=["mqar"])
    with pytest.raises(ConfigError, match="'compression' .*MQAR"):
        plan("mqar", tasks=["compression"])
    with pytest.raises(ConfigError, match="MQAR"):
        plan("mqar", spec="mad-lab")
