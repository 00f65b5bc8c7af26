"""Dropout in a whole training: the same masks under accumulation, recomputation, resuming and packing."""

import pytest

from linnet.models import family
from linnet.runs import RunFolder
from linnet.train import train

LONG = {"steps": 8, "log_every": 1, "checkpoint_every": 3}


@pytest.fixture(scope="module")
def dropped(settings):
    model = family("hgrn2")(16, 2, num_heads=2).model_dump()
    return lambda **changes: settings(**{**LONG, "model": model | {"dropout": 0.2}, **changes})


def losses(run: RunFolder) -> list[float]:
    return [row["loss"] for row in run.metrics() if "loss" in row]


@pytest.fixture(scope="module")
def whole(dropped, cache, tmp_path_factory) -> list[float]:
    return losses(train(dropped(), tmp_path_factory.mktemp("whole"), cache))


def test_dropout_is_applied(settings, dropped, whole, cache, tmp_path):
    model = dropped().model.model_dump() | {"dropout": 0.0}
    plain = losses(train(settings(**LONG, model=model), tmp_path, cache))
    assert len(whole) == 8 and all(one != other for one, other in zip(whole, plain, strict=True))


@pytest.mark.parametrize("changes", [{"accumulation": 2}, {"accumulation": 4}, {"recompute": "block"}])
def test_masks_do_not_depend_on_how_a_step_is_made(dropped, whole, cache, tmp_path, changes):
    assert losses(train(dropped(**changes), tmp_path, cache)) == pytest.approx(whole, rel=1e-5)


def test_rows_that_a_loss_joins_keep_their_masks(dropped, cache, tmp_path):
    data = dropped().data.model_dump() | {"packing": "reset"}
    runs = [train(dropped(data=data, accumulation=parts), tmp_path / str(parts), cache) for parts in (1, 4)]
    assert losses(runs[0]) == pytest.approx(losses(runs[1]), rel=1e-5)


def test_a_resumed_run_has_the_masks_of_one_that_was_never_stopped(dropped, whole, cache, tmp_path, monkeypatch):
    from linnet.train.session import Session

    apply = Session.apply

    def stop(session):
        if session.step == 5:
            raise KeyboardInterrupt
        apply(session)

    monkeypatch.setattr(Session, "apply", stop)
    with pytest.raises(KeyboardInterrupt):
        train(dropped(), tmp_path, cache)
    monkeypatch.setattr(Session, "apply", apply)
    assert losses(train(dropped(), tmp_path, cache)) == whole
