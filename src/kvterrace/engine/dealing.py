"""Which volume a block goes to, where there are several: never to none, as long as one of them takes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvterrace.engine.space import SegmentSpace, any_block

__all__ = ["Dealing"]


class Dealing:
    """The ledger's rule of who writes what. Not thread-safe: the ledger's owner serialises.

    Of the volumes that can write, each block that may be stored at all is refused by all but one at most: or it would
    wait for ever, and hold its slot.
    """

    def __init__(self, spaces: Sequence[SegmentSpace], key_of: Callable[[int], bytes]) -> None:
        self.spaces = spaces
        self._key_of = key_of

    @property
    def can_write(self) -> bool:
        """Whether some volume takes writes."""
        return any(space.can_write for space in self.spaces)

    @property
    def bars(self) -> bool:
        """Whether there may be a block that `may_store` says no of."""
        return bool(self.spaces) and all(space.may_store is not any_block for space in self.spaces)

    def may_store(self, key: bytes) -> bool:
        """Whether the block of a key may be given to some volume; else it lives in DRAM alone."""
        return not self.spaces or any(space.may_store(key) for space in self.spaces)

    def takes(self, space: SegmentSpace, block: int) -> bool:
        """Whether `space` takes a block itself: it has not failed there, or no other volume that can write may have
        it.
        """
        if len(self.spaces) == 1:
            return True
        key = self._key_of(block)
        others = (one for one in self.spaces if one is not space and one.can_write)
        return space.may_store(key) or not any(one.may_store(key) for one in others)

    def refused_by(self, space: SegmentSpace) -> Callable[[int], bool]:
        """Which blocks do not go to this volume: those that it does not take, and what another one has to write itself
        before it can make room.
        """
        others = [one for one in self.spaces if one is not space and one.can_write]
        if not others:
            return lambda _: False
        theirs = {block for one in others for block in one.first.tolist() if self.takes(one, block)}
        return lambda block: block in theirs or not self.takes(space, block)
