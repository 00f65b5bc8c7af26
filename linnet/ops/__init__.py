"""Functions on tensors, each registered once with `torch.library`: fake, autograd, vmap and FLOP formula. Norms, gated
activations and rotations are not registered: where none of their kernels runs, they are PyTorch's own operations.

Layout [B, T, H, D]; an op with a state returns (o, final_state or None), but `short_convolution` o alone unless the
state is asked for, and has a `step` for one token, which updates the state in place. `use_backend` chooses the form
that runs, `debug` turns on checks of values. On a GPU a call that misses the fast kernels of its op warns once
(`SlowPathWarning`). Inside `linnet.ops.sequence.sequence_parallel` rows are spans of longer rows: `initial_state` is
then that before the whole row, and the final state that after the span.
"""

from linnet.ops.activation import gated_activation
from linnet.ops.additive import additive_attention, additive_step
from linnet.ops.backend import SlowPathWarning, debug, use_backend
from linnet.ops.cross_entropy import linear_cross_entropy
from linnet.ops.delta import gated_delta_rule, gated_delta_step
from linnet.ops.dplr import dplr_rule, dplr_step
from linnet.ops.gated import (
    forget_gate,
    forget_gated_attention,
    forget_gated_pending_step,
    forget_gated_step,
    gated_linear_attention,
    gated_step,
)
from linnet.ops.lightning import lightning_attention, lightning_pending_step, lightning_step, linear_attention
from linnet.ops.longconv import ModalFilter, filtered_attention, long_convolution, long_convolution_step
from linnet.ops.modal import modal_convolution, modal_step
from linnet.ops.modal.grid import modal_grid_convolution
from linnet.ops.norm import rms_norm
from linnet.ops.rotation import rotate
from linnet.ops.scan import diagonal_scan, diagonal_step
from linnet.ops.selective_scan import selective_scan, selective_step
from linnet.ops.shortconv import short_convolution, short_convolution_step
from linnet.ops.ssd import ssd, ssd_step
from linnet.ops.stepping import Pending

__all__ = [
    "ModalFilter",
    "Pending",
    "SlowPathWarning",
    "additive_attention",
    "additive_step",
    "debug",
    "diagonal_scan",
    "diagonal_step",
    "dplr_rule",
    "dplr_step",
    "filtered_attention",
    "forget_gate",
    "forget_gated_attention",
    "forget_gated_step",
    "forget_gated_pending_step",
    "gated_activation",
    "gated_delta_rule",
    "gated_delta_step",
    "gated_linear_attention",
    "gated_step",
    "lightning_attention",
    "lightning_step",
    "lightning_pending_step",
    "linear_attention",
    "linear_cross_entropy",
    "long_convolution",
    "long_convolution_step",
    "modal_convolution",
    "modal_grid_convolution",
    "modal_step",
    "rms_norm",
    "rotate",
    "selective_scan",
    "selective_step",
    "short_convolution",
    "short_convolution_step",
    "ssd",
    "ssd_step",
    "use_backend",
]
