"""Pathfinder: do two marked ends belong to one dashed curve? (Linsley et al. 2018, arXiv:1805.08315)

An image shows two long snakes of segments and some short ones. Two discs mark ends: one an end of a long snake, the
other the other end of the same snake (label 1) or of the other one (label 0).

Two first segments are placed, the second at a fixed distance from the first. The snakes grow in turn, by a segment that
starts a margin behind the last one and turns by chance: the far end is a pixel of a circle, with the probability
(1 - mask) cos^2(min(continuity * |turn|, pi/2)), where the mask marks everything that is drawn, dilated. A segment that
touches the mask is drawn again, at most three times; then the pair starts anew. Short snakes are added the same way, as
many as fit. At last the brightness is stretched from its own minimum and maximum to 0..255.

The distribution is that of the public generator (github.com/drewlinsley/pathfinder), with the settings that the Long
Range Arena gives for 32 and 128 pixels. About 300 pairs are tried per image of 32 pixels. They are tried side by side,
thousands at a time, and all that is drawn are cached stamps (`linnet.encoders.lra.pathfinder`).
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from linnet.data.order import hash64
from linnet.data.synthetic.base import Draws
from linnet.encoders.lra.task import LraTask, Shard, SplitName

# Small pictures of line segments, drawn once: every segment of a Pathfinder image is one of a few dozen stamps.
#
# A segment of whole-number length starts at a pixel. The public generator (github.com/drewlinsley/pathfinder) draws it
# at twice the resolution, where it ends at a whole pixel, and scales it down with a Lanczos filter. So its picture
# depends only on that end: there are a few dozen different ones, for 360 orientations of first segments and for the
# pixels of the circle on which later ones start.

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
    room = tuple(_offsets(masks[index] == LARGEST) + 1 for index in number[:360])
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
        np.stack([np.pad(rows, ((0, most - len(rows)), (0, 0)), mode="edge") for rows in room]) @ np.array([width, 1]),
        np.array([_usable(rows) for rows in room]),
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


GROUP = 50  # images that are made together, from one stream of random numbers
DRAWS = 3  # of a segment, until one fits
RETRIES = 5  # of a short snake
FREE = int(0.3 * LARGEST)  # up to this value of the mask, a pixel is free
COLLISION = 1.8 * LARGEST  # of two overlapping masks
TRIED = 32  # places that are tried for a short snake before all places are looked at


@dataclass(frozen=True)
class Form:
    """Settings of a size.

    Attributes:
        side: of an image. segments: the kinds of segment, by margin; each image has one of them.
        count: segments of a long snake. distance: between the first segments. inset: pixels at the border where the
            first one does not start. tries: pairs that are tried at a time.
        short, short_count: number of short snakes, and of their segments.
        contrast: of long and short snakes. radius: of the discs.
    """

    side: int
    segments: tuple[Segment, ...]
    count: int
    distance: int
    inset: int
    short: int
    short_count: int
    contrast: tuple[float, float]
    radius: float
    tries: int


FORMS = {
    ("pathfinder", "full"): Form(32, (Segment(2, 0.5, 1, 1.0),), 14, 7, 14, 5, 4, (1.5, 2.0), 1.5, 1024),
    ("pathfinder", "reduced"): Form(16, (Segment(2, 0.5, 1, 1.0),), 6, 5, 5, 2, 2, (1.5, 2.0), 1.5, 1024),
    ("path-x", "full"): Form(
        128, (Segment(5, 1.5, 2, 1.8), Segment(5, 1.5, 3, 1.8)), 14, 20, 40, 8, 4, (0.9, 0.9), 3.0, 512
    ),
}


def pathfinder_task(name: str, size: str) -> LraTask:
    """Returns the task of a name of `FORMS`."""
    side = FORMS[name, size].side
    grid = (side, side)
    return LraTask(name, "pixels", 2, side * side, grid=grid, channels=1, mean=(0.5,), std=(0.5,))  # type: ignore


def generate_pathfinder(name: str, size: str, split: SplitName, block: int, rows: int, seed: int) -> Shard:
    """Returns the first images of a block of a split: a pure function of its arguments."""
    form = FORMS[name, size]
    groups = [draw_group(form, Draws(seed, name, size, split, block, group)) for group in range(-(-rows // GROUP))]
    images = np.concatenate([group.images for group in groups])[:rows, None]
    labels = np.concatenate([group.labels for group in groups])[:rows].astype(np.uint8)
    lengths = np.full(rows, form.side**2, dtype=np.int32)
    return Shard(images, lengths, labels, hash_images(images))


def hash_images(images: np.ndarray) -> np.ndarray:
    """Returns a hash of each image, uint64 [n]."""
    return np.array([hash64(image.tobytes()) for image in images], dtype=np.uint64)


@dataclass
class Drawing:
    """Images with what is known of them.

    Attributes:
        images: uint8 [n, H, W]. labels: int64 [n].
        origins, ends: int64 [n, 2, 2], (y, x) of both ends of the two long snakes.
        marked: int64 [n, 2, 2], (y, x) of the two discs.
    """

    images: np.ndarray
    labels: np.ndarray
    origins: np.ndarray
    ends: np.ndarray
    marked: np.ndarray


def draw_group(form: Form, draws: Draws) -> Drawing:
    """Draws `GROUP` images."""
    kinds = draws.integers(len(form.segments), GROUP)
    labels, first = draws.integers(2, GROUP), draws.integers(2, GROUP)
    parts: list[Drawing] = []
    for kind, segment in enumerate(form.segments):
        chosen = np.flatnonzero(kinds == kind)
        if len(chosen):
            parts.append(_draw_kind(form, segment, draws, labels[chosen], first[chosen]))
    order = np.argsort(np.argsort(kinds, kind="stable"), kind="stable")
    values = [np.concatenate(arrays)[order] for arrays in zip(*(vars(part).values() for part in parts), strict=True)]
    return Drawing(*values)


class _Canvases:
    """Masks of many images side by side, with a rim of `pad` pixels.

    Attributes:
        mask: uint8 [n * width * width], what is taken; the rim is free, since stamps are cut off at the border.
        inside: uint8 [width * width], 0 in the rim and 1 elsewhere.
    """

    def __init__(self, stamps: Stamps, side: int, count: int):
        self.stamps, self.side, self.pad = stamps, side, stamps.segment.pad
        self.width = side + 2 * self.pad
        self.size = self.width**2
        inside, border = np.zeros((2, self.width, self.width), dtype=np.uint8)
        inner, free = slice(self.pad, self.pad + side), slice(self.pad + 1, self.pad + side - 1)
        inside[inner, inner] = 1
        border[inner, inner] = LARGEST
        border[free, free] = 0
        self.inside = inside.reshape(-1)
        self.mask = np.tile(border.reshape(-1), count)

    def take(self, rows: np.ndarray) -> "_Canvases":
        """Returns copies of some canvases."""
        other = object.__new__(_Canvases)
        other.__dict__.update(vars(self))
        other.mask = self.mask.reshape(-1, self.size)[rows].reshape(-1)
        return other

    def put(self, rows: np.ndarray, other: "_Canvases", chosen: np.ndarray) -> None:
        """Replaces canvases by the chosen ones of another set."""
        self.mask.reshape(-1, self.size)[rows] = other.mask.reshape(-1, self.size)[chosen]

    def place(self, points: np.ndarray) -> np.ndarray:
        """Returns places in a canvas of (y, x) in an image, int64 [..., 2] -> [...]."""
        return (points[..., 0] + self.pad) * self.width + points[..., 1] + self.pad

    def points(self, places: np.ndarray) -> np.ndarray:
        """Returns (y, x) in an image of places in a canvas, int64 [...] -> [..., 2]."""
        return np.stack(np.divmod(places, self.width), axis=-1) - self.pad

    def add(self, rows: np.ndarray, start: np.ndarray, stamp: np.ndarray) -> None:
        """Marks one segment per canvas as taken."""
        where = (rows * self.size + start)[:, None] + self.stamps.mask.offset[stamp]
        self.mask[where] = np.maximum(self.mask.take(where), self.stamps.mask.value[stamp])

    def free(self, rows: np.ndarray, places: np.ndarray) -> np.ndarray:
        """Returns how free places are, uint8 [n, C] up to 255; a place counts as taken as its margin is.

        Args:
            places: int64 [n, C] in the canvases `rows`.
        """
        around = (rows * self.size)[:, None, None] + places[:, :, None] + self.stamps.around
        return (LARGEST - self.mask.take(around).max(axis=2)) * self.inside[places]

    def collides(self, rows: np.ndarray, start: np.ndarray, stamp: np.ndarray) -> np.ndarray:
        """Returns for each segment whether it touches what is taken; bool [n]."""
        core = self.stamps.core
        there = self.mask.take((rows * self.size + start)[:, None] + core.offset[stamp])
        return (there.astype(np.int16) + core.value[stamp] >= COLLISION).any(axis=1)


@dataclass
class _Snakes:
    """One growing snake per row, int64 [n].

    Attributes:
        pivot: place of the last pivot. turned: the last orientation. start, stamp: the last segment, which is not taken
            yet. drawn: starts and stamps of all segments, int64 [n, segments].
    """

    pivot: np.ndarray
    turned: np.ndarray
    start: np.ndarray
    stamp: np.ndarray
    starts: np.ndarray
    stamps: np.ndarray

    @classmethod
    def begin(cls, canvases: _Canvases, tail: np.ndarray, degree: np.ndarray, segments: int) -> "_Snakes":
        """Places first segments. Args: tail: (y, x) int64 [n, 2]. degree: orientation, int64 [n]."""
        start, stamp = canvases.place(tail), canvases.stamps.forward[degree]
        pivot = canvases.place(tail + canvases.stamps.first_pivot[degree])
        starts, stamps = (np.zeros((len(tail), segments), dtype=np.int64) for _ in range(2))
        starts[:, 0], stamps[:, 0] = start, stamp
        return cls(pivot, degree, start, stamp, starts, stamps)

    def grow(self, canvases: _Canvases, draws: Draws, alive: np.ndarray, segment: int) -> np.ndarray:
        """Adds a segment to some snakes. Returns the rows, out of `alive`, where one fits."""
        stamps = canvases.stamps
        turned = self.turned[alive]
        pivot = self.pivot[alive] + stamps.pivot[turned]
        chosen = np.full(len(alive), -1)
        rest = np.arange(len(alive))
        for _ in range(DRAWS):
            candidate = _choose(canvases, draws, alive[rest], pivot[rest], turned[rest])
            rest, candidate = rest[candidate >= 0], candidate[candidate >= 0]
            far = pivot[rest] + stamps.candidate[turned[rest], candidate]
            hit = canvases.collides(alive[rest], far, stamps.backward[turned[rest], candidate])
            chosen[rest[~hit]] = candidate[~hit]
            rest = rest[hit]
            if not len(rest):
                break
        fits = np.flatnonzero(chosen >= 0)
        rows, candidate = alive[fits], chosen[fits]
        canvases.add(rows, self.start[rows], self.stamp[rows])
        self.pivot[rows], self.turned[rows] = pivot[fits], 360 + stamps.choice[turned[fits], candidate]
        self.start[rows] = pivot[fits] + stamps.candidate[turned[fits], candidate]
        self.stamp[rows] = stamps.backward[turned[fits], candidate]
        self.starts[rows, segment], self.stamps[rows, segment] = self.start[rows], self.stamp[rows]
        return rows


def _choose(canvases: _Canvases, draws: Draws, rows: np.ndarray, pivot: np.ndarray, turned: np.ndarray) -> np.ndarray:
    """Draws a far end for each snake, with a probability in proportion to its weight times how free it is.

    A far end drawn by its weight is kept with the probability of being free, which gives the same distribution and
    looks at one place instead of all. Where that fails, all places are looked at.

    Returns:
        Its number among the candidates of the last orientation, int64 [n]; -1 if none is free.
    """
    stamps = canvases.stamps
    drawn, kept = draws.uniform(2, len(rows))
    total = stamps.total[turned]
    chosen = (total <= (drawn * total[:, -1])[:, None]).sum(axis=1)
    free = canvases.free(rows, (pivot + stamps.candidate[turned, chosen])[:, None])[:, 0]
    rest = np.flatnonzero(kept * LARGEST >= free)
    chosen[rest] = -1
    weights = (
        canvases.free(rows[rest], pivot[rest, None] + stamps.candidate[turned[rest]]) * stamps.weight[turned[rest]]
    )
    total = np.cumsum(weights, axis=1)
    possible = total[:, -1] >= 1e-4 * LARGEST
    rest, total = rest[possible], total[possible]
    chosen[rest] = (total <= (draws.uniform(len(rest)) * total[:, -1])[:, None]).sum(axis=1)
    return chosen


def _draw_kind(form: Form, segment: Segment, draws: Draws, labels: np.ndarray, first: np.ndarray) -> Drawing:
    """Draws images with one kind of segment. Args: first: which long snake has the first disc, 0 or 1."""
    count = len(labels)
    stamps = make_stamps(segment, form.side + 2 * segment.pad)
    canvases = _Canvases(stamps, form.side, count)
    picture = np.zeros(count * canvases.size)
    starts, numbers, done = np.zeros((2, count, form.count), dtype=np.int64), np.zeros((2, count, form.count), int), 0
    while done < count:
        tried, pair, rows = _long_snakes(form, stamps, draws)
        rows = rows[: count - done]
        new = np.arange(done, done + len(rows))
        canvases.put(new, tried, rows)
        for which, snake in enumerate(pair):
            starts[which, new], numbers[which, new] = snake.starts[rows], snake.stamps[rows]
        done += len(rows)
    for which in range(2):
        for part in range(form.count):
            _paint(
                picture, canvases, np.arange(count), starts[which, :, part], numbers[which, :, part], form.contrast[0]
            )
    for _ in range(form.short):
        _add_short_snake(form, canvases, draws, picture)
    origins, ends = (canvases.points(starts[:, :, place]).transpose(1, 0, 2) for place in (0, -1))
    every, other = np.arange(count), np.where(labels == 1, first, 1 - first)
    marked = np.stack([origins[every, first], ends[every, other]], axis=1)
    marker = make_marker(form.radius, canvases.width)
    for place in range(2):
        where = (every * canvases.size + canvases.place(marked[:, place]))[:, None] + marker.offset
        picture[where] = np.maximum(picture[where], marker.value)
    inner = slice(canvases.pad, canvases.pad + form.side)
    return Drawing(
        _stretched(picture.reshape(count, canvases.width, -1)[:, inner, inner]), labels, origins, ends, marked
    )


def _paint(
    picture: np.ndarray, canvases: _Canvases, rows: np.ndarray, start: np.ndarray, stamp: np.ndarray, contrast: float
) -> None:
    """Draws one segment per row."""
    line = canvases.stamps.line
    where = (rows * canvases.size + start)[:, None] + line.offset[stamp]
    picture[where] = np.maximum(picture[where], line.value[stamp] * contrast)


def _stretched(pictures: np.ndarray) -> np.ndarray:
    """Stretches each picture from its own minimum and maximum to 0..255."""
    low, high = (extreme(pictures, axis=(1, 2), keepdims=True) for extreme in (np.min, np.max))
    return np.floor((pictures - low) * (LARGEST / (high - low)) + 0.5).astype(np.uint8)


def _long_snakes(form: Form, stamps: Stamps, draws: Draws) -> tuple[_Canvases, list[_Snakes], np.ndarray]:
    """Tries `form.tries` pairs of snakes. Returns their canvases, the snakes, and the rows where both are whole."""
    canvases = _Canvases(stamps, form.side, form.tries)
    tails, counts = _first_places(stamps, form.inset, form.side)
    possible = np.flatnonzero(counts)  # of the others, the public generator draws a new pair
    degrees = np.stack([possible[draws.integers(len(possible), form.tries)], draws.integers(360, form.tries)])
    number = (np.cumsum(counts) - counts)[degrees[0]] + draws.integers(counts[degrees[0]], form.tries)
    tail = tails[number]
    alive = np.arange(form.tries)
    around = draws.integers(360, form.tries) * np.pi / 180
    away = np.rint(form.distance * np.stack([np.sin(around), np.cos(around)], axis=1)).astype(np.int64)
    pair = [
        _Snakes.begin(canvases, point, degree, form.count)
        for point, degree in zip((tail, tail + away), degrees, strict=True)
    ]
    for segment in range(1, form.count):
        for snake in pair:
            alive = snake.grow(canvases, draws, alive, segment)
    # The last segment of the first snake stays free, as in the public generator.
    canvases.add(alive, pair[1].start[alive], pair[1].stamp[alive])
    return canvases, pair, alive


@functools.lru_cache(maxsize=8)
def _first_places(stamps: Stamps, inset: int, side: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the tails from which a first segment stays off the border.

    Returns:
        (y, x) int64 [n, 2], ordered by the orientation; and how many each orientation has, int64 [360].
    """
    places = []
    for room, usable in zip(stamps.room, stamps.usable, strict=True):
        # A tail is free if the smallest and the largest place that it needs are.
        low, high = inset - np.minimum(room.min(axis=0), 0), side - inset - np.maximum(room.max(axis=0), 0)
        ranges = [np.arange(*bounds) for bounds in zip(low, high, strict=True)] if usable else [np.arange(0)] * 2
        places.append(np.stack(np.meshgrid(*ranges, indexing="ij"), axis=-1).reshape(-1, 2))
    return np.concatenate(places), np.array([len(tails) for tails in places])


