"""What the steps of one training change, and how it goes into a checkpoint and out of it.

gradients()   forward and backward of the next batch
judge()       are the losses since the last call good?
apply()       clip, update, one step further
"""

import contextlib

import torch
from torch import Tensor

from linnet.config import ConfigError
from linnet.data import Batches, Corpus
from linnet.models import CausalLM, build_model
from linnet.models.causal_lm import IGNORE
from linnet.runs import RunFolder, checkpoint
from linnet.runs.checkpoint import Tensors
from linnet.runs.model import mismatches
from linnet.train import recompute
from linnet.train.config import TrainConfig
from linnet.train.feed import Feed
from linnet.train.guards import Guard, Trouble
from linnet.train.optim import Optimizer
from linnet.train.schedule import factor


class Session:
    """Model, optimizer and position of one training.

    Attributes:
        step: updates made. position: batches of the data order that are used up (more than `step` after a skip).
        recent: losses (nats a token) since the last row of the record.
        grad_norm: norm of the last gradient that was judged.
    """

    def __init__(self, config: TrainConfig, corpus: Corpus, device: torch.device):
        self.config, self.corpus, self.device = config, corpus, device
        self.model: CausalLM = build_model(config.model, seed=config.seed, device=device)
        recompute.apply(self.model, config.recompute)
        self._loss = torch.compile(self.model.loss) if config.compile else self.model.loss
        self.optimizer = Optimizer(self.model, config.optimizer)
        self.feed = Feed(Batches(corpus.train, config.seq_len, config.batch_size, config.seed), device)
        self.guard = Guard(config.guard)
        self.autocast = (
            torch.autocast(device.type, dtype=torch.bfloat16)
            if config.precision == "bfloat16"
            else contextlib.nullcontext()
        )
        # Reading a loss makes a GPU wait, so there it is left for the rows of the record, unless a bad batch must
        # be known before its update.
        self.judges_every_step = device.type == "cpu" or config.guard.policy == "skip"
        self.step = self.position = 0
        self.recent: list[float] = []
        self.grad_norm = 0.0
        self._unread: list[tuple[int, Tensor, Tensor]] = []  # position, loss, gradient norm: not judged yet

    def gradients(self) -> None:
        """Leaves the gradient of the mean loss over all targets of the next batch in the parameters."""
        while self.position in self.guard.skipped:
            self.position += 1
        tokens, targets = self.feed.get(self.position)
        parts = self.config.accumulation
        # Autograd has a thread for each GPU, which is of use where there are several: here there is one, and handing a
        # backward over to it and back takes the host some hundred microseconds on a machine that is busy.
        with torch.autograd.set_multithreading_enabled(False):
            if parts == 1:
                with self.autocast:
                    nll, count = self._loss(tokens, targets)
                loss = nll / count
                loss.backward()
            else:
                # All targets weigh the same, however the parts divide them: sum of all nll / number of all targets.
                count, loss = (targets != IGNORE).sum(), torch.zeros((), device=self.device)
                for part, part_targets in zip(tokens.tensor_split(parts), targets.tensor_split(parts), strict=True):
                    with self.autocast:
                        nll, _ = self._loss(part, part_targets)
                    share = nll / count
                    share.backward()
                    loss += share.detach()
        self._norm = self.optimizer.gradient_norm()
        self._unread.append((self.position, loss.detach(), self._norm))

    def judge(self) -> Trouble | None:
        """Reads the losses since the last call (a GPU is waited for here) and returns the first bad one."""
        if not self._unread:
            return None
        numbers = torch.stack([number for _, loss, norm in self._unread for number in (loss, norm)]).tolist()
        positions = [position for position, _, _ in self._unread]
        self._unread.clear()
        for position, loss, norm in zip(positions, numbers[0::2], numbers[1::2], strict=True):
            trouble = self.guard.watch(loss, norm, position)
            if trouble is not None:
                return trouble
            self.recent.append(loss)
        self.grad_norm = self._norm = numbers[-1]
        return None

    def apply(self) -> None:
        """The update: the schedule's learning rate, clipping, one step further."""
        self.optimizer.clip(self._norm)
        self.optimizer.step(factor(self.config.schedule, self.step, self.config.total_steps))
        self.step += 1
        self.position += 1

    def skip(self) -> None:
        """No update for this batch."""
        self.optimizer.drop_gradients()
        self.position += 1

    def state(self) -> tuple[Tensors, dict]:
        """Everything that the next steps depend on: tensors for safetensors, plain values for JSON."""
        random = {"cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            random["cuda"] = torch.cuda.get_rng_state(self.device)
        tensors = {"model": model_tensors(self.model), "optimizer": self.optimizer.tensors(), "random": random}
        return tensors, {
            "step": self.step,
            "position": self.position,
            "guard": self.guard.state(),
            "recent": self.recent,
            "data": self.corpus.digest,
            "documents": self.corpus.train.documents,
            "vocabulary": vocabulary(self.config, self.corpus),
        }

    def load(self, tensors: Tensors, meta: dict, rollback: bool = False) -> None:
        """Takes the state of `state()`. Raises `ConfigError` where it belongs to other data or another model."""
        if meta["data"] != self.corpus.digest:
            message = (
                f"data: the text changed since this run was checkpointed (digest {meta['data']}, now "
                f"{self.corpus.digest}); restore it, or delete the run folder to train anew"
            )
            raise ConfigError([message], "resume")
        load_model(self.model, tensors["model"])
        self.optimizer.load(tensors["optimizer"])
        self.optimizer.drop_gradients()
        torch.set_rng_state(tensors["random"]["cpu"])
        if self.device.type == "cuda" and "cuda" in tensors["random"]:
            torch.cuda.set_rng_state(tensors["random"]["cuda"], self.device)
        self.guard.load(meta["guard"], rollback)
        self.step, self.position, self.recent = meta["step"], meta["position"], list(meta["recent"])
        self._unread.clear()


def model_tensors(model: torch.nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name; what is shared (tied) comes once, as safetensors wants it."""
    seen: set[int] = set()
    tensors = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            tensors[name] = tensor.detach()
    return tensors


def load_model(model: torch.nn.Module, tensors: dict[str, Tensor], where: str = "checkpoint") -> None:
    """Copies saved tensors into `model`. Raises `ConfigError` that lists every name and shape that differs."""
    own = model_tensors(model)
    problems = mismatches(
        {name: tuple(tensor.shape) for name, tensor in own.items()},
        {name: tuple(tensor.shape) for name, tensor in tensors.items()},
    )
    if problems:
        raise ConfigError(problems, where)
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(tensors[name])


def vocabulary(config: TrainConfig, corpus: Corpus) -> dict:
    """What tokens mean in this run, to compare with another's."""
    return {
        "model": config.model.vocab_size,
        "tokenizer": corpus.tokenizer.name,
        "tokens": corpus.vocab_size,
        "digest": corpus.metadata["tokenizer"]["sha256"][:12],
    }


def start_from(session: Session, run: str) -> None:
    """Takes the weights of the last good checkpoint of another run (`init_from`); its step and optimizer stay behind.

    Raises:
        ConfigError: it has no good checkpoint, another vocabulary, or another model.
    """
    where = f"init_from {run}"
    path, tensors, meta, problems = checkpoint.latest_good(RunFolder.open(run).checkpoint_folder)
    if path is None:
        raise ConfigError(problems or [f"{run}: has no checkpoint"], where)
    mine, theirs = vocabulary(session.config, session.corpus), meta["vocabulary"]
    if any(mine[key] != theirs[key] for key in ("model", "tokens", "digest")):  # a tokenizer's name may be its file's
        message = (
            f"the vocabulary differs: {path} has {theirs['model']} rows for the {theirs['tokens']} tokens of "
            f"{theirs['tokenizer']} ({theirs['digest']}), this configuration {mine['model']} rows for the "
            f"{mine['tokens']} tokens of {mine['tokenizer']} ({mine['digest']}); "
            "use the same data.tokenizer and model.vocab_size"
        )
        raise ConfigError([message], where)
    load_model(session.model, tensors["model"], where)
