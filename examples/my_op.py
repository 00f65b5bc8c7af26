"""An op outside the package, and a mixer of it: the delta rule (Schlag et al. 2021, arXiv:2102.11174).

Linear attention adds v_t to what the state answers for the key k_t. The delta rule replaces the answer instead:

    S_t = S_{t-1} + beta_t k_t^T (v_t - k_t S_{t-1})      the state, [K, V] per head; beta_t in (0, 1)
    o_t = q_t S_t / sqrt(K)

In a chunk of C tokens (Yang et al. 2024, arXiv:2406.06484), with S the state before it, beta in the rows of a matrix:

    A = strictly lower part of beta K K^T,    P = lower part of Q K^T,    U = (1 + A)^-1 beta (V - K S)
    O = Q S + P U,                            S <- S + K^T U

One call of `register` makes an op of a forward and a backward function. Autograd, torch.compile, vmap (`linnet mad run`
trains many models at once), autocast and counting of FLOPs then work as for the ops of the package, and a layer in this
file uses it:

    linnet train --mixer examples/my_op.py:DeltaMixer
"""

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from linnet.layers import Mixer, TensorSpec, register_mixer, short_convolution_spec
from linnet.layers.base import LayerConfig
from linnet.layers.short_conv import ShortConv
from linnet.ops.arguments import check_matrix_state
from linnet.ops.chunks import start_states, state_dtype
from linnet.ops.documents import over_documents
from linnet.ops.registration import empty_like, empty_state, register

try:
    import triton
    import triton.language as tl
except ImportError:  # on machines without a GPU
    triton = None

CHUNK = 32


def delta_rule(q, k, v, beta, *, scale=1.0, initial_state=None, output_final_state=False, cu_seqlens=None):
    """Returns o [B, T, H, V], and the final state [N, H, K, V] or None.

    Args:
        q, k: [B, T, H, K]. v: [B, T, H, V]. beta: [B, T, H].
        initial_state: [N, H, K, V], one per sequence or document; None for zeros.
        cu_seqlens: int32 [N+1] with B = 1, the boundaries of documents that are packed in one row; else N = B.
    """
    check_matrix_state("my_delta_rule", q, k, v, initial_state, cu_seqlens)
    o, final = OP.call(q, k, v, beta, initial_state, cu_seqlens, float(scale), output_final_state)
    return o, final if output_final_state else None


def delta_step(q, k, v, beta, state, *, scale=1.0):
    """One token: q, k [B, H, K], v [B, H, V], beta [B, H]. Updates the state [B, H, K, V] in place, returns o."""
    q, k, v, beta = (x.to(state.dtype)[..., None, :] for x in (q, k, v, beta[..., None]))
    state += k.mT @ (beta * (v - k @ state))
    return (scale * q @ state)[..., 0, :]


# The forward and the backward: plain functions of tensors. Arithmetic is float32, or float64 if an input is.


def forward(q, k, v, beta, initial_state, cu_seqlens, scale, return_final_state=True):
    states = start_states(initial_state, q, k, v, cu_seqlens)  # a copy, or zeros
    if q.is_cuda and triton is not None and states.dtype == torch.float32:
        o, final = run_kernel(q, k, v, beta, states, cu_seqlens, scale)
    else:  # over_documents pads documents with zeros, and beta = 0 keeps the state
        (o,), (final,) = over_documents(forward_chunks, inputs(q, k, v, beta, scale), [states], cu_seqlens)
    return o.to(v.dtype), final if return_final_state else None


def backward(q, k, v, beta, initial_state, cu_seqlens, scale, do, dfinal=None):
    states = [start_states(x, q, k, v, cu_seqlens) for x in (initial_state, dfinal)]
    tensors = [*inputs(q, k, v, beta, scale), do.to(states[0].dtype)]
    (dq, dk, dv, dbeta), (dinitial,) = over_documents(backward_chunks, tensors, states, cu_seqlens)
    return (scale * dq).to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dbeta[..., 0].to(beta.dtype), dinitial


def inputs(q, k, v, beta, scale):
    q, k, v, beta = (x.to(state_dtype(q, k, v)) for x in (q, k, v, beta[..., None]))
    return [scale * q, k, v, beta]


def split(x: Tensor) -> Tensor:
    """Cuts [n, L, H, D] into chunks [L / C, n, H, C, D]; zeros fill the last one."""
    x = F.pad(x, (0, 0, 0, 0, 0, -x.shape[1] % CHUNK))
    return x.unflatten(1, (-1, CHUNK)).permute(1, 0, 3, 2, 4)


