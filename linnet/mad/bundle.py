"""A bundle: runs of one shape that are trained together, in the calling process.

Runs can share a bundle if model, length, number of samples, epochs and batch size are the same: the points of the grid
at one setting, its seeds, and settings that differ only in their data or in a small vocabulary. Then embeddings and
heads are padded to the largest vocabulary (`linnet.models.synthetic.pad_vocabulary`). If memory runs out, the bundle is
halved. When half of the runs of a bundle have ended early, their results are written and the others go on as a smaller
bundle.
"""

import contextlib
import copy
import json
import math
import shutil
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor, nn

from linnet import provenance, trust
from linnet.config import ConfigError, load_json, parse
from linnet.data.order import shuffled
from linnet.data.synthetic import Split, Task, find_task
from linnet.layers.base import load_plugin
from linnet.layers.routing import record_loads
from linnet.mad.training import Counted, Training, Watch
from linnet.models import ModelConfig
from linnet.models.synthetic import pad_vocabulary
from linnet.runs import Record, RunFolder, checkpoint
from linnet.runs.files import room, write_atomic
from linnet.runs.record import plain
from linnet.study.executors import Job, is_out_of_memory
from linnet.study.runner import in_halves
from linnet.study.timing import TIMED_STEPS, fastest
from linnet.train import device as devices
from linnet.train.monitor import Stop, graceful_stop
from linnet.train.objectives.synthetic import SyntheticObjective, synthetic_objective
from linnet.train.optimizer import split
from linnet.train.together import Ensemble, cosine

# Checkpoints of bundles, from which a killed bundle resumes exactly. They are in the folder of the first run.
#
# A checkpoint is written after a step if the last one is a minute old or the bundle is asked to stop; at the end of an
# epoch, after its scores. It contains the states of `Ensemble` and `Watch`, and the losses of an epoch so far; batches
# follow from seed and epoch. A bundle of some of its runs resumes from it, too; one with other runs ignores it.
#
# When a bundle ends, the results of all its runs are first written into one file, bundle.json, then into each run
# folder, so that a kill in between repeats no training.

SECONDS = 60.0  # between checkpoints: the training time that a kill can lose
RESULTS = "bundle.json"


class Found(NamedTuple):
    """The checkpoint that the runs of a bundle resume from.

    Attributes:
        epoch: number of finished epochs. batches: of the epoch that is not finished, with their `losses`.
        vocabulary: to which the embeddings of the models are padded, None if they are not.
        ensemble, watch: states of these runs. problems: files that are damaged.
        foreign: whether files of other checkpoints are in the folder.
    """

    epoch: int = 0
    vocabulary: int | None = None
    ensemble: Mapping[str, Tensor] | None = None
    watch: Mapping[str, Tensor] | None = None
    foreign: bool = False
    batches: int = 0
    losses: Tensor | None = None


def find_checkpoint(folders: Sequence[RunFolder]) -> Found:
    """Returns the checkpoint for the runs in `folders`: of their bundle, or of a larger one with all of them."""
    folder, runs = folders[0].checkpoint_folder, [run.path.name for run in folders]
    checkpoint.clean(folder)
    _, tensors, meta, problems = checkpoint.latest_good(folder)
    for problem in problems:
        warnings.warn(f"{problem}; the bundle resumes from an earlier epoch", stacklevel=2)
    known = meta.get("runs", [])
    foreign = bool(problems) or known != runs
    if not known or not set(runs) <= set(known):
        return Found(foreign=foreign)
    ensemble, watch, losses = tensors["ensemble"], tensors["watch"], tensors.get("epoch", {}).get("losses")
    if known != runs:
        places = [known.index(name) for name in runs]
        ensemble = {name: x[places] if x.ndim else x for name, x in ensemble.items()}
        watch = Watch.rows(watch, places)
        losses = losses if losses is None else losses[places]
    return Found(meta["epoch"], meta.get("vocabulary"), ensemble, watch, foreign, meta.get("batches", 0), losses)


