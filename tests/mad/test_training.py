"""Which epoch of a run counts: the last, the one with the lowest test loss, or the first that is good enough."""

import json
from dataclasses import replace

import pytest
import torch
from mad_folders import train_mad

from linnet.config import ConfigError
from linnet.mad.architectures import architecture
from linnet.mad.results import read_results
from linnet.mad.scores import score
from linnet.mad.settings import BUDGETS, Budget, GridPoint
from linnet.mad.training import MAD_LAB, MQAR, PAPER, Counted, Training, Watch
from linnet.train.together import Ensemble, Score


def runs_of(form, members=3, seeds=None):
    own = {} if form == PAPER else {"training": form.to_dict()}
    return [{"setting": "s", "seed": 0 if seeds is None else seeds[i], **own} for i in range(members)]


def watch(form, curves, alive=None, seeds=None):
    """Goes through epochs: `curves` are the members' (validation accuracy, test accuracy, test loss) by epoch."""
    epoch = 0
    asked = []

    def score(split):
        asked.append((epoch, split))
        values = [curve[epoch - 1] for curve in curves]
        return [Score(loss=v[2], accuracy=v[split == "test"], macro_batch=v[split == "test"]) for v in values]

    def living():
        return [True] * len(curves) if alive is None else alive[epoch - 1]

    one = Watch(runs_of(form, len(curves), seeds), score, living)
    for epoch in range(1, len(curves[0]) + 1):  # noqa: B007  (read by score)
        if one.look(epoch):
            break
    return one.end(epoch), epoch, asked


def test_forms_are_told_by_a_configuration():
    for form in (PAPER, MAD_LAB, MQAR, Training(matrices_only=True)):
        assert Training.of(runs_of(form)[0]) == form
    assert (PAPER.betas, PAPER.constant, MAD_LAB.betas, MAD_LAB.constant) == ((0.9, 0.98), False, (0.9, 0.999), True)


def test_in_the_paper_the_last_epoch_counts():
    found, last, asked = watch(PAPER, [[(0.5, 0.5, 1.0), (0.4, 0.3, 2.0)], [(1, 1, 0.1), (1, 1, 0.1)]])
    assert last == 2 and [one.epoch for one in found] == [2, 2] and found[0].test.accuracy == 0.3
    assert asked == [(2, "validation"), (2, "test")]


def test_a_diverged_run_counts_for_nothing_unless_an_epoch_did_before():
    curves = [[(0.5, 0.5, 1.0), (0.6, 0.6, 0.9)]] * 2
    alive = [[True, True], [True, False]]
    found, _, _ = watch(PAPER, curves, alive)
    assert found[1] is None and found[0].epoch == 2
    found, _, _ = watch(MAD_LAB, curves, alive)
    assert [one.epoch for one in found] == [2, 1]
    assert watch(MQAR, curves, alive)[0][1] is None


def test_mad_lab_takes_the_lowest_test_loss_and_stops_at_the_top():
    curves = [[(0.1, 0.2, 2.0), (0.3, 0.4, 1.0), (0.5, 0.6, 1.5)], [(0.9, 0.9995, 0.2), (0, 0, 0.1), (0, 0, 0.05)]]
    found, last, _ = watch(MAD_LAB, curves)
    assert last == 3 and [one.epoch for one in found] == [2, 1]
    assert isinstance(found[0], Counted) and found[0].validation.accuracy == 0.3 and found[0].test.loss == 1.0
    both = [[(0.9, 0.9995, 0.2), (0, 0, 9)]] * 2
    assert watch(MAD_LAB, both)[1] == 1


def test_mqar_ends_the_rates_of_a_setting_with_the_first_that_is_good_enough():
    curves = [[(0.2, 0.3, 1), (0.3, 0.4, 1), (0.9, 0.9, 1)], [(0.5, 0.6, 1), (0.995, 0.98, 1), (0.1, 0.1, 1)]]
    found, last, asked = watch(MQAR, curves)
    assert last == 2 and [one.epoch for one in found] == [2, 2] and found[0].test.accuracy == 0.4
    assert found[1].validation.accuracy == 0.995 and found[1].test.accuracy == 0.98
    assert asked == [(1, "validation"), (2, "validation"), (2, "test")]
    found, last, _ = watch(MQAR, curves, seeds=[0, 1])
    assert last == 3 and [one.epoch for one in found] == [3, 2], "another seed goes on"


