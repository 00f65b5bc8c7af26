"""How the Triton kernels of additive decay attention are cut and launched; `linnet.ops.additive.triton` says when."""

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from linnet.ops import backend
from linnet.ops.additive.kernels import (
    combine_kernel,
    edges_kernel,
    keys_kernel,
    link_kernel,
    sum_products_kernel,
    use_keys_kernel,
    use_values_kernel,
    values_kernel,
)
from linnet.ops.documents import count_states, documents
from linnet.ops.launching import align, choose_operands, count_processors, pad


class Tiles(NamedTuple):
    """How a sweep is cut: tokens a chunk, columns of the state a program, warps, chunks in flight."""

    chunk: int
    columns: int
    warps: int
    stages: int


# Programs that a multiprocessor holds at a time, by their registers.
RESIDENT = 2


def choose_tiles(widest: int, outer: int, dtype: torch.dtype, kind: str) -> Tiles:
    """Tiles for a state whose larger padded size is `widest`, of which programs own columns of the size `outer`.

    kind: "o", "dq", "dk" or "dv" (of which the last three need one chunk, since they share `edges`), and without
    causality "sum", "use" and "use keys".
    """
    if dtype != torch.bfloat16:
        return Tiles(32, min(outer, 32), 4, 1)
    if widest > 128:
        return Tiles(64, 32, 4, 2) if kind in ("dq", "dk") else Tiles(64, min(outer, 64), 8, 2)
    # The gradient of k has the most tiles at hand: with 64 columns one program alone fits into a multiprocessor.
    return Tiles(64, min(outer, 32 if kind == "dk" else 64), 4, 2)