def _add_short_snake(form: Form, canvases: _Canvases, draws: Draws, picture: np.ndarray) -> None:
    """Adds a short snake to every image where one fits, within `RETRIES` tries."""
    rest = np.arange(len(picture) // canvases.size)
    for _ in range(RETRIES):
        if not len(rest):
            return
        copies = canvases.take(rest)
        degree = draws.integers(360, len(rest))
        tail, alive = _free_places(form, copies, draws, degree)
        snakes = _Snakes.begin(copies, tail, degree, form.short_count)
        for segment in range(1, form.short_count):
            alive = snakes.grow(copies, draws, alive, segment)
        copies.add(alive, snakes.start[alive], snakes.stamp[alive])
        canvases.put(rest[alive], copies, alive)
        for segment in range(form.short_count):
            start, stamp = snakes.starts[alive, segment], snakes.stamps[alive, segment]
            _paint(picture, canvases, rest[alive], start, stamp, form.contrast[1])
        rest = np.delete(rest, alive)


def _free_places(form: Form, canvases: _Canvases, draws: Draws, degree: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Draws for each canvas one of the places where a first segment fits, all equally likely.

    Returns:
        (y, x) int64 [n, 2], and the rows that have such a place, whose head and pivot lie in the image.
    """
    stamps, side, rows = canvases.stamps, form.side, np.arange(len(degree))
    room = stamps.room_offset[degree]
    tried = draws.integers(side, len(rows), TRIED, 2)
    free = _is_free(canvases, rows[:, None], canvases.place(tried), room[:, None])
    tail = tried[rows, free.argmax(axis=1)]
    usable = stamps.usable[degree]
    fits = usable & free.any(axis=1)
    every = np.stack(np.meshgrid(np.arange(side), np.arange(side), indexing="ij"), axis=-1).reshape(-1, 2)
    for row in np.flatnonzero(usable & ~fits):
        places = every[_is_free(canvases, np.full(len(every), row), canvases.place(every), room[row])]
        if len(places):
            tail[row], fits[row] = places[int(draws.integers(len(places), 1)[0])], True
    inner = slice(canvases.pad, canvases.pad + side)
    shown = canvases.mask.reshape(-1, canvases.width, canvases.width)[:, inner, inner]
    fits &= (shown <= FREE).mean(axis=(1, 2)) >= 0.01
    for ends in (stamps.first_head, stamps.first_pivot):
        reached = tail + ends[degree]
        fits &= ((0 <= reached) & (reached < side)).all(axis=1)
    return tail, np.flatnonzero(fits)


def _is_free(canvases: _Canvases, rows: np.ndarray, places: np.ndarray, room: np.ndarray) -> np.ndarray:
    """Returns whether all pixels of `room`, relative to each place, are free."""
    there = canvases.mask[(rows * canvases.size + places)[..., None] + room]
    return (there <= FREE).all(axis=-1)
