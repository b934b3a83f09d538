"""Memory of a caller, with guard bytes around and between what is lent, and what it must look like afterwards."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
from tests.soak.truth import content

from kvterrace import Hit, KeyChain
from kvterrace.buffers import Bytes
from kvterrace.io.base import PAGE_NBYTES

GUARD = 0xA5
_GUARD_NBYTES = 64
#: More part arrays than this are slow to make, and show nothing new.
_MOST_PARTS = 16


class Lent:
    """Memory for blocks `start..stop` of a chain, in one of the two forms that the library takes; often on a page
    boundary.
    """

    def __init__(self, rng: random.Random, chain: KeyChain, start: int, stop: int, layers: range | None = None) -> None:
        layout = chain.namespace.layout
        per_layer = layout.parts_per_layer
        first = 0 if layers is None else layers.start * per_layer
        last = layout.parts if layers is None else layers.stop * per_layer
        sizes = layout.part_nbytes[first:last]
        self._chain, self._start, self._stop = chain, start, stop
        self._skip = sum(layout.part_nbytes[:first])
        self.width = sum(sizes)
        self._gap = _GUARD_NBYTES if len(sizes) <= _MOST_PARTS and rng.random() < 0.4 else 0
        self._sizes = sizes if self._gap else (self.width,)
        row = self.width + self._gap * len(self._sizes)
        rows = stop - start
        room = np.full(2 * _GUARD_NBYTES + rows * row + 2 * PAGE_NBYTES, GUARD, np.uint8)
        in_pages = rng.random() < 0.5
        self._whole_pages = in_pages and not self._gap and layers is None and row % PAGE_NBYTES == 0
        at = -room.ctypes.data % PAGE_NBYTES + (PAGE_NBYTES - _GUARD_NBYTES if in_pages else 0)
        self.memory: Bytes = room[at : at + 2 * _GUARD_NBYTES + rows * row]
        #: Whether the read has no deadline: then the drive may read into whole pages itself.
        self.unhurried = False
        self._rows = self.memory[_GUARD_NBYTES : _GUARD_NBYTES + rows * row].reshape(rows, row)
        self.argument: Any = self.memory[_GUARD_NBYTES : _GUARD_NBYTES + rows * row]
        if self._gap:
            self.argument = _columns(self._rows, self._sizes, self._gap)

    def fill(self) -> Lent:
        """Put the blocks' content in, for a put."""
        for at in range(self._stop - self._start):
            self._lay(self._rows[at], at)
        return self

    def wrong(self, outcomes: Sequence[object]) -> str | None:
        """What is not as it must be: hits hold their block, all else is as it was, but for blocks that were lent to the
        drive. None if all is well.
        """
        expected = np.full_like(self.memory, GUARD)
        rows = expected[_GUARD_NBYTES : len(expected) - _GUARD_NBYTES].reshape(self._rows.shape)
        for at, outcome in enumerate(outcomes):
            if isinstance(outcome, Hit):
                self._lay(rows[at], at)
            elif self.unhurried and self._whole_pages:
                rows[at] = self._rows[at]
        if np.array_equal(self.memory, expected):
            return None
        differ = np.flatnonzero(self.memory != expected)
        at = (int(differ[0]) - _GUARD_NBYTES) // self._rows.shape[1] if self._rows.size else -1
        what = outcomes[at] if 0 <= at < len(outcomes) else "a guard"
        return (
            f"{len(differ)} B are wrong, the first at {differ[0]} of {len(self.memory)}, in block {self._start + at} "
            f"of {self._chain.namespace.model} ({what})"
        )

    def _lay(self, row: Bytes, at: int) -> None:
        layout = self._chain.namespace.layout
        block = content(self._chain.key(self._start + at), layout.block_nbytes)[self._skip : self._skip + self.width]
        if not self._gap:
            row[:] = block
            return
        source = target = 0
        for size in self._sizes:
            row[target : target + size] = block[source : source + size]
            source += size
            target += size + self._gap


def _columns(rows: Bytes, sizes: Sequence[int], gap: int) -> list[Bytes]:
    columns, at = [], 0
    for size in sizes:
        columns.append(rows[:, at : at + size])
        at += size + gap
    return columns