class Call(NamedTuple):
    """The tensors of a call, contiguous and aligned (a kernel for other addresses rounds otherwise)."""

    q: Tensor
    k: Tensor
    v: Tensor
    theta: Tensor | None
    positions: Tensor | None
    cu_seqlens: Tensor | None
    scale: float
    blank: Tensor  # stands for tensors that a kernel does not read
    parts: int = 1  # into which sequences were cut, each a sequence of the batch now: `linnet.ops.additive.hopper`

    @classmethod
    def of(cls, q, k, v, theta, positions, cu_seqlens, scale) -> "Call":
        if backend.debugging():
            documents(cu_seqlens, *q.shape[:2])
        theta = None if theta is None else align(theta.float())
        positions = None if theta is None else align(positions)
        q, k, v = (align(x) for x in (q, k, v))
        return cls(q, k, v, theta, positions, cu_seqlens, scale, q.new_empty(1, dtype=torch.float32))

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
        """As many as give each processor `fill` programs, but of `least` chunks on average. Documents are cut alike."""
        B, T, H, K = self.q.shape
        tiles = self.tiles(kind)
        blocks = triton.cdiv(self.v.shape[3] if kind != "dq" else K, tiles.columns)
        places = fill * count_processors(self.q.device)
        return max(1, min(places // (self.states * H * blocks), B * T // self.states // (least * tiles.chunk)))

    def empty_state(self, *segments: int) -> tuple[Tensor, Tensor]:
        shape = (self.states, self.q.shape[2], *segments)
        rows, columns = self.state_shape
        new = self.blank.new_empty
        return new(*shape, rows, columns), new(*shape, self.q.shape[3])

    def edges(self, kind: str, segments: int, z: Tensor | None) -> tuple[Tensor, Tensor]:
        """References and masses of the chunks, and (in segments, which `link` has to join) log-sums [N, H, G, K]."""
        B, T, H, K = self.q.shape
        chunk = self.tiles(kind).chunk
        edges = self.blank.new_empty(B * T // chunk + self.states * (1 + segments), H, 2, K)
        ends = self.blank.new_empty(self.states, H, segments, K) if segments > 1 else self.blank
        columns = min(64, pad(K))
        edges_kernel[(triton.cdiv(K, columns) * self.states * H * segments,)](
            self.k, edges, ends, self._pick(z), self._pick(self.cu_seqlens), T, self.states, segments, H, K, chunk,
            columns, z is not None, self.cu_seqlens is not None, self.cu_seqlens is None and T % chunk == 0,
            segments > 1, 3, num_warps=1,
        )  # fmt: skip
        return edges, ends

    def link(self, kind: str, segments: int, edges: Tensor, ends: Tensor, z: Tensor | None) -> None:
        T, H, K = self.q.shape[1:]
        link_kernel[(self.states * H * segments,)](
            edges, ends, self._pick(z), self._pick(self.cu_seqlens), T, self.states, segments, H, K,
            self.tiles(kind).chunk, pad(K), 16, z is not None, self.cu_seqlens is not None,
        )  # fmt: skip

    def empty_slopes(self, segments: int) -> Tensor:
        if self.theta is None:
            return self.blank.expand(2, 1)
        return self.blank.new_empty(2, self.states * self.q.shape[2] * segments * self.q.shape[3])

    def sum_slopes(self, slopes: Tensor, segments: int, theta: Tensor | None) -> Tensor:
        """The gradient to theta from its shares [2, N, H, G, K]; empty without theta."""
        if theta is None:
            return self.blank.new_empty(0)
        H, K = self.q.shape[2:]
        return slopes.view(2, self.states, H, segments, K).sum((0, 1, 3)).to(theta.dtype)

    def dot(self, x: Tensor, y: Tensor) -> Tensor:
        """[N, H, K]: of two states, the sums of their products over columns and, with LRPE, over cosine and sine."""
        products = (x * y).sum(-1)
        return products if self.theta is None else products.unflatten(-1, (2, -1)).sum(-2)

    def summarise(
        self, segments: int, kind: str, do=None, dq=None, edges=None, every: bool = False
    ) -> tuple[Tensor, Tensor]:
        """S [N, H, G, K or 2K, V] and z (or what z's gradient gets) [N, H, G, K] of segments from zero.

        The last segment, in the order of the sweep, is left out unless asked for.
        """
        sums = self.empty_state(segments)
        count = segments if every else segments - 1
        self.values(kind, segments, do=do, dq=dq, edges=edges, leave=sums, sums=sums, count=count, summary=True)
        return sums

    def values(
        self, kind, segments, *, do=None, dq=None, out=None, edges=None, entry=(None, None), leave=(None, None),
        sums=None, count=None, summary=False,
    ) -> None:  # fmt: skip
        """Launches `values_kernel`: o, or dv, or summaries in either order."""
        B, T, H, K = self.q.shape
        V = self.v.shape[3]
        reverse = kind == "dv"
        chunk, columns, warps, stages = self.tiles(kind)
        if kind == "dq":  # its summaries, cut as its chunks are
            columns = self.tiles("dv").columns
        blocks = triton.cdiv(V, columns)
        pick = self._pick
        sums = sums or (None, None)
        values_kernel[(blocks * self.states * H * (segments if count is None else count),)](
            self.q, self.k, do if reverse else self.v, pick(out), pick(dq), pick(entry[0]), pick(entry[1]),
            pick(leave[0]), pick(leave[1]), pick(sums[0]), pick(sums[1]), pick(edges), pick(self.theta),
            pick(self.positions), pick(self.cu_seqlens), self.scale, T, self.states, segments, H, K, V, chunk, pad(K),
            columns, reverse, summary, self.theta is not None, self.positions is not None, entry[0] is not None,
            leave[0] is not None, self.cu_seqlens is not None, self.cu_seqlens is None and T % chunk == 0,
            segments > 1, *choose_operands(self.q.dtype), stages, self.q.is_cuda, num_warps=warps,
        )  # fmt: skip

    def keys(
        self, kind, segments, do, dq, out, edges, dtheta, *, entry=(None, None), end=None, leave=(None, None), sums=None
    ) -> None:
        """Launches `keys_kernel`: dq, or the gradient of k."""
        B, T, H, K = self.q.shape
        V = self.v.shape[3]
        chunk, columns, warps, stages = self.tiles(kind)
        pick = self._pick
        sums = sums or (None, None)
        keys_kernel[(triton.cdiv(K, columns) * self.states * H * segments,)](
            self.q, self.k, self.k, self.v, do, dq, out, pick(entry[0]), pick(entry[1]), pick(end), pick(leave[0]),
            pick(leave[1]), pick(sums[0]), pick(sums[1]), edges, pick(self.theta), dtheta, pick(self.positions),
            pick(self.cu_seqlens), self.scale, T, self.states, segments, H, K, V, chunk, pad(V), columns,
            kind == "dk", self.theta is not None, self.positions is not None, entry[0] is not None,
            leave[0] is not None, self.cu_seqlens is not None, self.cu_seqlens is None and T % chunk == 0,
            segments > 1, *choose_operands(self.q.dtype), stages, self.q.is_cuda, num_warps=warps,
        )  # fmt: skip

    def combine(self, segments: int, sums: tuple[Tensor, Tensor | None], S=None, entry=None) -> tuple[Tensor, Tensor]:
        """Without `S`: state and log-sum of the sequence. With it: the gradient to S, and what z takes from logits'."""
        K, V = self.q.shape[3], self.v.shape[3]
        out, out_z = self.empty_state()
        pick, (dS, dz) = self._pick, entry or (None, None)
        rows = 16
        combine_kernel[(triton.cdiv(K, rows) * self.states * self.q.shape[2],)](
            sums[0], pick(sums[1]), pick(S), self.blank, pick(dS), pick(dz), out, out_z, segments, K, V, rows, pad(V),
            self.theta is not None, S is not None, dS is not None,
        )  # fmt: skip
        return out, out_z

    def sum_products(self, segments: int, do: Tensor) -> Tensor:
        """[N, H, G, K or 2K, V]: scale q^T do of each segment."""
        B, T, H, K = self.q.shape
        V = self.v.shape[3]
        chunk, columns, warps, stages = self.tiles("sum")
        sums, _ = self.empty_state(segments)
        sum_products_kernel[(triton.cdiv(V, columns) * self.states * H * segments,)](
            self.q, do, sums, self._pick(self.theta), self._pick(self.positions), self._pick(self.cu_seqlens),
            self.scale, T, self.states, segments, H, K, V, chunk, pad(K), columns, *self._flags(chunk), stages,
            self.q.is_cuda, num_warps=warps,
        )  # fmt: skip
        return sums

    def use_values(self, segments: int, out: Tensor, S: Tensor, z: Tensor | None) -> None:
        """o = scale q S, or with z: out = softmax(k) S."""
        B, T, H, K = self.q.shape
        V = self.v.shape[3]
        chunk, columns, warps, stages = self.tiles("use")
        use_values_kernel[(triton.cdiv(V, columns) * self.states * H * segments,)](
            self.q, self.k, out, S, self._pick(z), self._pick(self.theta), self._pick(self.positions),
            self._pick(self.cu_seqlens), self.scale if z is None else 1.0, T, self.states, segments, H, K, V, chunk,
            pad(K), columns, z is not None, *self._flags(chunk), stages, self.q.is_cuda, num_warps=warps,
        )  # fmt: skip

    def use_keys(self, segments: int, x: Tensor, out: Tensor, S: Tensor, z, decline, dtheta: Tensor) -> None:
        """out = scale x S^T, x = do; or with z, x = v and S its gradient: the gradient of k."""
        B, T, H, K = self.q.shape
        V = self.v.shape[3]
        chunk, columns, warps, stages = self.tiles("use keys")
        use_keys_kernel[(triton.cdiv(K, columns) * self.states * H * segments,)](
            x, self.q if z is None else self.k, out, S, self._pick(z), self._pick(decline), self._pick(self.theta),
            dtheta, self._pick(self.positions), self._pick(self.cu_seqlens), self.scale if z is None else 1.0, T,
            self.states, segments, H, K, V, chunk, pad(V), columns, z is not None, *self._flags(chunk), stages,
            self.q.is_cuda, num_warps=warps,
        )  # fmt: skip

    def _flags(self, chunk: int) -> tuple:
        even = self.cu_seqlens is None and self.q.shape[1] % chunk == 0
        turns = (self.theta is not None, self.positions is not None)
        return *turns, self.cu_seqlens is not None, even, *choose_operands(self.q.dtype)

    def _pick(self, x: Tensor | None) -> Tensor:
        return self.blank if x is None else align(x)
