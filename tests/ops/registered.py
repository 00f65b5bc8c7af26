"""What PyTorch asks of a registered op."""

from collections.abc import Sequence

import torch

QUICK = ("test_schema", "test_autograd_registration", "test_faketensor")


def check_op(op, arguments: Sequence, symbolic: bool) -> None:
    """`torch.library.opcheck`. symbolic: sizes are symbols too, where nearly all of its time goes."""
    torch.library.opcheck(op, tuple(arguments), test_utils=(*QUICK, *["test_aot_dispatch_dynamic"] * symbolic))
