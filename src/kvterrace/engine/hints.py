"""What clients say of a sequence's future: remembered for a while, believed until it is proved wrong."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from kvterrace.types import Hint

__all__ = ["HOLDS_S", "REPRIEVES", "TURN_S", "Hints"]

#: Sequences that a hint is remembered of; beyond that, the one given longest ago is forgotten.
MOST_HINTS = 16384
#: How long a hint holds that says no time.
HOLDS_S = 3600.0
#: A sequence that is to return is kept for twice as long as was said, within these bounds.
RETURN_LEAST_S, RETURN_MOST_S = 10.0, 600.0
#: How often what is to stay is passed over when it would be its turn to go; with each use of what is shared, anew.
REPRIEVES = 4
#: Uses that are no further apart than this count as one turn.
TURN_S = 1.0

_GOING = frozenset({Hint.CLOSED, Hint.ONE_OFF})


@dataclass(slots=True)
class _Given:
    kind: Hint
    until_s: float
    reprieves: int = REPRIEVES


class Hints:
    """Hints by sequence. Not thread-safe: the ledger's owner serialises. About 300 B each.

    A hint ends with its time, with another for its sequence, and with what proves it wrong: a closed sequence is used,
    a one-off sequence comes a second time. So it costs little to be wrong: what was to go is as any other block once it
    was read or put again, what was to stay is passed over `REPRIEVES` times at most before it goes unused.
    """

    def __init__(self) -> None:
        self._given: OrderedDict[bytes, _Given] = OrderedDict()
        self._now_s = 0.0

    def __len__(self) -> int:
        return len(self._given)

    def give(self, sequence: bytes, kind: Hint, seconds: float | None, now_s: float) -> None:
        """Remember what was said of `sequence`, known or not, in the place of what was said before."""
        self.now(now_s)
        if kind is Hint.RETURNS:
            holds_s = min(max(2.0 * (seconds or 0.0), RETURN_LEAST_S), RETURN_MOST_S)
        else:
            holds_s = HOLDS_S if seconds is None else seconds
        self._given.pop(sequence, None)
        self._given[sequence] = _Given(kind, now_s + holds_s)
        if len(self._given) > MOST_HINTS:
            self._given.popitem(last=False)

    def now(self, now_s: float) -> None:
        """Time has passed."""
        self._now_s = max(self._now_s, now_s)

    def of(self, sequence: bytes, now_s: float) -> Hint | None:
        """What holds of `sequence` now."""
        given = self._given.get(sequence)
        if given is None:
            return None
        if now_s >= given.until_s:
            del self._given[sequence]
            return None
        return given.kind

    def goes(self, sequence: bytes, now_s: float) -> bool:
        """Whether `sequence` is said to be of no more use."""
        return self.of(sequence, now_s) in _GOING

    def used(self, sequence: bytes, now_s: float) -> None:
        """Something of `sequence` is used, by whomever."""
        self.now(now_s)
        if self.of(sequence, now_s) in (Hint.SHARED, Hint.PRIORITY):
            self._given[sequence].reprieves = REPRIEVES

    def came_back(self, sequence: bytes, idle_s: float, now_s: float) -> None:
        """`sequence` is used to its end, or goes on, after it was idle for this long."""
        kind = self.of(sequence, now_s)
        if kind in (Hint.CLOSED, Hint.RETURNS) or (kind is Hint.ONE_OFF and idle_s >= TURN_S):
            del self._given[sequence]

    def spares(self, sequence: bytes) -> bool:
        """Whether it is the turn of `sequence` to go, and it is to be passed over once more. It was, after that."""
        kind = self.of(sequence, self._now_s)
        if kind is None or kind in _GOING:
            return False
        given = self._given[sequence]
        given.reprieves -= 1
        if given.reprieves < 0:
            del self._given[sequence]
            return False
        return True