class BundleCheckpoint:
    """The checkpoint of the runs in `folders`, which `ensemble` trains and `watch` scores.

    Args:
        found: where the runs begin. vocabulary: to which the embeddings are padded, None if they are not.
    """

    def __init__(
        self, folders: Sequence[RunFolder], ensemble: Ensemble, watch: Watch, found: Found, vocabulary: int | None
    ):
        self._folder, self._runs = folders[0].checkpoint_folder, [run.path.name for run in folders]
        self._ensemble, self._watch = ensemble, watch
        self._found, self._foreign, self._vocabulary = found, found.foreign, vocabulary
        self._last = time.monotonic()

    def load(self) -> int:
        """Restores the checkpoint. Returns the number of finished epochs, 0 if there is none for these runs."""
        if self._found.ensemble is not None and self._found.watch is not None:
            self._ensemble.load_state(self._found.ensemble)
            self._watch.load_state(self._found.watch)
        return self._found.epoch

    def keep(self, epoch: int, at_once: bool = False, batches: int = 0, losses: Tensor | None = None) -> None:
        """Writes a checkpoint after `epoch` epochs, if one is due. Raises `CheckpointError` if the disk is full.

        Args:
            batches: of the next epoch, whose losses so far are `losses`.
        """
        if time.monotonic() - self._last < SECONDS and not at_once:
            return
        if self._foreign:  # it may have more steps, and only the checkpoint with the most steps is kept
            shutil.rmtree(self._folder, ignore_errors=True)
            self._foreign = False
        self._save(self._folder, epoch, batches, losses)
        self._last = time.monotonic()

    def keep_for(self, run: RunFolder, epoch: int) -> None:
        """Writes a checkpoint of the whole bundle for a bundle of some of its runs, of which `run` is the first."""
        self.keep(epoch, at_once=True)
        if run.checkpoint_folder != self._folder:
            shutil.rmtree(run.checkpoint_folder, ignore_errors=True)
            self._save(run.checkpoint_folder, epoch)

    def _save(self, folder: Path, epoch: int, batches: int = 0, losses: Tensor | None = None) -> None:
        tensors = {"ensemble": self._ensemble.state(), "watch": self._watch.state()}
        meta = {"runs": self._runs, "epoch": epoch, "vocabulary": self._vocabulary}
        if losses is not None:
            tensors["epoch"] = {"losses": losses}
            meta["batches"] = batches
        checkpoint.save(folder, self._ensemble.step_number, tensors, meta, keep=1)


def write_results(folders: Sequence[RunFolder], results: Sequence[Mapping[str, Any]]) -> None:
    """Writes the results of a bundle's runs. After a kill in between, `finish` writes the rest."""
    names = [folder.path.name for folder in folders]
    write_atomic(folders[0].path / RESULTS, json.dumps(plain(dict(zip(names, results, strict=True)))) + "\n")
    finish(folders[:1])


def finish(folders: Iterable[RunFolder]) -> None:
    """Writes the results of finished bundles in `folders` to their runs, and removes their checkpoints.

    Raises:
        ConfigError: a file of results is damaged.
    """
    for folder in folders:
        path = folder.path / RESULTS
        if not path.is_file():
            continue
        try:
            results = load_json(path)
        except ValueError as error:
            problem = f"{path}: is damaged ({error}); delete it to train its runs again"
            raise ConfigError([problem], "MAD") from None
        for name, result in results.items():
            run = RunFolder(folder.path.parent / name)
            if run.path.is_dir() and not run.done:
                run.write_result(result)
            shutil.rmtree(run.checkpoint_folder, ignore_errors=True)  # including those of other bundles of these runs
        path.unlink()


DONE, DIVERGED = "done", "diverged"
INTERVAL = 10.0  # seconds of an epoch after which the folders of its runs say how far they are
# Keys of a run's configuration that must be equal in a bundle; a missing key differs from every value.
SHAPE = "architecture model layers autoencoder answers input_length train_samples held_out epochs batch_size training"
PADDED = 1024  # models of at most as many tokens may be padded; larger heads would cost more than a bundle saves


def shape_of(run: Mapping[str, Any]) -> str:
    """Returns a key that is equal for runs that can be trained together."""
    values = {key: run.get(key) for key in SHAPE.split()}
    if run["model"]["vocab_size"] <= PADDED:
        values["model"] = {key: value for key, value in run["model"].items() if key != "vocab_size"}
    return json.dumps(list(values.values()), sort_keys=True)


def train_bundle(job: Job) -> str:
    """Trains the runs of `job.payload["runs"]` (resolved configurations of one `SHAPE`) that have no result yet.

    Each has a run folder in `root`, with one row per epoch in metrics.jsonl and a result.json once it is done.

    Raises:
        ConfigError: one model alone does not fit into memory, or the disk is full.
    """
    payload = job.payload
    trust.accept(payload["plugin_digests"].values())  # the files as the process that planned the runs has read them
    trust.check_plugins(payload, f"the plan of {payload['root']}")
    for plugin in payload["plugins"]:
        load_plugin(plugin)
    with room(payload["root"], "MAD"):
        finish(_folder(payload, run) for run in payload["runs"])
    return in_halves(_missing(payload["runs"], payload), partial(_trained, payload))


