"""How the Triton kernels of additive decay attention are cut and launched; `linnet.ops.additive.triton` says when."""

from typing import NamedTuple

import torch
from torch import Tensor

from linnet.ops import backend
from linnet.ops.additive.kernels import (
    boundaries_kernel,
    combine_kernel,
    keys_kernel,
    link_kernel,
    sum_products_kernel,
    use_keys_kernel,
    use_values_kernel,
    values_kernel,
)
from linnet.ops.documents import count_states, documents
from linnet.ops.launching import align, cdiv, choose_operands, count_processors, is_hopper, launch, pad
from linnet.ops.shares import sum_shares


class Tiles(NamedTuple):
    """How a sweep is cut: tokens per chunk, columns of the state per program, warps, chunks in flight."""

    chunk: int
    columns: int
    warps: int
    stages: int


# Programs that a multiprocessor holds at a time, limited by registers.
RESIDENT = 2
# Registers of a thread without causality, in bfloat16 on Hopper with LRPE, heads of 64 and at most two axes. Without a
# limit a multiprocessor holds two or three programs, too few to hide what they wait for; with it three ("summary"),
# four, or five ("use keys"). Times with and without: docs/kernels.md.
REGISTERS = {"summary": 168, "sum": 128, "use": 128, "use keys": 96}
NOTHING = (None, None)


def choose_tiles(widest: int, outer: int, dtype: torch.dtype, kind: str) -> Tiles:
    """Tiles for a state whose larger padded size is `widest`, where programs own columns of the size `outer`.

    kind: "o", "summary" (of o), "dq", "dk" or "dv" (the last three take one chunk size, since they share `boundaries`),
    and without causality "sum", "use" and "use keys".
    """
    if dtype != torch.bfloat16:
        return Tiles(32, min(outer, 32), 4, 1)
    if kind in ("summary", "sum", "use"):
        return Tiles(64, min(outer, 64), 4 if widest <= 128 else 8, 3 if widest <= 128 else 2)
    if kind == "use keys" and widest <= 128:  # 64 tokens x 64 columns of cosines, sines and products spill registers
        return Tiles(32, min(outer, 64), 4, 2)
    if widest > 128:
        return Tiles(64, 32, 4, 2) if kind in ("dq", "dk") else Tiles(64, min(outer, 64), 8, 2)
    # The gradient of k needs the most tiles: with 64 columns a multiprocessor holds only one program.
    return Tiles(64, min(outer, 32 if kind == "dk" else 64), 4, 2)