def join(x: Tensor, length: int) -> Tensor:
    return x.permute(1, 0, 3, 2, 4).flatten(1, 2)[:, :length].contiguous()


def chunk_matrices(q, k, v, beta):
    """1 + A, P and (1 + A)^-1 beta [V, K], of all chunks at once."""
    one_and_a = (beta * k @ k.mT).tril(-1) + torch.eye(CHUNK, dtype=k.dtype, device=k.device)
    solved = torch.linalg.solve_triangular(one_and_a, beta * torch.cat([v, k], -1), upper=False, unitriangular=True)
    return one_and_a, (q @ k.mT).tril(), solved


def forward_chunks(tensors, states):
    """(q, k, v, beta) [n, L, H, ...] and the states [n, H, K, V] -> (o,) and (final states,)."""
    q, k, v, beta = map(split, tensors)
    (state,), outputs = states, []
    _, p, solved = chunk_matrices(q, k, v, beta)
    of_v, of_k = solved.split([v.shape[-1], k.shape[-1]], -1)
    for c in range(len(q)):
        u = of_v[c] - of_k[c] @ state
        outputs.append(q[c] @ state + p[c] @ u)
        state = state + k[c].mT @ u
    return [join(torch.stack(outputs), tensors[0].shape[1])], [state]


def backward_chunks(tensors, states):
    """(q, k, v, beta, do), (initial states, gradients of the final ones) -> gradients, (of the initial states,)."""
    q, k, v, beta, do = map(split, tensors)
    state, dstate = states
    one_and_a, p, solved = chunk_matrices(q, k, v, beta)
    of_v, of_k = solved.split([v.shape[-1], k.shape[-1]], -1)
    before, us = [], []
    for c in range(len(q)):  # the states before each chunk are computed again: they are larger than the inputs
        before.append(state)
        us.append(of_v[c] - of_k[c] @ state)
        state = state + k[c].mT @ us[c]
    after, dus = [dstate] * len(q), us.copy()
    for c in reversed(range(len(q))):
        after[c] = dstate
        dus[c] = p[c].mT @ do[c] + k[c] @ dstate
        dstate = dstate + q[c].mT @ do[c] - of_k[c].mT @ dus[c]
    before, us, after, dus = map(torch.stack, (before, us, after, dus))
    dsolved = torch.cat([dus, -dus @ before.mT], -1)
    dright = torch.linalg.solve_triangular(one_and_a.mT, dsolved, upper=True, unitriangular=True)
    da, dp = -(dright @ solved.mT).tril(-1), (do @ us.mT).tril()
    dv, dk = (beta * dright).split([v.shape[-1], k.shape[-1]], -1)
    dq = do @ before.mT + dp @ k
    dk = dk + dp.mT @ q + us @ after.mT + (beta * da) @ k + (beta * da).mT @ k
    dbeta = (dright * torch.cat([v, k], -1)).sum(-1, keepdim=True) + (da * (k @ k.mT)).sum(-1, keepdim=True)
    return [join(x, tensors[0].shape[1]) for x in (dq, dk, dv, dbeta)], [dstate]


# A Triton kernel, optional. It runs the recurrence, one program per document, head and 32 channels of v.

if triton is not None:

    @triton.jit
    def delta_kernel(
        q, k, v, beta, state, o, offsets, scale, T, H,
        K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, PACKED: tl.constexpr,
    ):  # fmt: skip
        row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
        keys, values = tl.arange(0, BK), tl.program_id(2) * BV + tl.arange(0, BV)
        own = (keys < K)[:, None] & (values < V)[None, :]
        at = state + (row * H + head) * K * V + keys[:, None] * V + values[None, :]
        s = tl.load(at, mask=own, other=0.0)
        start, end = row * T, row * T + T
        if PACKED:
            start, end = tl.load(offsets + row).to(tl.int64), tl.load(offsets + row + 1).to(tl.int64)
        for t in range(start, end):
            token = t * H + head
            q_t = tl.load(q + token * K + keys, mask=keys < K, other=0.0).to(tl.float32)
            k_t = tl.load(k + token * K + keys, mask=keys < K, other=0.0).to(tl.float32)
            v_t = tl.load(v + token * V + values, mask=values < V, other=0.0).to(tl.float32)
            u = tl.load(beta + token).to(tl.float32) * (v_t - tl.sum(s * k_t[:, None], 0))
            s += k_t[:, None] * u[None, :]
            tl.store(o + token * V + values, scale * tl.sum(s * q_t[:, None], 0), mask=values < V)
        tl.store(at, s, mask=own)