def objective_of(run: Mapping[str, Any]) -> SyntheticObjective:
    """Returns the objective of a run's configuration: its task, and the model that solves it."""
    kind = find_task(run["task"])
    task, model = parse(kind, run["options"], kind.name), parse(ModelConfig, run["model"])
    return synthetic_objective(task, model, run.get("layers") == "mad-lab")


def run_flops(run: Mapping[str, Any], objective: SyntheticObjective | None = None) -> float:
    """Returns the training FLOPs of one run. `objective`: the run's objective, if the caller has it."""
    return run["epochs"] * run["train_samples"] * (objective or objective_of(run)).flops()


def seconds_per_step(run: Mapping[str, Any]) -> float:
    """Returns the seconds of a training step of one run on the CPU, from a few steps on its first samples."""
    few, device = {**run, "train_samples": run["batch_size"]}, torch.device("cpu")
    objective, rates = objective_of(few), ([run["learning_rate"]], [run["weight_decay"]])
    models, _, _ = _models([few], [objective], None)
    ensemble = Ensemble(models, *rates, 1 + TIMED_STEPS, device=device, vectorised=False, loss=objective.loss)
    batch = _Data([objective], [few], "train", device).take(torch.arange(run["batch_size"]))
    with devices.threads(device, run["model"]["d_model"], run["batch_size"] * run["input_length"]):
        return fastest(lambda: ensemble.step(*batch), device)


def _trained(payload: Mapping[str, Any], runs: list[dict]) -> list[dict]:
    """Trains runs together and writes their results. Returns those for which the bundle ended before they had one."""
    first, device = runs[0], torch.device(payload["device"])
    tokens = first["batch_size"] * first["input_length"] * len(runs)
    try:
        with (
            graceful_stop() as stop,
            room(payload["root"], "MAD"),
            devices.threads(device, first["model"]["d_model"], tokens),
        ):
            _train(runs, payload, stop)
    except Exception as error:
        if len(runs) > 1 or not is_out_of_memory(error):
            raise
        run = runs[0]
        problem = (
            f"{run['architecture']}, {run['setting']}: out of memory with one model at a batch of "
            f"{run['batch_size']} x {run['input_length']} tokens; use a larger device, or leave the setting out"
        )
        raise ConfigError([problem], "MAD") from None
    return _missing(runs, payload)


def _missing(runs: list[dict], payload: Mapping[str, Any]) -> list[dict]:
    return [run for run in runs if not _folder(payload, run).done]


