"""A pseudo-random permutation of `range(n)` that is computed, not stored, in constant memory.

Every process gets the same order from the same three integers, without communication and without an
index array:

    order = Permutation(1_000_000_000, seed=42, epoch=3)
    order(np.arange(1024))  # the first 1024 indices of epoch 3
"""

import math
import operator
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True)
class RowOrder:
    """Values that decide the order of a source's rows.

    A source says so by its attribute `row_order`; one without it may have any order.

    Attributes:
        seed: Seeds of the order; empty if no seed that is known changes it.
        parts: What else changes it, by the names that users know; JSON values.
        is_of_rows: Whether rows come in the same order with every global batch size.
        can_go_back: Whether the data can be read again from its beginning; a generator cannot.
        unrepeatable: Why the rows come in another order in every run, and what to do; empty where
            they do not.
    """

    seed: list[int] = field(default_factory=list)
    parts: dict[str, Any] = field(default_factory=dict)
    is_of_rows: bool = False
    can_go_back: bool = True
    unrepeatable: str = ""


def row_order_of(source: Any) -> RowOrder:
    """Returns what the order of a source's rows depends on."""
    return getattr(source, "row_order", RowOrder())


# Up to this size an explicit table (512 kB) is kept: a Feistel network over a tiny domain reaches
# few of its permutations.
_TABLE_SIZE = 1 << 16
# Luby and Rackoff 1988 prove four rounds for ideal round functions; twice as many make up for the
# fast ones used here.
_ROUNDS = 8
_GOLDEN = 0x9E3779B97F4A7C15
_WORD = (1 << 64) - 1


class Permutation:
    """A bijection of `range(n)`, chosen by `(seed, epoch)`.

    Small ranges sort one 64-bit hash per index. Large ones use a Feistel network on the rectangle a
    x b >= n with a, b next to sqrt(n), and walk the cycle until the result is below n (Black and
    Rogaway 2002, "Ciphers with arbitrary finite domains", section 5): at most a row of the
    rectangle lies outside, so almost no index takes a second walk.

    Attributes:
        n: Size of the range, at least 1.
        seed: Any integer; the same on every process.
        epoch: Number of the pass over the data, from 0.
    """

    def __init__(self, n: int, *, seed: int, epoch: int = 0) -> None:
        if not 1 <= n < 1 << 62:
            raise ValueError(f"A permutation needs a size from 1 to 2**62 - 1, but n is {n}.")
        self.n = n
        self.seed = operator.index(seed)
        self.epoch = epoch
        base = _mix_int(_mix_int(self.seed & _WORD) ^ ((epoch & _WORD) * _GOLDEN & _WORD))
        rounds = [(base + _GOLDEN * number) & _WORD for number in range(1, _ROUNDS + 1)]
        self._keys = _mix(np.array(rounds, np.uint64))
        self._table: np.ndarray | None = None
        if n <= _TABLE_SIZE:
            hashes = _mix(np.arange(n, dtype=np.uint64) ^ self._keys[0])
            self._table = np.argsort(hashes, kind="stable")
        self._rows = math.isqrt(n - 1) + 1  # The square root of n, rounded up.
        self._columns = -(-n // self._rows)

    def __call__(self, positions: Any) -> np.ndarray:
        """Returns the indices at `positions`, int64 and of the same shape.

        Args:
            positions: Integers from 0 to `n - 1`, any shape.

        Raises:
            IndexError: If a position is outside the range.
        """
        where = np.asarray(positions, np.int64)
        if where.size and (where.min() < 0 or where.max() >= self.n):
            raise IndexError(
                f"Positions must be from 0 to {self.n - 1}, but go from {where.min()} to "
                f"{where.max()}."
            )
        if self._table is not None:
            return self._table[where]
        flat = self._encrypt(where.reshape(-1).astype(np.uint64))
        while (outside := np.flatnonzero(flat >= self.n)).size:
            flat[outside] = self._encrypt(flat[outside])
        return flat.astype(np.int64).reshape(where.shape)

    def _encrypt(self, x: np.ndarray) -> np.ndarray:
        rows, columns = np.uint64(self._rows), np.uint64(self._columns)
        left = x // columns
        right = x % columns
        for first, second in zip(self._keys[::2], self._keys[1::2], strict=True):
            left = (left + _mix(right ^ first) % rows) % rows
            right = (right + _mix(left ^ second) % columns) % columns
        return left * columns + right


def _mix(x: np.ndarray) -> np.ndarray:
    # Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators": the finaliser of
    # SplitMix64 (mix13).
    x = x + np.uint64(_GOLDEN)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _mix_int(x: int) -> int:
    return int(_mix(np.array([x], np.uint64))[0])