def run_kernel(q, k, v, beta, states, cu_seqlens, scale):
    """Returns o and the states, which it writes in place."""
    (_, T, H, K), V = q.shape, v.shape[-1]
    o = empty_like(v).float()
    q, k, v, beta = (x.contiguous() for x in (q, k, v, beta))
    grid = (len(states), H, triton.cdiv(V, 32))
    sizes = {"K": K, "V": V, "BK": triton.next_power_of_2(K), "BV": 32, "PACKED": cu_seqlens is not None}
    delta_kernel[grid](q, k, v, beta, states, o, cu_seqlens, scale, T, H, **sizes)
    return o, states


# What PyTorch has to know. FLOPs are those of one call on B rows of T tokens; a product and a sum are two.


def shapes(q, k, v, beta, initial_state, cu_seqlens, scale, return_final_state):
    """Empty tensors like the outputs, for compilers and for counting on the device meta."""
    return empty_like(v), empty_state(q, k, v, cu_seqlens) if return_final_state else None


def axes(arguments, in_dims):
    """The axes into which vmap folds models: the batch, or the heads of packed documents, whose batch is 1."""
    if in_dims[5] is not None:  # other documents in each model: the op runs once for each
        return None
    return ((0, 0, 0, 0, 0), (0, 0)) if arguments[5] is None else ((2, 2, 2, 2, 1), (2, 1))


def forward_flops(q_shape, k_shape, v_shape, *_, **__) -> int:
    (B, T, H, K), V = q_shape, v_shape[-1]
    return B * T * H * (CHUNK * (3 * K + 2 * V) + 6 * K * V)  # of triangles in a chunk, half is counted


def backward_flops(q_shape, k_shape, v_shape, *_, **__) -> int:
    (B, T, H, K), V = q_shape, v_shape[-1]
    return B * T * H * (CHUNK * (9 * K + 5 * V) + 16 * K * V)


OP = register(
    "my_delta_rule",
    "Tensor q, Tensor k, Tensor v, Tensor beta, Tensor? initial_state, Tensor? cu_seqlens, float scale, "
    "bool return_final_state=True",
    forward,
    backward,
    outputs=2,
    learned=range(5),  # q, k, v, beta and the initial state have gradients
    shapes=shapes,
    like=2,  # o is like v
    axes=axes,
    flops=forward_flops,
    backward_flops=backward_flops,
)


# A mixer of it, as in my_mixer.py, with a short convolution before q, k and v.


class DeltaConfig(LayerConfig):
    num_heads: int = Field(4, ge=1, description="heads; must divide d_model")
    conv_width: int = Field(4, ge=2, description="tokens that the short convolution reads")

    def check(self, context):
        if context.d_model % self.num_heads:
            return [f"num_heads: {self.num_heads} does not divide the width {context.d_model}; use a divisor"]
        return []


@register_mixer("my_delta", DeltaConfig)
class DeltaMixer(Mixer):
    def __init__(self, config, context):
        super().__init__()
        d_model, self.num_heads = context.d_model, config.num_heads
        self.head_dim = d_model // config.num_heads
        self.qkv = nn.Linear(d_model, 3 * d_model, bias=False)
        self.conv = ShortConv(3 * d_model, config.conv_width, silu=True)
        self.beta = nn.Linear(d_model, config.num_heads)
        self.out = nn.Linear(d_model, d_model, bias=False)
        self.out.ends_residual = True

    def forward(self, x, state=None, cu_seqlens=None):
        window, matrix = (None, None) if state is None else (state["conv"], state["matrix"])
        y, window = self.conv(self.qkv(x), window, cu_seqlens)
        o, matrix = delta_rule(
            *self.heads(x, y),
            scale=self.head_dim**-0.5,
            initial_state=matrix,
            output_final_state=state is not None,
            cu_seqlens=cu_seqlens,
        )
        return self.read(o), None if state is None else {"conv": window, "matrix": matrix}

    def step(self, x, state):
        y = self.conv.step(self.qkv(x), state["conv"])
        return self.read(delta_step(*self.heads(x, y), state["matrix"], scale=self.head_dim**-0.5).to(x.dtype)), state

    def state_spec(self, batch, context_length):
        """The inputs of the convolution are carried, but are not part of the state's size."""
        return {
            "conv": short_convolution_spec(batch, self.conv.channels, self.conv.width),
            "matrix": TensorSpec((batch, self.num_heads, self.head_dim, self.head_dim)),
        }

    def heads(self, x, y):
        q, k, v = y.unflatten(-1, (3, self.num_heads, self.head_dim)).unbind(-3)
        return q, F.normalize(k, dim=-1), v, self.beta(x).sigmoid()

    def read(self, o):
        return self.out(F.rms_norm(o, (self.head_dim,), eps=1e-6).flatten(-2))