def _train(runs: list[dict], payload: Mapping[str, Any], stop: Stop) -> None:
    first, device = runs[0], torch.device(payload["device"])
    epochs, samples, batch_size = first["epochs"], first["train_samples"], first["batch_size"]
    steps = epochs * -(-samples // batch_size)
    objectives, form = [objective_of(run) for run in runs], Training.of(first)
    folders = [RunFolder.create(payload["root"], run) for run in runs]
    start = find_checkpoint(folders)
    models, parameters, vocabulary = _models(runs, objectives, start.vocabulary)
    model = models[0]
    ensemble = Ensemble(
        models,
        [run["learning_rate"] for run in runs],
        [run["weight_decay"] for run in runs],
        steps,
        device=device,
        precision=payload["precision"],
        compile=payload["compile"],
        vectorised=len(runs) > 1,
        betas=form.betas,
        constant=form.constant,
        no_decay=_not_matrices(model) if form.matrices_only else (),
        loss=objectives[0].loss,
    )
    data = {split: _Data(objectives, runs, split, device) for split in get_args(Split)}
    watch = Watch(
        runs,
        lambda split: ensemble.score(*data[split].whole(), batch_size),
        lambda: ensemble.alive.tolist(),
        ensemble.state()["parameters"] if is_routed(model) else None,
    )
    flops = [run_flops(run, objective) for run, objective in zip(runs, objectives, strict=True)]
    checkpoint = BundleCheckpoint(folders, ensemble, watch, start, vocabulary)
    begin = checkpoint.load()
    for folder, cost in zip(folders, flops, strict=True):  # in place of those of an epoch that was cut off
        folder.write_progress(cost * (begin + min(1.0, start.batches * batch_size / samples)) / epochs)
    rest: list[int] = []  # members that go on in a smaller bundle
    records: list[Record] = []  # truncated once an epoch has fit into memory: halves may resume from them
    for epoch in range(begin, epochs):
        losses, done = torch.zeros(len(runs), device=device), 0
        if epoch == begin and start.losses is not None:
            losses, done = start.losses.to(device), start.batches
        written, seen = time.monotonic(), done * batch_size  # time of the last progress; samples of this epoch
        for number, rows in enumerate(_batches(runs, epoch, samples, batch_size, device)[done:], done + 1):
            losses += ensemble.step(*data["train"].take(rows)) * rows.shape[-1] / samples
            seen += rows.shape[-1]
            if seen < samples:
                stopped = stop.signal is not None
                checkpoint.keep(epoch, stopped, number, losses)
                if stopped:
                    stop.end()
            if time.monotonic() - written > INTERVAL:
                written = time.monotonic()
                for folder, cost in zip(folders, flops, strict=True):
                    folder.write_progress(cost * (epoch + seen / samples) / epochs)
        factor = 1.0 if form.constant else cosine(epoch, epochs)
        records = records or [folder.record(keep=begin) for folder in folders]
        for record, loss, cost in zip(records, losses.tolist(), flops, strict=True):
            record.write({"epoch": epoch + 1, "flops": cost * (epoch + 1) / epochs, "factor": factor, "loss": loss})
        if watch.look(epoch + 1) or not bool(ensemble.alive.any()):
            break
        if epoch + 1 < epochs:
            if watch.form.watch and len(watch.open) <= len(runs) // 2:
                rest = watch.open
                checkpoint.keep_for(folders[rest[0]], epoch + 1)
                break
            checkpoint.keep(epoch + 1, at_once=stop.signal is not None)
            if stop.signal is not None:
                stop.end()
    counted, diverged = watch.counted() if rest else watch.end(epoch + 1), ensemble.diverged_at()
    shared = {"bundle": len(runs)} | payload["common"] | provenance.stamp(device)
    made = [lost or steps // epochs * its for lost, its in zip(diverged, watch.epochs(epoch + 1), strict=True)]
    stats = [
        {"train_loss": loss, "parameters": count, "steps": its}
        for loss, count, its in zip(losses.tolist(), parameters, made, strict=True)
    ]
    if is_routed(model):
        watch.put_back()
        shares = expert_shares(ensemble, model, data["test"].whole()[0], batch_size, payload["precision"])
        stats = [stat | {"loads": loads} for stat, loads in zip(stats, shares, strict=True)]
    for record in records:
        record.close()
    ended = [index for index in range(len(runs)) if index not in rest]
    results = [_result(runs[i], counted[i], diverged[i]) | stats[i] | shared for i in ended]
    write_results([folders[i] for i in ended], results)
    if stop.signal is not None:
        stop.end()


def _models(
    runs: list[dict], objectives: list[SyntheticObjective], vocabulary: int | None
) -> tuple[list[nn.Module], list[int], int | None]:
    """Returns the models of runs, their numbers of parameters without padding, and the vocabulary after padding.

    Args:
        vocabulary: to which the embeddings were padded before; None pads them if they differ.
    """
    sizes = [objective.model.vocab_size for objective in objectives]
    if vocabulary is None and len(set(sizes)) > 1:
        vocabulary = max(sizes)
    built: dict[tuple[int, int], nn.Module] = {}
    counts: dict[tuple[int, int], int] = {}
    keys = [(run["seed"], size) for run, size in zip(runs, sizes, strict=True)]
    for key, objective in zip(keys, objectives, strict=True):
        if key in built:
            continue
        built[key] = objective.build(key[0])
        counts[key] = sum(p.numel() for p in built[key].parameters())
        if vocabulary is not None:
            pad_vocabulary(built[key], vocabulary)
    return [built[key] for key in keys], [counts[key] for key in keys], vocabulary


def _result(run: dict, counted: Counted | None, diverged_at: int | None) -> dict:
    keys = ("architecture", "task", "setting", "varied", "learning_rate", "weight_decay", "seed")
    numbers = dict.fromkeys("accuracy macro_batch validation_accuracy loss validation_loss epoch".split())
    lost = counted is None or not (math.isfinite(counted.test.loss) and math.isfinite(counted.validation.loss))
    if not lost:
        numbers |= {key: getattr(counted.test, key) for key in ("accuracy", "macro_batch", "loss")}
        numbers |= {"validation_accuracy": counted.validation.accuracy, "validation_loss": counted.validation.loss}
        numbers["epoch"] = counted.epoch
    status = {"status": DIVERGED if lost else DONE, "diverged_at": diverged_at, "spec": run["options"]["spec"]}
    decay = "matrices" if Training.of(run).matrices_only else "all"
    return {key: run[key] for key in keys} | numbers | status | {"decay": decay}


def _not_matrices(model: nn.Module) -> set[str]:
    """Returns the names of the parameters that are not matrices of linear layers."""
    rest = {id(p) for p in split(model)[2]}
    return {name for name, p in model.named_parameters() if id(p) in rest}


class _Data:
    """One split of each member's task on the device; members with the same data share it."""

    def __init__(self, objectives: list[SyntheticObjective], runs: list[dict], split: Split, device: torch.device):
        count = runs[0]["train_samples" if split == "train" else "held_out"]
        places: dict[tuple[Task, int], int] = {}
        members = list(zip(objectives, (run["seed"] for run in runs), strict=True))
        owners = [places.setdefault((objective.task, seed), len(places)) for objective, seed in members]
        drawn = [members[owners.index(place)][0].samples(split, count, seed) for (_, seed), place in places.items()]
        self.tensors = [torch.from_numpy(np.stack(arrays)).to(device) for arrays in zip(*drawn, strict=True)]
        self.owners = torch.tensor(owners, device=device) if len(places) > 1 else None

    def take(self, rows: Tensor) -> list[Tensor]:
        """Returns inputs and targets of rows [B] or [M, B]: [B, T] if all members share them, else [M, B, T]."""
        if self.owners is None:
            return [x[0, rows] for x in self.tensors]
        return [x[self.owners[:, None], rows] for x in self.tensors]

    def whole(self) -> list[Tensor]:
        """Returns inputs and targets of all rows: [N, T], or [M, N, T]."""
        return [x[0] if self.owners is None else x[self.owners] for x in self.tensors]


def _batches(runs: list[dict], epoch: int, samples: int, batch_size: int, device: torch.device) -> Sequence[Tensor]:
    """Returns the rows of each batch of an epoch, [B], or [M, B] if seeds differ; the last batch may be smaller."""
    places = np.arange(samples) + epoch * samples
    orders = {run["seed"]: shuffled(places, samples, run["seed"]) for run in runs}
    rows = orders[runs[0]["seed"]] if len(orders) == 1 else np.stack([orders[run["seed"]] for run in runs])
    return torch.from_numpy(rows).to(device).split(batch_size, dim=-1)


def _folder(payload: Mapping[str, Any], run: dict) -> RunFolder:
    return RunFolder(Path(payload["root"]) / RunFolder.name(run))


# How evenly the experts of routed layers are used. Results contain the shares under the key `loads`.

Shares = dict[str, list[float]]  # path of a layer in the model -> the share of each of its experts


def is_routed(model: nn.Module) -> bool:
    """Returns whether a model has layers with experts."""
    return any(hasattr(module, "route") for module in model.modules())


@torch.no_grad()
def expert_shares(
    ensemble: Ensemble, model: nn.Module, tokens: Tensor, batch_size: int, precision: str
) -> list[Shares]:
    """Runs each member once more, separately, and counts the expert choices of its tokens.

    Args:
        model: a model with the shape of the members. tokens: int64 [N, T], shared by all, or [M, N, T].

    Returns:
        For each member the share of all choices per expert; the shares of a layer sum to 1.
    """
    device = tokens.device
    model = copy.deepcopy(model).to(device)
    shares = []
    for index in range(ensemble.size):
        model.load_state_dict(ensemble.member(index), strict=False)  # buffers are not trained
        rows = tokens if tokens.ndim == 2 else tokens[index]
        low = torch.autocast(device.type, dtype=torch.bfloat16) if precision == "bfloat16" else contextlib.nullcontext()
        with low, record_loads(model) as recorded:
            for batch in rows.split(batch_size):
                model(batch)
        sizes = torch.tensor([len(batch) for batch in rows.split(batch_size)], device=device) / len(rows)
        shares.append({_layer_name(name): _mean_share(torch.stack(parts), sizes) for name, parts in recorded.items()})
    return shares


def _layer_name(name: str) -> str:
    return name.removeprefix("backbone.blocks.").replace(".", " ")


def _mean_share(parts: Tensor, sizes: Tensor) -> list[float]:
    return [round(share, 6) for share in (parts.double() * sizes[:, None].double()).sum(0).tolist()]
