"""Small pictures of line segments, drawn once: every segment of a Pathfinder image is one of a few dozen stamps.

A segment of whole-number length starts at a pixel. The public generator (github.com/drewlinsley/pathfinder) draws it at
twice the resolution, where it ends at a whole pixel, and scales it down with a Lanczos filter. So its picture depends
only on that end: there are a few dozen different ones, for 360 orientations of first segments and for the pixels of the
circle on which later ones start.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

LARGEST = 255
SCALE = 2  # antialiasing
SMALLEST = 1e-9  # a smaller weight of a turn is 0


@dataclass(frozen=True)
class Segment:
    """Attributes: length, thickness and margin of a segment in pixels. continuity: how much turns are avoided."""

    length: int
    thickness: float
    margin: int
    continuity: float

    @property
    def reach(self) -> int:
        """Pixels from the start of a segment to the edge of its stamp."""
        return self.length + math.ceil(self.thickness) + self.margin

    @property
    def pad(self) -> int:
        """Pixels around an image that candidates and stamps of segments inside may touch."""
        return self.reach + self.margin + 3


@dataclass(frozen=True)
class Pixels:
    """The pixels of each stamp, [stamps, P]; the last one is repeated where a stamp has fewer.

    Attributes:
        offset: int64, place in a canvas, relative to the start of the segment.
        value: brightness, float64 with 1 for a full pixel; or how much it is taken, uint8 from 0 to 255.
    """

    offset: np.ndarray
    value: np.ndarray


@dataclass(frozen=True, eq=False)
class Stamps:
    """Tables for one kind of segment on canvases of one width.

    Orientations are numbers: 0 to 359 for whole degrees from -180, then one for each candidate, a pixel of the circle
    on which the far end of a next segment may lie.

    Attributes:
        line: brightness of the stamps. mask: the dilated segments. core: the pixels of `mask` that can collide (0.8).
        around: int64 [n], offsets of a disc with the radius of the margin.
        forward: int64 [360], the stamp of a first segment by its orientation.
        choice: int64 [360 + candidates, C], the candidates that a turn allows, by the last orientation.
        weight, total: float64, of these, 0 where there are fewer; and the sums up to each one.
        candidate, backward: int64 like `choice`: offset of the far end from the pivot, and the stamp of the segment,
            which starts there.
        pivot: int64 [360 + candidates], offset of the next pivot from the last one.
        first_head, first_pivot: int64 [360, 2], (y, x) of a first segment's head and pivot relative to its tail.
        room: by orientation in whole degrees, (y, x) that must be free around a first segment's tail, int64 [n, 2].
        room_offset: the same as offsets in a canvas, int64 [360, P], the last one repeated.
        usable: bool [360], the orientations that first segments can have (see `_usable`).
    """

    segment: Segment
    line: Pixels
    mask: Pixels
    core: Pixels
    around: np.ndarray
    forward: np.ndarray
    choice: np.ndarray
    weight: np.ndarray
    total: np.ndarray
    candidate: np.ndarray
    backward: np.ndarray
    pivot: np.ndarray
    first_head: np.ndarray
    first_pivot: np.ndarray
    room: tuple[np.ndarray, ...]
    room_offset: np.ndarray
    usable: np.ndarray


@functools.lru_cache(maxsize=8)
def make_stamps(segment: Segment, width: int) -> Stamps:
    """Returns the tables of a segment for canvases of `width` pixels per row."""
    degrees = np.arange(-180, 180) * np.pi / 180
    far = _circle(segment.length + segment.margin)
    towards = np.arctan2(far[:, 0], far[:, 1])
    back = np.where(towards < 0, towards + np.pi, towards - np.pi)
    ends = np.concatenate([_end(degrees, SCALE * segment.length), _end(back, SCALE * segment.length)])
    unique, number = np.unique(ends, axis=0, return_inverse=True)
    number = number.reshape(-1)
    pictures = [_picture(segment, int(y), int(x)) for y, x in unique]
    lines, masks = (np.stack(part) for part in zip(*pictures, strict=True))
    orientations = np.concatenate([degrees, towards])
    delta = np.abs(towards - orientations[:, None])
    turn = np.minimum(segment.continuity * np.minimum(delta, 2 * np.pi - delta), np.pi / 2)
    weights = np.cos(turn) ** 2
    allowed = weights > SMALLEST
    choice = np.argsort(~allowed, axis=1, kind="stable")[:, : int(allowed.sum(axis=1).max())]
    head = _end(degrees, segment.length)
    first_pivot = head + _end(degrees + np.pi, segment.length + segment.margin)
    # The generator places the head of this stamp one pixel off its centre; so does the place where it must fit.
    room = tuple(_offsets(masks[one] == LARGEST) + 1 for one in number[:360])
    most = max(map(len, room))
    weight = np.take_along_axis(np.where(allowed, weights, 0.0), choice, axis=1)
    return Stamps(
        segment,
        _pixels(lines, lines > 0, width),
        _pixels(masks, masks > 0, width),
        _pixels(masks, masks >= 0.8 * LARGEST, width),
        _disc(segment.margin) @ np.array([width, 1]),
        number[:360],
        choice,
        weight,
        np.cumsum(weight, axis=1),
        (far @ np.array([width, 1]))[choice],
        number[360:][choice],
        _end(orientations, segment.length + 2 * segment.margin) @ np.array([width, 1]),
        head,
        first_pivot,
        room,
        np.stack([np.pad(one, ((0, most - len(one)), (0, 0)), mode="edge") for one in room]) @ np.array([width, 1]),
        np.array([_usable(one) for one in room]),
    )


@functools.lru_cache(maxsize=8)
def make_marker(radius: float, width: int) -> Pixels:
    """Returns the stamp of a disc, as a table with one row."""
    reach = math.ceil(radius) + 3  # the filter reaches further than the disc
    place = np.arange(-SCALE * reach, SCALE * (reach + 1))
    disc = place[:, None] ** 2 + place**2 <= (SCALE * radius) ** 2
    picture = _lanczos(disc.astype(float), 2 * reach + 1)[None]
    return _pixels(picture, picture > 0, width)


def _usable(room: np.ndarray) -> bool:
    """Returns whether the public generator can place a first segment that needs this room.

    It dilates the mask by the room, and a pixel of the image whose room lies wholly outside gets a negative value, at
    which the generator gives up. So the room must reach into the image from all four corners. This leaves about one
    orientation in twelve, and is why most of its images have one short snake or two, not five.
    """
    return all(((y * room[:, 0] >= 0) & (x * room[:, 1] >= 0)).any() for y in (-1, 1) for x in (-1, 1))


def _end(orientation: np.ndarray, distance: float) -> np.ndarray:
    """Returns how far a point moves, (y, x) int64 [n, 2]: up to whole pixels."""
    moved = distance * np.stack([np.sin(orientation), np.cos(orientation)], axis=1)
    return np.ceil(np.round(moved, 9)).astype(np.int64)


def _circle(radius: int) -> np.ndarray:
    """Returns the pixels of a circle around a pixel, (y, x) int64 [n, 2], one for each pixel of its circumference."""
    angles = np.arange(0, 360, 360 / (2 * radius * np.pi)) * np.pi / 180
    points = radius * np.stack([np.sin(angles), np.cos(angles)], axis=1)
    return np.unique(np.floor(np.round(points, 9)).astype(np.int64), axis=0)


def _picture(segment: Segment, y: int, x: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns line and dilated mask of a segment that ends at (y, x) of the doubled picture, as `Pixels.value`."""
    centre, side = SCALE * segment.reach, 2 * segment.reach + 1
    drawn = np.zeros((2 * centre + 1, 2 * centre + 1), dtype=np.uint8)
    width = round(SCALE * segment.thickness)
    rows, columns = np.indices(drawn.shape) - centre
    if width == 1:
        steps = max(abs(y), abs(x), 1)
        down, right = (np.sign(end) * ((np.arange(steps + 1) * abs(end) * 2 + steps) // (2 * steps)) for end in (y, x))
        drawn[centre + down, centre + right] = LARGEST
    else:
        length = math.hypot(y, x)
        along, across = (rows * y + columns * x) / length, (rows * x - columns * y) / length
        # A rectangle with the mean area of Pillow's polygons, which the public generator draws (30.8 and 30.9 pixels).
        drawn[(-0.5 <= along) & (along <= length + 0.5) & (np.abs(across) <= width / 2 - 0.1)] = LARGEST
    dilated = _dilate(drawn[None], _disc(SCALE * segment.margin))[0]
    return _lanczos(drawn / LARGEST, side), _to_bytes(_lanczos(dilated, side, _to_bytes)).astype(np.uint8)


def _disc(radius: int) -> np.ndarray:
    """Returns the pixels of a disc around a pixel, (y, x) int64 [n, 2]."""
    place = np.arange(-radius, radius + 1)
    return np.argwhere(place[:, None] ** 2 + place**2 <= radius**2) - radius


def _dilate(pictures: np.ndarray, around: np.ndarray) -> np.ndarray:
    """Returns the largest value around each pixel; outside of a picture [n, H, W] all is 0."""
    reach = int(np.abs(around).max())
    padded = np.pad(pictures, ((0, 0), (reach, reach), (reach, reach)))
    height, width = pictures.shape[1:]
    moved = [padded[:, reach + y : reach + y + height, reach + x : reach + x + width] for y, x in around]
    return np.max(moved, axis=0)


def _lanczos(
    picture: np.ndarray, side: int, between: Callable[[np.ndarray], np.ndarray] = lambda values: values
) -> np.ndarray:
    """Scales a square picture down with a Lanczos filter of three lobes; float64 [side, side].

    The filter is widened by the factor of scaling, and its weights at a pixel are divided by their sum. It overshoots:
    the centre of a disc is brighter than 1.

    Args:
        between: applied after the first of two directions.
    """
    factor = len(picture) / side
    centres = (np.arange(side) + 0.5) * factor
    distance = (np.arange(len(picture)) + 0.5 - centres[:, None]) / factor
    weights = np.where(np.abs(distance) < 3, np.sinc(distance) * np.sinc(distance / 3), 0.0)
    weights /= weights.sum(axis=1, keepdims=True)
    return weights @ between(picture @ weights.T)


def _to_bytes(values: np.ndarray) -> np.ndarray:
    return np.clip(np.floor(values + 0.5), 0, LARGEST)


def _offsets(chosen: np.ndarray) -> np.ndarray:
    """Returns the chosen pixels of a picture relative to its centre, (y, x) int64 [n, 2]."""
    return np.argwhere(chosen) - np.array(chosen.shape) // 2


def _pixels(pictures: np.ndarray, chosen: np.ndarray, width: int) -> Pixels:
    most = max(1, int(chosen.sum(axis=(1, 2)).max()))
    offset = np.zeros((len(pictures), most), dtype=np.int64)
    value = np.zeros((len(pictures), most), dtype=pictures.dtype)
    for number, (picture, which) in enumerate(zip(pictures, chosen, strict=True)):
        if which.any():
            there = _offsets(which) @ np.array([width, 1])
            last = most - len(there)
            offset[number] = np.pad(there, (0, last), mode="edge")
            value[number] = np.pad(picture[which], (0, last), mode="edge")
    return Pixels(offset, value)