class Call(NamedTuple):
    """The tensors of a call, contiguous and aligned (kernels for other addresses round differently), and its launches.

    Tensors that a kernel does not read are replaced by `blank`.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    theta: Tensor | None
    positions: Tensor | None
    cu_seqlens: Tensor | None
    scale: float
    blank: Tensor
    silu: bool = False  # of q, in the kernels without causality
    segments: int = 1  # into which `linnet.ops.additive.hopper` cut sequences, each a sequence of the batch now

    @classmethod
    def of(cls, q, k, v, theta, positions, cu_seqlens, scale, silu=False) -> "Call":
        if backend.debugging():
            documents(cu_seqlens, *q.shape[:2])
        theta = None if theta is None else align(theta.float())
        if theta is None:
            positions = None
        elif positions is not None and positions.ndim == 2:  # Hopper's kernels read a row per sequence
            positions = positions.expand(q.shape[0], -1)
        positions = align(positions)
        q, k, v = (align(x) for x in (q, k, v))
        return cls(q, k, v, theta, positions, cu_seqlens, scale, q.new_empty(1, dtype=torch.float32), silu)

    @property
    def states(self) -> int:
        return count_states(self.cu_seqlens, self.q.shape[0])

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """[K or 2K, V]."""
        return self.q.shape[3] * (1 if self.theta is None else 2), self.v.shape[3]

    def tiles(self, kind: str) -> Tiles:
        rows, columns = (pad(x) for x in self.state_shape)
        outer = pad(self.q.shape[3]) if kind in ("dq", "dk", "use keys") else columns
        return choose_tiles(max(rows, columns), outer, self.q.dtype, kind)

    def count_segments(self, kind: str, fill: int = RESIDENT, least: int = 16) -> int:
        """Segments that give each processor `fill` programs, of at least `least` chunks on average.

        Every document is cut into as many.
        """
        B, T, H, K = self.q.shape
        tiles = self.tiles(kind)
        blocks = cdiv(self.v.shape[3] if kind != "dq" else K, tiles.columns)
        places = fill * count_processors(self.q.device)
        return max(1, min(places // (self.states * H * blocks), B * T // self.states // (least * tiles.chunk)))

    def empty_state(self, *segments: int) -> tuple[Tensor, Tensor]:
        """S [N, H, segments, K or 2K, V] and z [N, H, segments, K], uninitialised."""
        shape = (self.states, self.q.shape[2], *segments)
        new = self.blank.new_empty
        return new(*shape, *self.state_shape), new(*shape, self.q.shape[3])

    def empty_dtheta(self, segments: int) -> Tensor:
        """Shares of programs in the gradient of theta, from dq and from the gradient of k."""
        if self.theta is None:
            return self.blank.expand(2, 1)
        return self.blank.new_empty(2, self.states * self.q.shape[2] * segments * self.q.shape[3])

    def sum_dtheta(self, shares: Tensor, segments: int, theta: Tensor | None) -> Tensor:
        """The gradient of theta from its shares [2, N, H, G, K]; empty without theta."""
        if theta is None:
            return self.blank.new_empty(0)
        H, K = self.q.shape[2:]
        return sum_shares(shares.view(2 * self.states, H, segments, K), theta.dtype)

    def dot(self, x: Tensor, y: Tensor) -> Tensor:
        """[N, H, K]: of two states, the sums of their products over columns and, with LRPE, over cosine and sine."""
        products = (x * y).sum(-1)
        return products if self.theta is None else products.unflatten(-1, (2, -1)).sum(-2)

    def boundaries(self, kind: str, segments: int, z: Tensor | None) -> tuple[Tensor, Tensor]:
        """References and denominators of chunks, and of several segments, which `link` joins, log-sums [N, H, G, K]."""
        B, T, H, K = self.q.shape
        chunk = self.tiles(kind).chunk
        boundaries = self.blank.new_empty(B * T // chunk + self.states * (1 + segments), H, 2, K)
        ends = self.blank.new_empty(self.states, H, segments, K) if segments > 1 else self.blank
        columns = min(64, pad(K))
        constants = (K, chunk, columns, z is not None, *self._rows(chunk), segments > 1, 3)
        tensors = (self.k, boundaries, ends, z, self.cu_seqlens)
        self._launch(boundaries_kernel, K, columns, segments, tensors, (), constants, num_warps=1)
        return boundaries, ends

    def link(self, kind: str, segments: int, boundaries: Tensor, ends: Tensor, z: Tensor | None) -> None:
        """Adds to the boundaries of each segment what comes before it."""
        K = self.q.shape[3]
        constants = (K, self.tiles(kind).chunk, pad(K), 16, z is not None, self.cu_seqlens is not None)
        self._launch(link_kernel, 1, 1, segments, (boundaries, ends, z, self.cu_seqlens), (), constants)

    def summarise(
        self, segments: int, kind: str, do=None, dq=None, boundaries=None, every: bool = False
    ) -> tuple[Tensor, Tensor]:
        """S [N, H, G, K or 2K, V] and z (or its gradient's share) [N, H, G, K] of segments from zero.

        Leaves out the last segment, in the order of the sweep, unless `every`.
        """
        sums = self.empty_state(segments)
        count = segments if every else segments - 1
        self.values(
            kind, segments, do=do, dq=dq, boundaries=boundaries, final=sums, sums=sums, count=count, summary=True
        )
        return sums

    def values(
        self, kind, segments, *, do=None, dq=None, out=None, boundaries=None, initial=NOTHING, final=NOTHING,
        sums=None, count=None, summary=False,
    ) -> None:  # fmt: skip
        """Launches `values_kernel`: o, or dv, or summaries in either order, of all or `count` segments."""
        K, V = self.q.shape[3], self.v.shape[3]
        tiles = "summary" if summary and kind == "o" else kind
        chunk, columns, warps, stages = self.tiles(tiles)
        if kind == "dq":  # its summaries, cut as its chunks are
            columns = self.tiles("dv").columns
        tensors = (
            self.q, self.k, do if kind == "dv" else self.v, out, dq, *initial, *final, *(sums or NOTHING), boundaries,
            self.theta, self.positions, self.cu_seqlens,
        )  # fmt: skip
        constants = (
            K, V, chunk, pad(K), columns, kind == "dv", summary, *self._rotates, initial[0] is not None,
            final[0] is not None, *self._rows(chunk), segments > 1, *self._products(stages),
        )  # fmt: skip
        limit = self._limit(tiles) if summary and count == segments else {}
        numbers, options = (self.scale,), {"num_warps": warps} | limit
        self._launch(values_kernel, V, columns, segments, tensors, numbers, constants, count=count, **options)

    def keys(
        self, kind, segments, do, dq, out, boundaries, dtheta, *, initial=NOTHING, end=None, final=NOTHING, sums=None
    ) -> None:
        """Launches `keys_kernel`: dq, or the gradient of k."""
        K, V = self.q.shape[3], self.v.shape[3]
        chunk, columns, warps, stages = self.tiles(kind)
        tensors = (
            self.q, self.k, self.k, self.v, do, dq, out, *initial, end, *final, *(sums or NOTHING), boundaries,
            self.theta, dtheta, self.positions, self.cu_seqlens,
        )  # fmt: skip
        constants = (
            K, V, chunk, pad(V), columns, kind == "dk", *self._rotates, initial[0] is not None, final[0] is not None,
            *self._rows(chunk), segments > 1, *self._products(stages),
        )  # fmt: skip
        self._launch(keys_kernel, K, columns, segments, tensors, (self.scale,), constants, num_warps=warps)

    def combine(
        self, segments: int, sums: tuple[Tensor, Tensor | None], S=None, gradients=NOTHING
    ) -> tuple[Tensor, Tensor]:
        """Without `S`: state and log-sum of the sequence. With it: the gradient of S, and delta."""
        K, V = self.q.shape[3], self.v.shape[3]
        out = self.empty_state()
        flags = (self.theta is not None, S is not None, gradients[0] is not None)
        tensors = (*sums, S, None, *gradients, *out)
        programs = cdiv(K, 16) * self.states * self.q.shape[2]
        launch(combine_kernel, programs, self._pick(tensors), (), (segments, K, V, 16, pad(V), *flags))
        return out

    def sum_products(self, segments: int, do: Tensor) -> Tensor:
        """[N, H, G, K or 2K, V]: scale q^T do of each segment."""
        K, V = self.q.shape[3], self.v.shape[3]
        chunk, columns, warps, stages = self.tiles("sum")
        sums, _ = self.empty_state(segments)
        tensors = (self.q, do, sums, self.theta, self.positions, self.cu_seqlens)
        constants = (K, V, chunk, pad(K), columns, self.silu, *self._rotates, *self._rows(chunk))
        constants += self._products(stages)
        options = {"num_warps": warps} | self._limit("sum")
        self._launch(sum_products_kernel, V, columns, segments, tensors, (self.scale,), constants, **options)
        return sums

    def use_values(self, segments: int, out: Tensor, S: Tensor, z: Tensor | None) -> None:
        """o = scale q S, or with z: out = softmax(k) S."""
        K, V = self.q.shape[3], self.v.shape[3]
        chunk, columns, warps, stages = self.tiles("use")
        tensors = (self.q, self.k, out, S, z, self.theta, self.positions, self.cu_seqlens)
        silu = self.silu and z is None
        constants = (K, V, chunk, pad(K), columns, z is not None, silu, *self._rotates, *self._rows(chunk))
        constants += self._products(stages)
        numbers, options = (self.scale if z is None else 1.0,), {"num_warps": warps} | self._limit("use")
        self._launch(use_values_kernel, V, columns, segments, tensors, numbers, constants, **options)

    def use_keys(self, segments: int, x: Tensor, out: Tensor, S: Tensor, z, delta, dtheta: Tensor) -> None:
        """out = scale x S^T, x = do; or with z, x = v and S its gradient: the gradient of k."""
        K, V = self.q.shape[3], self.v.shape[3]
        chunk, columns, warps, stages = self.tiles("use keys")
        k = self.q if z is None else self.k
        tensors = (x, k, out, S, z, delta, self.theta, dtheta, self.positions, self.cu_seqlens)
        silu = self.silu and z is None
        constants = (K, V, chunk, pad(V), columns, z is not None, silu, *self._rotates, *self._rows(chunk))
        constants += self._products(stages)
        numbers, options = (self.scale if z is None else 1.0,), {"num_warps": warps} | self._limit("use keys")
        self._launch(use_keys_kernel, K, columns, segments, tensors, numbers, constants, **options)

    def _limit(self, kind: str) -> dict[str, int]:
        """The limit of registers for kernels of a kind, as an option of a launch."""
        rotates, axes, _ = self._rotates
        wide = pad(self.q.shape[3]) != 64 or pad(self.v.shape[3]) != 64
        fits = rotates and axes <= 2 and not wide and self.q.dtype == torch.bfloat16 and is_hopper(self.q.device)
        return {"maxnreg": REGISTERS[kind]} if fits and kind in REGISTERS else {}

    def _launch(
        self, kernel, width: int, columns: int, segments: int, tensors: tuple, numbers: tuple, constants: tuple,
        count: int | None = None, **options: int,
    ) -> None:  # fmt: skip
        """Starts a program for each block of columns of `width`, each head, and each segment or `count` of them."""
        T, H = self.q.shape[1:3]
        programs = cdiv(width, columns) * self.states * H * (segments if count is None else count)
        launch(kernel, programs, self._pick(tensors), numbers, (T, self.states, segments, H, *constants), **options)

    @property
    def _rotates(self) -> tuple[bool, int, bool]:
        """Whether there is LRPE, the axes of positions (0: tokens are counted), and whether sequences share them."""
        if self.positions is None:
            return self.theta is not None, 0, False
        axes = self.positions.shape[2] if self.positions.ndim == 3 else 1
        return True, axes, self.positions.shape[0] < self.q.shape[0]

    def _rows(self, chunk: int) -> tuple[bool, bool]:
        """Whether there are documents, and whether all chunks are full."""
        return self.cu_seqlens is not None, self.cu_seqlens is None and self.q.shape[1] % chunk == 0

    def _products(self, stages: int) -> tuple:
        """Operands and precision, chunks in flight, and how angles are taken (`cosine_sine`).

        Positions on several axes are taken to be rows and columns of a grid, so small that the plain product is enough.
        """
        _, axes, _ = self._rotates
        fast = 2 if axes > 1 and self.q.dtype == torch.bfloat16 else 1
        return *choose_operands(self.q.dtype), stages, fast * self.q.is_cuda

    def _pick(self, tensors: tuple[Tensor | None, ...]) -> tuple[Tensor, ...]:
        return tuple([self.blank if x is None else align(x) for x in tensors])
