"""What steps share whose state is written only every N tokens: the room [B, H, N - 1, D] where the others wait."""

import torch
from torch import Tensor
from torch.nn import functional as F

MOST = 32  # tokens that a kernel looks at in one tile


def check_room(op: str, waiting: Tensor, **rooms: tuple[Tensor, Tensor]) -> None:
    """Raises `ValueError` unless each room goes with its token [B, H, D] and with `waiting`, int32 [B]."""
    lengths = {room.shape[2] if room.ndim == 4 else 0 for room, _ in rooms.values()}
    for name, (room, token) in rooms.items():
        B, H, D = token.shape
        if lengths == {0} or len(lengths) > 1 or room.shape != (B, H, *lengths, D) or room.dtype != token.dtype:
            shapes = ", ".join(f"{name} {list(room.shape)} {room.dtype}" for name, (room, _) in rooms.items())
            raise ValueError(
                f"{op}: {shapes}; give {name} [{B}, {H}, N - 1, {D}] of {token.dtype}, with one N > 1 for all"
            )
    if waiting.shape != (B,) or waiting.dtype != torch.int32:
        raise ValueError(f"{op}: waiting {list(waiting.shape)} {waiting.dtype}; give int32 [{B}]")


def is_room(waiting: Tensor, *rooms: Tensor) -> bool:
    """Whether kernels take these: each in one piece, and no room too long."""
    return waiting.is_contiguous() and all(room.is_contiguous() and room.shape[2] < MOST for room in rooms)


def enter(token: Tensor, room: Tensor, waiting: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Puts a token [B, H, D] behind those that wait, in the room too if it has a place there.

    Returns:
        all tokens [B, H, N, D], which of them are tokens [B, 1, N, 1], which sequences are full [B, 1, 1, 1].
    """
    number = waiting.long()[:, None, None, None]
    place = torch.arange(room.shape[2] + 1, device=token.device)[:, None]
    tokens = torch.where(place == number, token[:, :, None], F.pad(room, (0, 0, 0, 1)))
    full = number == room.shape[2]
    room.copy_(torch.where(full, room, tokens[:, :, :-1]))
    there = place <= number
    return tokens.where(there, 0.0), there, full
