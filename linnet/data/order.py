"""The order of samples: a keyed permutation of the windows for each epoch, computed on demand.

Sample g of a run is at place g % windows of epoch g // windows. A Feistel network on the mixed-radix grid a x b
(windows <= a*b < windows + a) permutes the places with a key made of seed and epoch. A result outside the windows goes
through the network again until it is inside. So the order is a pure function of (seed, sample): nothing is stored, any
rank can compute any row, and a run resumes exactly on any number of workers.

Sources: M. Luby and C. Rackoff, "How to construct pseudorandom permutations from pseudorandom functions" (1988), and
cycle walking from J. Black and P. Rogaway, "Ciphers with arbitrary finite domains" (2002). `mix` is the
64-bit finaliser of MurmurHash3 (A. Appleby, public domain).
"""

import functools
import hashlib
import heapq
import math
from collections.abc import Sequence

import numpy as np

ROUNDS = 8  # even, so that the two coordinates end in their original order
_HALF = np.uint64(32)
_ODD = np.uint64(0xD6E8FEB86659FD93)
_STRIDE = np.uint64(0x9E3779B97F4A7C15)


def shuffled(samples: np.ndarray, windows: int, seed: int) -> np.ndarray:
    """Returns the window that each sample reads.

    Args:
        samples: int64 [n], sample numbers from the start of the run (step * batch_size + row), in any order.
        windows: number of windows per epoch; at most 2**60.
        seed: key of the order; another seed gives an unrelated order.

    Returns:
        int64 [n] in [0, windows). In each epoch e, samples e*windows ... (e+1)*windows - 1 read each window once.
    """
    epoch, place = np.divmod(np.asarray(samples, dtype=np.int64), windows)
    width = math.isqrt(windows - 1) + 1 if windows > 1 else 1
    grid = (np.uint64(width), np.uint64(-(-windows // width)))
    keys = _keys(seed)
    epoch_key = mix(epoch.astype(np.uint64) * _STRIDE + keys[0])
    place = _feistel(place.astype(np.uint64), epoch_key, keys, grid)
    outside = np.flatnonzero(place >= windows)
    while outside.size:
        place[outside] = _feistel(place[outside], epoch_key[outside], keys, grid)
        outside = outside[place[outside] >= windows]
    return place.astype(np.int64)


class Turns:
    """Which source of a mixture gives each sample: the same for every seed, and periodic with the sum of the parts.

    Before any sample g, source i has given floor(g p_i) or ceil(g p_i) samples, where p_i is its share. Its sample k
    is therefore one of floor(k / p_i) ... ceil((k + 1) / p_i) - 1; of the samples that may come, the one with the
    earliest end comes first. The turns are computed once, up to the last sample that was asked for (about 1 s per
    million), and take 6 bytes per sample of a period.

    Source: R. Tijdeman, "The chairman assignment problem" (1980), for the shares; S. Baruah et al., "Proportionate
    progress" (1996), for the windows.

    Args:
        parts: share of each source, as integers of which at least one is above 0.
    """

    def __init__(self, parts: Sequence[int]):
        divisor = math.gcd(*parts)
        self._parts = [part // divisor for part in parts]
        self._period = sum(self._parts)
        self._sources, self._uses = np.empty(0, dtype=np.uint16), np.empty(0, dtype=np.uint32)
        self._pending = [(0, number, 0) for number, part in enumerate(self._parts) if part]  # start, source, use
        self._ready: list[tuple[int, int, int]] = []  # end, source, use

    def at(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the source of each sample, and how many samples before it are of this source: int64 [n] each."""
        turn, place = np.divmod(samples, self._period)
        self._extend(int(place.max(initial=-1)) + 1)
        sources = self._sources[place].astype(np.int64)
        return sources, self._uses[place] + turn * np.array(self._parts, dtype=np.int64)[sources]

    def counts(self, samples: int) -> list[int]:
        """Returns how many of the first samples each source gives."""
        turn, place = divmod(samples, self._period)
        self._extend(place)
        counts = np.bincount(self._sources[:place], minlength=len(self._parts))
        return [turn * part + int(count) for part, count in zip(self._parts, counts, strict=True)]

    def _extend(self, end: int) -> None:
        size = len(self._sources)
        if end <= size:
            return
        sources, uses, period = [], [], self._period
        for sample in range(size, min(period, max(end, size * 5 // 4 + 4096))):
            while self._pending and self._pending[0][0] <= sample:
                _, number, use = heapq.heappop(self._pending)
                heapq.heappush(self._ready, (-(-(use + 1) * period // self._parts[number]), number, use))
            _, number, use = heapq.heappop(self._ready)
            heapq.heappush(self._pending, ((use + 1) * period // self._parts[number], number, use + 1))
            sources.append(number)
            uses.append(use)
        self._sources = np.concatenate([self._sources, np.array(sources, dtype=np.uint16)])
        self._uses = np.concatenate([self._uses, np.array(uses, dtype=np.uint32)])


def source_seed(seed: int, digest: str) -> int:
    """Returns the seed of the order in which a mixture reads one source."""
    return hash64(f"source {digest} {seed}".encode())


def mix(values: np.ndarray) -> np.ndarray:
    """Hashes uint64 [n] to uint64 [n], one to one; each input bit changes about half of the output bits."""
    values = values ^ (values >> np.uint64(33))
    values *= np.uint64(0xFF51AFD7ED558CCD)
    values ^= values >> np.uint64(33)
    values *= np.uint64(0xC4CEB9FE1A85EC53)
    values ^= values >> np.uint64(33)
    return values


def uniform(hashes: np.ndarray, seed: int, purpose: str) -> np.ndarray:
    """Returns numbers in [0, 1), float64 [n], for content hashes (uint64 [n]); one stream per (seed, purpose)."""
    return (mix(hashes ^ np.uint64(hash64(f"{purpose} {seed}".encode()))) >> np.uint64(11)) * 2.0**-53


def _feistel(
    place: np.ndarray, epoch_key: np.ndarray, keys: np.ndarray, grid: tuple[np.uint64, np.uint64]
) -> np.ndarray:
    # Each half-round adds a hash of one coordinate to the other, modulo its radix. This is invertible: a bijection.
    moving, fixed = np.divmod(place, grid[1])
    for number, round_key in enumerate(epoch_key ^ keys[1:, None]):
        radix = grid[number % 2]
        shift = fixed + round_key
        shift *= _ODD
        shift ^= shift >> _HALF
        shift *= _ODD
        shift >>= _HALF
        shift *= radix
        shift >>= _HALF  # the high half of 32 hashed bits * radix: in [0, radix) without a division
        moving += shift
        # moving < 2 * radix. If moving < radix, the unsigned difference wraps to a huge number. So the minimum is
        # the remainder.
        moving, fixed = fixed, np.minimum(moving, moving - radix)
    return moving * grid[1] + fixed


@functools.lru_cache(maxsize=64)
def _keys(seed: int) -> np.ndarray:
    return np.array([hash64(f"order {seed} {number}".encode()) for number in range(1 + ROUNDS)], dtype=np.uint64)


def hash64(data: bytes) -> int:
    """Returns a hash below 2^64."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
