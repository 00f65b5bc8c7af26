"""Loggers: other destinations for the rows of metrics.jsonl. A logger's package is imported only if it is used."""

from pathlib import Path
from typing import Literal

from linnet.config import refuse

LoggerName = Literal["tensorboard", "wandb"]


def check_loggers(names: list[LoggerName]) -> None:
    """Raises `ConfigError` that names each logger whose package is missing."""
    refuse([message for name in names if (message := _missing(name))])


def open_loggers(names: list[LoggerName], folder: Path, config: dict, step: int) -> list["TensorBoard | Wandb"]:
    """Opens the loggers of a run that starts, or continues, at `step`."""
    kinds = {"tensorboard": TensorBoard, "wandb": Wandb}
    return [kinds[name](folder, config, step) for name in names]


class TensorBoard:
    """Writes events to `<run>/tensorboard`."""

    def __init__(self, folder: Path, config: dict, step: int):
        from torch.utils.tensorboard import SummaryWriter

        # After a kill some steps run again; purge_step hides their earlier points.
        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1 if step else None)

    def write(self, row: dict) -> None:
        for name, value in _numbers(row).items():
            self._writer.add_scalar(name, value, row["step"])
        if "event" in row:
            self._writer.add_text("event", str(row), row["step"])

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """Logs to Weights & Biases. The id is the name of the run folder, so a resumed run continues the same record.

    Project, entity and mode come from the environment (WANDB_PROJECT, WANDB_ENTITY, WANDB_MODE).
    """

    def __init__(self, folder: Path, config: dict, step: int):
        import wandb

        self._run = wandb.init(id=folder.name, name=folder.name, dir=str(folder), config=config, resume="allow")

    def write(self, row: dict) -> None:
        self._run.log(_numbers(row), step=row["step"])

    def close(self) -> None:
        self._run.finish()


def _numbers(row: dict) -> dict[str, float]:
    if "evaluation" in row:  # its tokens, FLOPs and seconds do not belong to training
        row = {f"{row['evaluation']}/{name}": value for name, value in row.get("metrics", {}).items()}
    return {k: v for k, v in row.items() if k != "step" and isinstance(v, (int, float)) and not isinstance(v, bool)}


def _missing(name: LoggerName) -> str | None:
    try:
        if name == "tensorboard":
            import torch.utils.tensorboard  # noqa: F401
        else:
            import wandb  # noqa: F401
    except ImportError as error:
        return f"run.loggers: {name!r} needs a package that is not installed ({error}); pip install {name}, or drop it"
    return None
