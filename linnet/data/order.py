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
import math

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
    return (mix(hashes ^ np.uint64(_key(f"{purpose} {seed}"))) >> np.uint64(11)) * 2.0**-53


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
    return np.array([_key(f"order {seed} {number}") for number in range(1 + ROUNDS)], dtype=np.uint64)


def _key(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
