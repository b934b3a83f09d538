"""Which blocks go first. A policy orders blocks; the ledger decides which of them can go, and when."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

__all__ = ["EvictionPolicy", "LruTailFirst", "TakesHints"]

Ids = npt.NDArray[np.int32]
Keys = npt.NDArray[np.uint64]


class EvictionPolicy(Protocol):
    """The order of eviction in one tier. Not thread-safe: the ledger's owner serialises.

    A policy is told of each request, and says which blocks leave for it; what leaves is inside no longer. The ledger
    keeps those that cannot go yet in a line of its own, and asks for more where that is empty. So a block of the tier
    is inside, or in that line.

    Everywhere, `keys` is a column over all ids: the first eight bytes of each block's key.
    """

    name: str

    def request(self, chain: Keys, ids: Ids, keys: Keys, now_s: float, *, extend: bool, output_tokens: int = -1) -> Ids:
        """A prompt came. Its blocks are inside from now on, but for those that leave at once to make room.

        Args:
            chain: the same of each of its blocks, head first; also of those that are yet to come.
            ids: of the first of them, as many as there are.
            extend: the prompt that came last has grown; this is no turn of its own.
            output_tokens: of the answer to it; -1: not known.

        Returns:
            what leaves, the first to go first.
        """
        ...

    def enter(self, ids: Ids, keys: Keys) -> None:
        """Blocks of the prompt that came last are there now: all of its blocks up to the last that is new."""
        ...

    def evict(self, count: int, keys: Keys) -> Ids:
        """`count` blocks more leave, or all there are; the first to go first."""
        ...

    def inside(self, ids: Ids, keys: Keys) -> npt.NDArray[np.bool_]:
        """For each block, whether it is inside."""
        ...

    def forget(self, ids: Ids, keys: Keys) -> None:
        """These have left for reasons of their own. Those that are not inside are ignored."""
        ...

    def resize(self, capacity: int) -> None:
        """So many blocks fit the tier. Takes effect with the next request."""
        ...

    @property
    def nbytes(self) -> int:
        """Memory taken."""
        ...


@runtime_checkable
class TakesHints(Protocol):
    """A policy that makes its own use of hints, as the return-index directory does."""

    def hint(self, key: int, kind: str, seconds: float, now_s: float) -> None:
        """What is known of the sequence that ends in the block `key` (the first 8 bytes of its key, little-endian).

        `kind` is the value of a `Hint`; `seconds` until it returns, or for how long the hint holds. Unknown keys are
        ignored.
        """
        ...


class LruTailFirst:
    """Least recently used first; of one request the tail before the head.

    So a block is always younger than what hangs on it: evicting from the oldest on keeps every prefix whole. A log of
    uses, and for each block its last place in it (8 B): what stands elsewhere in the log is out of date. No capacity of
    its own: what leaves is what it is asked for. A call costs array operations over its blocks.
    """

    name = "lru"
    _OUT = -1

    def __init__(self) -> None:
        self._place: npt.NDArray[np.int64] = np.zeros(0, np.int64)  # by id: its last use in the log, or _OUT
        self._log: Ids = np.zeros(64, np.int32)
        self._base = 0  # place of the first entry of the log
        self._start = self._stop = 0  # what is in use of the log

    def request(
        self,
        chain: Keys,  # noqa: ARG002
        ids: Ids,
        keys: Keys,
        now_s: float,  # noqa: ARG002
        *,
        extend: bool,  # noqa: ARG002
        output_tokens: int = -1,  # noqa: ARG002
    ) -> Ids:
        self.enter(ids, keys)
        return ids[:0]

    def enter(self, ids: Ids, keys: Keys) -> None:
        if len(keys) > len(self._place):
            more = np.full(len(keys) - len(self._place), self._OUT)
            self._place = np.concatenate([self._place, more])
        if self._stop + len(ids) > len(self._log):
            self._make_room(len(ids))
        start, self._stop = self._stop, self._stop + len(ids)
        self._log[start : self._stop] = ids[::-1]
        self._place[ids] = np.arange(self._base + self._stop - 1, self._base + start - 1, -1)

    def _make_room(self, count: int) -> None:
        """Leave out what is out of date; twice the room of what is left, so that each use is moved once or twice."""
        kept = self._valid(self._start, self._stop)
        self._log = np.zeros(max(64, 2 * (len(kept) + count)), np.int32)
        self._log[: len(kept)] = kept
        self._base += self._stop
        self._start, self._stop = 0, len(kept)
        self._place[kept] = np.arange(self._base, self._base + len(kept))

    def _valid(self, start: int, stop: int) -> Ids:
        some = self._log[start:stop]
        kept: Ids = some[self._place[some] == np.arange(self._base + start, self._base + stop)]
        return kept

    def evict(self, count: int, keys: Keys) -> Ids:  # noqa: ARG002
        gone: list[Ids] = []
        width = max(count, 64)
        while count and self._start < self._stop:
            stop = min(self._start + width, self._stop)
            some = self._valid(self._start, stop)[:count]
            count -= len(some)
            self._start = stop if count else int(self._place[some[-1]]) - self._base + 1
            self._place[some] = self._OUT
            gone.append(some)
            width *= 2
        return np.concatenate(gone) if gone else np.zeros(0, np.int32)

    def inside(self, ids: Ids, keys: Keys) -> npt.NDArray[np.bool_]:  # noqa: ARG002
        known: npt.NDArray[np.bool_] = ids < len(self._place)
        if known.all():
            known = self._place[ids] != self._OUT
        else:
            known[known] = self._place[ids[known]] != self._OUT
        return known

    def forget(self, ids: Ids, keys: Keys) -> None:  # noqa: ARG002
        self._place[ids[ids < len(self._place)]] = self._OUT

    def resize(self, capacity: int) -> None:
        """It has no capacity."""

    @property
    def nbytes(self) -> int:
        return self._place.nbytes + self._log.nbytes
