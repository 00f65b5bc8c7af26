"""The size of each batch of a training: constant, or growing in whole parts.

A batch is found by its position alone, and so are the samples in it: `first` counts the samples of all batches before a
position without visiting them. A run whose batch grows therefore resumes as exactly as any other.

Source of the growth: J. Geiping and T. Goldstein, "Cramming" (2022, arXiv:2212.14034): the batch grows linearly, in
whole micro-batches from a single one, over the first 60 percent of the training.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class BatchSizes:
    """Rows of the batch at each position: batch_size / parts x min(parts, 1 + floor(parts x position / growing)).

    Attributes:
        batch_size: rows of a whole batch.
        parts: equal parts of a whole batch; the first batch is one of them.
        growing: batches before the first that is whole by its position; 0: all are whole.
    """

    batch_size: int
    parts: int = 1
    growing: int = 0

    def __post_init__(self) -> None:
        if min(self.batch_size, self.parts) < 1 or self.growing < 0:
            raise ValueError(f"{self}: batch_size and parts must be at least 1, growing at least 0")
        if self.growing and self.batch_size % self.parts:
            raise ValueError(f"{self}: {self.parts} parts do not divide a batch of {self.batch_size}")

    @classmethod
    def over(cls, batch_size: int, parts: int, ramp: float | None, steps: int) -> "BatchSizes":
        """Returns the sizes of a training of `steps` steps.

        Args:
            ramp: length of the growth, below 1 as a share of the steps, from 1 on in steps; None: no growth.
        """
        if ramp is None:
            return cls(batch_size)
        return cls(batch_size, parts, max(1, round(ramp * steps) if ramp < 1 else round(ramp)))

    def count(self, position: int) -> int:
        """Returns the number of parts of the batch at a position."""
        if position >= self.growing:
            return self.parts
        return 1 + self.parts * position // self.growing

    def rows(self, position: int) -> int:
        """Returns the number of rows of the batch at a position."""
        return self.batch_size * self.count(position) // self.parts

    def first(self, position: int) -> int:
        """Returns the number of rows of all batches before a position."""
        growing = min(position, self.growing)
        parts = growing + _sum_of_floors(growing, self.growing, self.parts)
        return self.batch_size // self.parts * parts + self.batch_size * (position - growing)

    def share(self, position: int, rank: int, world: int) -> tuple[int, int]:
        """Returns the first row of a rank and the end of its rows, in the batch of all ranks at a position.

        Raises:
            ValueError: a negative position, or a rank outside of the world.
        """
        if position < 0 or not 0 <= rank < world:
            raise ValueError(
                f"position {position} must not be negative, and rank {rank} must lie in [0, world {world})"
            )
        rows = self.rows(position)
        return rows * rank // world, rows * (rank + 1) // world


def steps_of(rows: int, batch_size: int, parts: int, ramp: float | None) -> int:
    """Returns a number of steps that reads at least `rows` rows while one step less does not.

    Args:
        batch_size, parts, ramp: as in `BatchSizes.over`.
    """
    many = max(1, -(-rows // batch_size))
    if ramp is None:
        return many

    def enough(steps: int) -> bool:
        return BatchSizes.over(batch_size, parts, ramp, steps).first(steps) >= rows

    few = many - 1  # too few steps: all batches together would have to be whole
    while not enough(many):
        few, many = many, 2 * many
    while many - few > 1:
        middle = (few + many) // 2
        few, many = (few, middle) if enough(middle) else (middle, many)
    return many


def batch_sizes(batch_size: int | BatchSizes) -> BatchSizes:
    """Returns the sizes of batches that all have `batch_size` rows, or the given sizes."""
    return BatchSizes(batch_size) if isinstance(batch_size, int) else batch_size


def _sum_of_floors(n: int, m: int, a: int) -> int:
    """Returns the sum of floor(a i / m) over i = 0 ... n - 1, in O(log m).

    The sum counts the points of a grid below a line, and each turn of the loop exchanges the axes, as Euclid's
    algorithm does (R. Graham, D. Knuth, O. Patashnik, "Concrete Mathematics", section 3.5).
    """
    total, b = 0, 0  # the sum of floor((a i + b) / m)
    while n and m:
        total += (a // m) * n * (n - 1) // 2 + (b // m) * n
        a, b = a % m, b % m
        top = a * n + b
        n, b, m, a = top // m, top % m, a, m
    return total
