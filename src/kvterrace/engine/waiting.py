"""Wants that have no slot yet, in line, those for one block together.

A want holds its block. If those for one block stood apart, blocks that were read for the first could fill DRAM, each
held by one further back, and nobody's turn would come.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from kvterrace.engine.landing import Want

__all__ = ["Line"]


@dataclass(slots=True, eq=False)
class _Place:
    """A place in line: wants for one block, and when the first of them was submitted."""

    since_s: float
    wants: list[Want]


class Line:
    """Blocks in the order they were first wanted. Used under the store's lock."""

    def __init__(self) -> None:
        self._places: OrderedDict[int, _Place] = OrderedDict()  # by block; a plain dict is slow to shed its first

    def __len__(self) -> int:
        """Blocks that are waited for."""
        return len(self._places)

    def __iter__(self) -> Iterator[Want]:
        """The first want of each block."""
        return (place.wants[0] for place in self._places.values())

    def add(self, want: Want) -> None:
        """`want` takes its place: behind others for its block, else at the end."""
        place = self._places.get(want.block)
        if place is None:
            self._places[want.block] = _Place(want.transfer.submitted_s, [want])
        else:
            place.wants.append(want)

    @property
    def since_s(self) -> float:
        """When the first in line was submitted."""
        return next(iter(self._places.values())).since_s

    def skip(self) -> Want:
        """Take the first want out; others for its block keep their place."""
        block, place = next(iter(self._places.items()))
        want = place.wants.pop(0)
        if not place.wants:
            del self._places[block]
        return want

    def is_alone(self, want: Want) -> bool:
        """Whether nobody else in line wants the block of `want`, which is."""
        return len(self._places[want.block].wants) == 1

    def remove(self, want: Want) -> None:
        """Take `want`, which is alone, out of the line."""
        del self._places[want.block]

    def pop(self) -> list[Want]:
        """Take all wants for the first block out."""
        return self._places.popitem(last=False)[1].wants
