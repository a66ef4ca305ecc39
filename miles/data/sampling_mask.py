"""`RolloutSamplingMask`: which token ids the sampler could have drawn, per response token.

Immutable CSR on the CPU. The tensor functions that score a policy on this support are
`miles.algos.sampling_mask`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np


def _integers(name: str, value: object, dtype: type) -> np.ndarray:
    array = np.asarray(value)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(f"sampling mask: {name} is {array.dtype.name} {list(array.shape)}, expected 1-D integers")
    info = np.iinfo(dtype)
    if array.size and (int(array.min()) < info.min or int(array.max()) > info.max):
        raise ValueError(f"sampling mask: {name} does not fit {np.dtype(dtype).name}")
    owned: np.ndarray = array.astype(dtype, copy=True)
    owned.setflags(write=False)
    return owned


def _same(left: np.ndarray | None, right: np.ndarray | None) -> bool:
    return left is right if left is None or right is None else np.array_equal(left, right)


# Optional float32 arrays beside `ids`.
_PER_ID = ("log_probs", "ref_log_probs")


@dataclass(frozen=True, slots=True, eq=False)
class RolloutSamplingMask:
    """Row t holds the ids that response token t could have been: `ids[offsets[t]:offsets[t+1]]`.

    `ids` int32 [sum |S_t|], distinct inside a row, in [0, vocab_size); `offsets` int64 [R+1], strictly
    increasing from 0 (every row has an id). `log_probs` float32 per id, optional: the sampler's own, mass 1 a row;
    `ref_log_probs` likewise: those of the reference policy on the same support (exact KL). Observation and forced
    tokens have the singleton row, where the log-prob is 0. Arrays are owned, read-only copies.

    >>> mask = RolloutSamplingMask.from_rows([[3], [1, 4]], vocab_size=8)
    >>> len(mask), mask.row(1).tolist()
    (2, [1, 4])
    """

    ids: np.ndarray
    offsets: np.ndarray
    vocab_size: int
    log_probs: np.ndarray | None = None
    ref_log_probs: np.ndarray | None = None

    def __post_init__(self) -> None:
        set_ = object.__setattr__
        set_(self, "ids", _integers("ids", self.ids, np.int32))
        set_(self, "offsets", _integers("offsets", self.offsets, np.int64))
        self._check_structure()
        for name in _PER_ID:
            value = getattr(self, name)
            if value is not None:
                owned = np.array(value, dtype=np.float32, copy=True)
                owned.setflags(write=False)
                set_(self, name, owned)
                self._check_log_probs(name, owned)

    def _check_structure(self) -> None:
        ids, offsets = self.ids, self.offsets
        if len(offsets) == 0 or offsets[0] != 0:
            raise ValueError("sampling mask: offsets must start with 0 (R + 1 entries)")
        if offsets[-1] != len(ids):
            raise ValueError(f"sampling mask: the last offset is {int(offsets[-1])}, expected {len(ids)} (the ids)")
        widths = np.diff(offsets)
        if len(widths) and widths.min() < 1:
            row = int(np.argmin(widths))
            raise ValueError(
                f"sampling mask: row {row} has {int(widths[row])} ids, every row needs at least one "
                "(use the singleton row for forced tokens)"
            )
        if ids.size and (int(ids.min()) < 0 or int(ids.max()) >= self.vocab_size):
            at = int(np.argmax((ids < 0) | (ids >= self.vocab_size)))
            raise ValueError(f"sampling mask: id {int(ids[at])} at {at} is outside the vocabulary of {self.vocab_size}")
        rows = np.repeat(np.arange(len(widths)), widths)
        keys = np.sort(rows * np.int64(max(self.vocab_size, 1)) + ids)
        repeated = np.flatnonzero(keys[1:] == keys[:-1])
        if len(repeated):
            row, token = divmod(int(keys[repeated[0]]), self.vocab_size)
            raise ValueError(f"sampling mask: row {row} holds id {token} twice")

    def _check_log_probs(self, name: str, log_probs: np.ndarray) -> None:
        if log_probs.shape != self.ids.shape:
            raise ValueError(f"sampling mask: {log_probs.size} {name} for {self.ids.size} ids")
        if not np.isfinite(log_probs).all() or (log_probs.size and float(log_probs.max()) > 1e-6):
            raise ValueError(f"sampling mask: {name} must be finite and at most 0")
        if len(self):
            mass = np.add.reduceat(np.exp(log_probs.astype(np.float64)), self.offsets[:-1])
            worst = int(np.argmax(np.abs(mass - 1.0)))
            if abs(mass[worst] - 1.0) > 1e-4:
                raise ValueError(
                    f"sampling mask: {name} of row {worst} have a sum of probabilities of {mass[worst]:.6f}, expected 1"
                )

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RolloutSamplingMask):
            return NotImplemented
        return (
            self.vocab_size == other.vocab_size
            and np.array_equal(self.ids, other.ids)
            and np.array_equal(self.offsets, other.offsets)
            and all(_same(getattr(self, name), getattr(other, name)) for name in _PER_ID)
        )

    __hash__ = None  # type: ignore[assignment]

    def row(self, index: int) -> np.ndarray:
        if not 0 <= index < len(self):
            raise IndexError(f"sampling mask: row {index} of {len(self)}")
        return self.ids[self.offsets[index] : self.offsets[index + 1]]

    @classmethod
    def from_rows(cls, rows: Sequence[Sequence[int]], *, vocab_size: int) -> RolloutSamplingMask:
        arrays = [np.asarray(row) for row in rows]
        for index, array in enumerate(arrays):
            if array.size and (array.ndim != 1 or array.dtype.kind not in "iu"):
                raise ValueError(f"sampling mask: row {index} is {array.dtype.name}, expected 1-D integers")
        offsets = np.cumsum([0, *(array.size for array in arrays)], dtype=np.int64)
        ids = np.concatenate([array.astype(np.int64) for array in arrays]) if arrays else np.empty(0, np.int64)
        return cls(ids, offsets, vocab_size)

    @classmethod
    def singletons(cls, tokens: np.ndarray, *, vocab_size: int) -> RolloutSamplingMask:
        """Rows that allow exactly the given tokens: what forced and observation tokens get."""
        return cls(tokens, np.arange(len(tokens) + 1), vocab_size)

    @classmethod
    def concatenate(cls, masks: Iterable[RolloutSamplingMask]) -> RolloutSamplingMask:
        """Rows of all masks in order. The vocabularies must agree; what stands per id is kept when all have it."""
        parts = list(masks)
        if not parts:
            raise ValueError("sampling mask: nothing to concatenate")
        sizes = {part.vocab_size for part in parts}
        if len(sizes) != 1:
            raise ValueError(f"sampling mask: vocabularies differ: {sorted(sizes)}")
        bases = np.cumsum([0, *(len(part.ids) for part in parts)])
        offsets = np.concatenate([[0], *(part.offsets[1:] + base for part, base in zip(parts, bases, strict=False))])
        per_id = {name: [value for part in parts if (value := getattr(part, name)) is not None] for name in _PER_ID}
        joined = {name: np.concatenate(values) for name, values in per_id.items() if len(values) == len(parts)}
        return cls._trusted(np.concatenate([part.ids for part in parts]), offsets, sizes.pop(), **joined)

    @classmethod
    def _trusted(
        cls,
        ids: np.ndarray,
        offsets: np.ndarray,
        vocab_size: int,
        log_probs: np.ndarray | None = None,
        ref_log_probs: np.ndarray | None = None,
    ) -> RolloutSamplingMask:
        """From arrays of checked masks: no second validation, no copy."""
        made = object.__new__(cls)
        values = {"ids": ids, "offsets": offsets, "log_probs": log_probs, "ref_log_probs": ref_log_probs}
        for name, value in values.items():
            if value is not None:
                value.setflags(write=False)
            object.__setattr__(made, name, value)
        object.__setattr__(made, "vocab_size", vocab_size)
        return made

    def with_ref_log_probs(self, log_probs: np.ndarray) -> RolloutSamplingMask:
        """This mask with the reference policy's log-probs float32 [sum |S_t|], in the order of `ids`."""
        owned = np.array(log_probs, dtype=np.float32, copy=True)
        self._check_log_probs("ref_log_probs", owned)
        return self._trusted(self.ids, self.offsets, self.vocab_size, self.log_probs, owned)

    def select(self, indices: Sequence[int] | np.ndarray | range) -> RolloutSamplingMask:
        """Rows in the given order. A unit-step range shares memory with this mask; others are copied by runs."""
        if isinstance(indices, range) and indices.step == 1:
            if len(indices) == 0:
                return self._slice(0, 0)
            if indices.start < 0 or indices.stop > len(self):
                raise IndexError(f"sampling mask: rows {indices.start} to {indices.stop} of {len(self)}")
            return self._slice(indices.start, indices.stop)
        wanted = np.asarray(indices, dtype=np.int64)
        if wanted.size == 0:
            return self._slice(0, 0)
        if wanted.min() < 0 or wanted.max() >= len(self):
            raise IndexError(f"sampling mask: a row outside 0 to {len(self) - 1} was selected")
        breaks = np.flatnonzero(np.diff(wanted) != 1) + 1
        runs = [(int(run[0]), int(run[-1]) + 1) for run in np.split(wanted, breaks)]
        return RolloutSamplingMask.concatenate([self._slice(a, b) for a, b in runs])

    def places(self, rows: np.ndarray) -> np.ndarray:
        """int64: where in `ids` the ids of these rows stand, row by row."""
        counts = np.diff(self.offsets)[rows]
        ends = np.cumsum(counts)
        return np.arange(int(ends[-1]) if len(ends) else 0) + np.repeat(self.offsets[rows] - (ends - counts), counts)

    def _slice(self, start: int, stop: int) -> RolloutSamplingMask:
        low, high = int(self.offsets[start]), int(self.offsets[stop])
        values = [getattr(self, name) for name in _PER_ID]
        return self._trusted(
            self.ids[low:high],
            self.offsets[start : stop + 1] - low,
            self.vocab_size,
            *(None if value is None else value[low:high] for value in values),
        )

    def require_tokens(self, tokens: np.ndarray) -> None:
        """`ValueError` with the first response index whose sampled token is not in its row."""
        if len(tokens) != len(self):
            raise ValueError(f"sampling mask: {len(self)} rows for {len(tokens)} tokens")
        if len(self) == 0:
            return
        rows = np.repeat(np.asarray(tokens), np.diff(self.offsets))
        present = np.add.reduceat((self.ids == rows).astype(np.int64), self.offsets[:-1]) > 0
        if not present.all():
            at = int(np.argmin(present))
            raise ValueError(f"sampling mask: token {int(tokens[at])} at response index {at} is not in its own row")
