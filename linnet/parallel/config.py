"""The `parallel` block of a training: how its model, its rows and its tokens are divided among devices."""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from linnet.config import Config, Seconds
from linnet.models import ModelConfig
from linnet.models.stack import span_problems
from linnet.parallel import tensor

SequenceMethod = Literal["auto", "gather", "scan", "ring"]


@dataclass(frozen=True)
class Degrees:
    """How many ranks each dimension of the mesh has; their product is the number of ranks.

    Attributes:
        dp_replicate: copies of the sharded model. dp_shard: ranks that share one copy.
        sp: spans into which rows are cut in time. tp: parts of each layer.
    """

    dp_replicate: int
    dp_shard: int
    sp: int
    tp: int

    @property
    def world(self) -> int:
        return self.dp_replicate * self.dp_shard * self.sp * self.tp

    @property
    def dp(self) -> int:
        """Number of ranks that read different rows."""
        return self.dp_replicate * self.dp_shard

    def written(self) -> str:
        """Returns the degrees for a message: `dp_replicate 1 x dp_shard 4 x sp 1 x tp 2`."""
        return f"dp_replicate {self.dp_replicate} x dp_shard {self.dp_shard} x sp {self.sp} x tp {self.tp}"


class ParallelConfig(Config):
    """How a training is divided among devices. It changes the result by rounding at most, so no run is named by it."""

    dp_shard: Literal["auto"] | Annotated[int, Field(ge=1)] = Field(
        "auto", description="ranks that share one copy of weights, gradients and optimizer state (FSDP2); `auto` is "
        "the number of ranks that the other degrees leave"
    )  # fmt: skip
    dp_replicate: int = Field(1, ge=1, description="copies of the sharded model, each on its own ranks (HSDP)")
    tp: int = Field(1, ge=1, description="ranks that share each layer (tensor parallelism)")
    sp: int = Field(1, ge=1, description="ranks that share each row, cut in time into spans (sequence parallelism)")
    accumulation: int | None = Field(
        None, ge=1, description="parts of the batch in place of `accumulation`, for other memory; the gradient is the "
        "same"
    )  # fmt: skip
    sequence_method: SequenceMethod = Field(
        "auto", description="how states pass between spans: `gather`, `scan` (many ranks), `ring` (mixers without "
        "operations of Linnet), or `auto`"
    )  # fmt: skip
    reshard: bool = Field(True, description="free the gathered weights of a block after its forward pass")
    sync_parts: bool = Field(
        True, description="reduce gradients after every part of the batch; false keeps whole float32 gradients on "
        "every rank, 4 bytes per parameter, and reduces once"
    )  # fmt: skip
    timeout: Seconds = Field(
        600.0, description="seconds that a communication may take after the first step, which may take 1800"
    )  # fmt: skip

    @property
    def devices(self) -> int:
        """Number of devices that a run of a study asks for: the product of the degrees, `auto` counted as 1."""
        return self.dp_replicate * self.sp * self.tp * (1 if self.dp_shard == "auto" else self.dp_shard)

    def degrees(self, world: int) -> Degrees:
        """Returns the degrees on `world` ranks. Raises ValueError if `problems` finds that they do not fit."""
        if problems := self._mesh_problems(world):
            raise ValueError("; ".join(problems))
        fixed = self.dp_replicate * self.sp * self.tp
        return Degrees(
            self.dp_replicate, world // fixed if self.dp_shard == "auto" else self.dp_shard, self.sp, self.tp
        )

    def problems(
        self,
        world: int,
        model: ModelConfig,
        seq_len: int,
        batch_size: int,
        accumulation: int,
        growing: bool = False,
    ) -> list[str]:
        """Returns what does not fit, each with its fix; needs no device and no process group.

        Args:
            world: number of ranks.
            seq_len, batch_size, accumulation: of the training; the `accumulation` here overrides the last.
            growing: whether the first batch is one of `accumulation` parts of `batch_size` (`batch_ramp`).
        """
        parts, where = accumulation, "accumulation"
        if self.accumulation is not None:
            parts, where = self.accumulation, "parallel.accumulation"
        problems = self._mesh_problems(world)
        dp = world // (self.sp * self.tp) if problems else self.degrees(world).dp
        if 1 < dp * parts and dp * parts > batch_size and not problems:
            each = f"{dp} ranks" if parts == 1 else f"{dp} ranks in {parts} parts ({where})"
            problems.append(
                f"batch_size: {batch_size} rows cannot give {each} at least one row each; use batch_size >= "
                f"{dp * parts}, fewer devices, or more parallel.sp or parallel.tp"
            )
        problems += tensor.problems(model, self.tp) + self._span_problems(model, seq_len)
        rows, each_in = batch_size // accumulation, -(-parts // accumulation)
        if growing and not problems and dp * each_in > rows:
            each = f"{dp} ranks" + (f" in {each_in} parts (parallel.accumulation)" if each_in > 1 else "")
            problems.append(
                f"batch_ramp: the first batch has {rows} rows (batch_size {batch_size} / accumulation {accumulation}), "
                f"which cannot give {each} at least one row each; use a lower accumulation, or fewer devices"
            )
        return problems

    def _mesh_problems(self, world: int) -> list[str]:
        fixed = self.dp_replicate * self.sp * self.tp
        named = f"dp_replicate {self.dp_replicate} x sp {self.sp} x tp {self.tp}"
        if self.dp_shard == "auto":
            if world % fixed:
                return [
                    f"parallel: {named} = {fixed} does not divide the {world} devices; start a multiple of {fixed} "
                    "(--devices), or lower a degree"
                ]
            return []
        if fixed * self.dp_shard != world:
            return [
                f"parallel: dp_shard {self.dp_shard} x {named} = {fixed * self.dp_shard}, but there are {world} "
                f"devices; use dp_shard: auto, or --devices {fixed * self.dp_shard}"
            ]
        return []

    def _span_problems(self, model: ModelConfig, seq_len: int) -> list[str]:
        if self.sp == 1:
            return []
        if seq_len % self.sp:
            nearest = seq_len // self.sp * self.sp or self.sp
            return [f"parallel.sp: {self.sp} does not divide seq_len {seq_len}; use a divisor, or seq_len {nearest}"]
        span = seq_len // self.sp
        of = f" (parallel.sp: {self.sp} cuts seq_len {seq_len} into spans of {span} tokens)"
        return [f"model.{problem}{of}" for problem in span_problems(model, span, self.sp, self.tp)]
