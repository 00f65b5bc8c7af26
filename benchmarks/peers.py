"""The peers that `kernels.py` times beside Linnet, each imported when it is first called."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

_BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}


def softmax(backend: str) -> Callable[..., Tensor]:
    """Causal softmax attention of PyTorch by cuDNN or FlashAttention."""

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(_BACKENDS[backend]):
            o = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True)
        return o.transpose(1, 2)

    return run


def left_product(rates: Tensor) -> Callable[..., Tensor]:
    """Linear attention as plain PyTorch writes it: all pairs of tokens, masked ("Vanilla" in paper 001, Figure 4)."""

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        places = torch.arange(q.shape[1], device=q.device)
        distance = places[:, None] - places
        mask = torch.exp(rates[:, None, None] * distance.clamp(min=0)).masked_fill(distance < 0, 0).to(q.dtype)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return (((q @ k.transpose(-1, -2)) * mask) @ v).transpose(1, 2)

    return run


def simple_gla(rates: Tensor) -> Callable[..., Tensor]:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        from fla.ops.simple_gla import chunk_simple_gla

        return chunk_simple_gla(q, k, v, g_gamma=rates, scale=1.0)[0]

    return run


def simple_gla_of_tokens(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor) -> Tensor:
    """With a decay per token and head."""
    from fla.ops.simple_gla import chunk_simple_gla

    allow_backward()
    return chunk_simple_gla(q, k, v, g=log_decay, scale=1.0)[0]


def lightning_attn(rates: Tensor) -> Callable[..., Tensor]:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        from lightning_attn.ops import lightning_attn_func

        q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))  # its layout; the copies are in its time
        return lightning_attn_func(q, k, v, -rates).transpose(1, 2)

    return run


def gla(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor) -> Tensor:
    from fla.ops.gla import chunk_gla

    return chunk_gla(q, k, v, log_decay, scale=1.0)[0]


def allow_backward() -> None:
    """fla 0.6 refuses its backward on Hopper below Triton 3.7.1, where its gradients may be wrong. Times are not."""
    from fla.ops.common import chunk_o

    chunk_o.TRITON_ABOVE_3_7_1 = True


def gated_delta(scale: float) -> Callable[..., Tensor]:
    def run(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, strength: Tensor) -> Tensor:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        allow_backward()
        return chunk_gated_delta_rule(q, k, v, log_decay, strength, scale=scale)[0]

    return run


def kda(scale: float) -> Callable[..., Tensor]:
    def run(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, strength: Tensor) -> Tensor:
        from fla.ops.kda import chunk_kda

        # With what it does for gates of at least -5, as those of the benchmark are.
        return chunk_kda(q, k, v, log_decay, strength, scale=scale, safe_gate=True)[0]

    return run


def gdn2(scale: float) -> Callable[..., Tensor]:
    def run(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, erase: Tensor, write: Tensor) -> Tensor:
        from fla.ops.gdn2 import chunk_gdn2

        return chunk_gdn2(q, k, v, log_decay, erase, write, scale=scale, safe_gate=True)[0]

    return run


def gla_with_hgrn2_gates(q: Tensor, logits: Tensor, v: Tensor, bounds: Tensor) -> Tensor:
    """Logits of the gates to decays and keys by PyTorch, as fla's HGRN2 layer does it, then `chunk_gla`."""
    log_gate = torch.logaddexp(bounds.log(), torch.log1p(-bounds) + F.logsigmoid(logits))
    return gla(q, (1 - log_gate.exp()).to(v.dtype), v, log_gate)


def lightnet(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    from fla.ops.lightnet import chunk_lightnet

    return chunk_lightnet(q, k, v, scale=1.0)[0]


def hgrn(x: Tensor, log_decay: Tensor) -> Tensor:
    from fla.ops.hgrn import chunk_hgrn

    return chunk_hgrn(x, log_decay)[0]


def cross_entropy_torch(targets: Tensor) -> Callable[..., Tensor]:
    """The mean loss from full logits in float32."""

    def run(x: Tensor, weight: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, weight).float(), targets)

    return run


def cross_entropy_fla(targets: Tensor) -> Callable[..., Tensor]:
    def run(x: Tensor, weight: Tensor) -> Tensor:
        from fla.modules import FusedLinearCrossEntropyLoss

        return FusedLinearCrossEntropyLoss()(x, targets, weight)

    return run
