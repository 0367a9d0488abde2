"""In which shuffled order are the samples of an epoch visited?

:class:`Permutation` answers for any stretch of positions at once, without making the whole
order: in constant time and memory at every length.
"""

from __future__ import annotations

import threading
from functools import cache, lru_cache
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from ddp_utils.agree.seeding import mix_seeds

__all__ = ["InOrder", "Permutation"]

Array = npt.NDArray[Any]

TOGETHER_BELOW = 1 << 9
"""Shorter orders are made for ``EPOCHS_TOGETHER`` at once: one alone costs what is done once."""
EPOCHS_TOGETHER = 16
TABLE_BELOW = 1 << 17
"""Shorter orders are a true permutation, held as a table."""
TABULATE_BELOW = 1 << 32
"""Below this the round functions are looked up, in tables of at most 2**16 entries."""
ROUNDS = 8


class Permutation:
    """One order of ``range(length)``, chosen by a seed and an epoch.

    Same numbers, same order, on every platform and every version of NumPy and torch.

    Construction. Below 2**9: the samples sorted by random keys, a hash of epoch and sample. Below
    2**17: the Fisher-Yates shuffle of ``numpy.random.RandomState``, whose stream NumPy has
    frozen. Above: a keyed permutation, a Feistel network on the mixed radices
    ``a * b >= length`` with a and b next to the square root. Position ``p = l * b + r``
    goes through eight rounds ``l += F(r) mod a`` and ``r += F(l) mod b`` in turn; F hashes its
    argument with the round's key. The few results beyond ``length`` go through once more, until
    they fall inside (cycle walking), which keeps the map a bijection.

    Sources: Knuth, "The Art of Computer Programming", volume 2, section 3.4.2, for the shuffles;
    Black and Rogaway, "Ciphers with arbitrary finite domains" (CT-RSA 2002), for both
    the generalised Feistel network and cycle walking; Steele, Lea and Flood (OOPSLA 2014) for
    the hash, the finaliser of SplitMix64; Lemire, "Fast random integer generation in an
    interval" (2019), for bringing it into a range.

    Example:
        >>> order = Permutation(10, seed=0, epoch=0)
        >>> sorted(order.take(range(10))) == list(range(10))
        True
    """

    def __init__(self, length: int, seed: int, epoch: int) -> None:
        self.length = length
        if length < TOGETHER_BELOW:
            together, row = divmod(epoch, EPOCHS_TOGETHER)
            self._table: Array = _sorted_by_hash(length, _mixed(seed), together)[row]
        elif length < TABLE_BELOW:
            self._table = _shuffled(length, (_mixed(seed) + epoch * 0x9E3779B9) & 0xFFFFFFFF)
        else:
            self._network = _Feistel(length, mix_seeds(seed, epoch))

    def take(self, positions: range) -> list[int]:
        """Return the samples at an ascending range of positions, as Python integers."""
        if self.length < TABLE_BELOW:
            start, stop, step = positions.start, positions.stop, positions.step
            return cast("list[int]", self._table[start:stop:step].tolist())
        where = np.arange(positions.start, positions.stop, positions.step, dtype=np.int64)
        return cast("list[int]", self._network(where).tolist())

    def __call__(self, positions: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Return the samples at any positions, as an array of the same shape."""
        where = np.asarray(positions, dtype=np.int64)
        if self.length < TABLE_BELOW:
            return self._table[where].astype(np.int64)
        samples: npt.NDArray[np.int64] = self._network(where.ravel()).reshape(where.shape)
        return samples


_mixed = cache(mix_seeds)
"""Mixing in Python would be a tenth of a short pass; a run has few seeds and many epochs."""


class InOrder:
    """The order of ``range(length)`` itself, with the methods of :class:`Permutation`."""

    def __init__(self, length: int) -> None:
        self.length = length

    def take(self, positions: range) -> list[int]:
        """Return the samples at an ascending range of positions, as Python integers."""
        if self.length < TABLE_BELOW:
            start, stop, step = positions.start, positions.stop, positions.step
            return cast("list[int]", _integers_below(self.length)[start:stop:step].tolist())
        return list(positions)

    def __call__(self, positions: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Return the samples at any positions, as an array of the same shape."""
        return np.array(positions, dtype=np.int64)


_integers: Array = np.empty(0, dtype=object)


def _integers_below(length: int) -> Array:
    """Return an array of the Python integers below ``length`` or more; never to be written to.

    Objects, not machine integers: they are made once per process, and handing them out costs
    a quarter of making new ones, which is most of the cost of a short order.
    """
    global _integers
    if len(_integers) < length:
        _integers = np.arange(1 << (length - 1).bit_length()).astype(object)
    return _integers


@lru_cache(maxsize=16)
def _sorted_by_hash(length: int, key: int, together: int) -> Array:
    """Return the orders of ``EPOCHS_TOGETHER`` epochs, one in each row; never to be written to."""
    samples = np.arange(length, dtype=np.uint64)
    epochs = together * EPOCHS_TOGETHER + np.arange(EPOCHS_TOGETHER)  # before 0 too
    keys = _hash(epochs.astype(np.uint64)[:, None] * np.uint64(TOGETHER_BELOW) + samples, key)
    # The sample itself takes the lowest bits: so no two keys are equal, and it is read off there.
    keys = np.sort(keys - keys % np.uint64(TOGETHER_BELOW) + samples, axis=1)
    orders: Array = _integers_below(length)[(keys % np.uint64(TOGETHER_BELOW)).view(np.int64)]
    return orders


def _shuffled(length: int, seed: int) -> Array:
    table: Array = _integers_below(length)[:length].copy()
    shuffler = _thread.shuffler
    shuffler.seed(seed)
    shuffler.shuffle(table)
    return table


class _OfThisThread(threading.local):
    """A generator kept between calls: making one costs twenty times as much as seeding it."""

    def __init__(self) -> None:
        self.shuffler = np.random.RandomState(0)


_thread = _OfThisThread()


class _Feistel:
    def __init__(self, length: int, key: int) -> None:
        self.length = length
        self.a = _root(length)
        self.b = -(-length // self.a)
        self._keys = [mix_seeds(key, number) for number in range(ROUNDS)]
        self._tables: list[Array] | None = None
        if length < TABULATE_BELOW:
            sizes = ((self.b, self.a), (self.a, self.b))
            self._tables = [
                _hash_below(sizes[i % 2][1], np.arange(sizes[i % 2][0], dtype=np.uint64), k)
                for i, k in enumerate(self._keys)
            ]

    def __call__(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        samples = self._once(positions)
        (outside,) = np.nonzero(samples >= self.length)
        while len(outside):
            samples[outside] = self._once(samples[outside])
            outside = outside[samples[outside] >= self.length]
        return samples

    def _once(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        left = positions // self.b
        right = (positions - left * self.b).view(np.uint64)
        left = left.view(np.uint64)
        spare = np.empty_like(left)
        for number in range(0, ROUNDS, 2):
            self._add(number, left, right, self.a, spare)
            self._add(number + 1, right, left, self.b, spare)
        together: Array = left * np.uint64(self.b) + right
        return together.view(np.int64)

    def _add(self, number: int, to: Array, of: Array, modulus: int, spare: Array) -> None:
        """Add ``F(of)`` to ``to`` modulo ``modulus``, in place."""
        if self._tables is None:
            value = _hash_below(modulus, of, self._keys[number])
        else:
            value = self._tables[number].take(of.view(np.int64), mode="clip", out=spare)
        np.add(to, value, out=to)
        # Below the modulus the subtraction wraps to a huge number, so the minimum is right.
        np.subtract(to, np.uint64(modulus), out=spare)
        np.minimum(to, spare, out=to)


def _hash_below(modulus: int, x: Array, key: int) -> Array:
    """Return a keyed pseudorandom number below ``modulus`` (at most 2**32) for each x."""
    z = _hash(x, key)
    z >>= np.uint64(32)
    z *= np.uint64(modulus)
    z >>= np.uint64(32)
    return z


def _hash(x: Array, key: int) -> Array:
    """Return a keyed pseudorandom number of 64 bits for each x; the high ones are the best."""
    z = x * np.uint64(0x9E3779B97F4A7C15)
    z += np.uint64(key)
    z ^= z >> np.uint64(30)
    z *= np.uint64(0xBF58476D1CE4E5B9)
    z ^= z >> np.uint64(27)
    z *= np.uint64(0x94D049BB133111EB)
    return cast(Array, z)


def _root(length: int) -> int:
    root = int(np.sqrt(float(length)))
    return root if root * root >= length else root + 1