def test_a_watch_goes_on_from_its_state():
    runs = [{"setting": "a", "seed": seed, "training": MAD_LAB.to_dict()} for seed in range(3)]
    looks = iter(range(100))

    def score(split):
        look = next(looks)
        return [
            Score(1.0 / (look + member + 1), 0.5, 1.0 if member == 0 and split == "test" else 0.1)
            for member in range(3)
        ]

    first = Watch(runs, score, lambda: [True, True, False])
    assert not first.look(1)
    second = Watch(runs, score, lambda: [True, True, False])
    second.load_state(first.state())
    assert second.state()["open"].tolist() == [1, 2] and len(second.state()["counted"]) == 2
    assert second.end(2) == first.end(2) and second.end(2)[0].epoch == 1
    assert second.epochs(2) == first.epochs(2) == [1, 2, 2]
    assert Watch.rows(first.state(), [2, 0])["ended"].tolist() == [[1, 1]]


def test_the_weights_that_count_are_put_back():
    """Member 0 is best after the second of three epochs, member 1 is good enough after the first, 2 never lives."""
    losses = iter([[2.0, 0.1, 1.0], [1.0, 9.0, 0.1], [1.5, 9.0, 0.1]])
    now = []

    def score(split):
        if split == "test":
            now[:] = next(losses)
        return [Score(loss, 0.5, 1.0 if loss == 0.1 else 0.2) for loss in now]

    weights = torch.zeros(3, 2)
    one = Watch(runs_of(MAD_LAB), score, lambda: [True, True, False], weights)
    for epoch in range(1, 4):
        weights[:] = epoch
        if epoch == 3:  # a checkpoint in between
            state = {name: x.clone() for name, x in one.state().items()}
            one = Watch(runs_of(MAD_LAB), score, lambda: [True, True, False], weights)
            one.load_state(state)
        one.look(epoch)
    assert [found and found.epoch for found in one.end(3)] == [2, 1, None]
    one.put_back()
    assert weights[:, 0].tolist() == [2, 1, 3]
    paper = Watch(runs_of(PAPER), score, lambda: [True] * 3, weights)
    assert set(paper.state()) == {"open", "counted", "ended"}, "the last epoch counts, so there is nothing to keep"


SMALL = {"d_model": 16, "options": {"tnl": {"num_heads": 2}, "swiglu": {"inner": 16}}}


@pytest.fixture
def go(monkeypatch, tmp_path):
    grid = (GridPoint(1e-2, 0.0), GridPoint(1e-2, 5.0))
    small = Budget("smoke", "", True, False, grid, epochs=3, batch_size=16, max_samples=40, held_out=32)
    monkeypatch.setitem(BUDGETS, "smoke", small)
    models = {"tnl+swiglu": architecture("tnl+swiglu", SMALL, state=0)}

    def run(name, tasks=("memorization", "compression"), **options):
        assert not train_mad(models, tmp_path / name, tasks=tasks, bundle=2, **options).failed
        return {one.key: one for one in read_results(tmp_path / name)}

    return run


def test_runs_of_mad_lab_are_trained_as_there(go, tmp_path, monkeypatch):
    made = []
    init = Ensemble.__init__
    monkeypatch.setattr(Ensemble, "__init__", lambda self, *a, **o: made.append(o) or init(self, *a, **o))
    found = go("mad-lab", spec="mad-lab")
    assert {(one["betas"], one["constant"], one["no_decay"]) for one in made} == {((0.9, 0.999), True, ())}
    assert all(one.spec == "mad-lab" and 1 <= one.epoch <= 3 for one in found.values())
    curve = [json.loads(line) for line in next(tmp_path.glob("mad-lab/runs/*/metrics.jsonl")).read_text().splitlines()]
    assert {row["factor"] for row in curve} == {1.0}
    made.clear()
    found = go("paper")
    assert {(one["betas"], one["constant"]) for one in made} == {((0.9, 0.98), False)}
    assert {one.epoch for one in found.values()} == {3}


def test_weight_decay_may_act_on_matrices_alone(go, tmp_path):
    """A decay that takes matrices to nothing: with norms excluded the run is another one."""
    everything, matrices = go("all"), go("matrices", decay="matrices")
    for key, one in everything.items():
        other = matrices[key]
        assert (one.decay, other.decay) == ("all", "matrices")
        assert (one.loss == other.loss) is (one.weight_decay == 0.0)
    reasons = score(list(matrices.values()))["tnl+swiglu"].reasons
    assert reasons[0] == BUDGETS["smoke"].caution and len(reasons) == 2
    of_core = [replace(one, budget="core") for one in matrices.values()]
    assert "excluded from weight decay" in score(of_core)["tnl+swiglu"].reasons[0]
    with pytest.raises(ConfigError, match="--no-weight-decay"):
        go("all", decay="matrices")
