"""Policies of the extension module, behind the seam of the ledger; and which policy a store has."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvterrace.format.passes import native
from kvterrace.policy.eviction import EvictionPolicy, Ids, Keys, LruTailFirst

if TYPE_CHECKING:
    from kvterrace._native import Directory, KeyMap

__all__ = ["DirectoryPolicy", "default_policy"]


class DirectoryPolicy:
    """A directory, which knows of keys alone, as the policy of a tier of blocks. Not thread-safe: the ledger's owner
    serialises.
    """

    def __init__(self, name: str, directory: Directory, ids: KeyMap) -> None:
        """`ids`: empty; takes 6 B to 12 B for each block of the tier."""
        self.name = name
        self.directory = directory
        self._ids = ids

    def request(self, chain: Keys, ids: Ids, keys: Keys, now_s: float, *, extend: bool, output_tokens: int = -1) -> Ids:
        self._ids.put(ids, keys)
        self.directory.request(chain, now_s, output_tokens=output_tokens, extend=extend)
        gone = self.directory.take_evicted()
        if len(gone):  # a key may have left twice, or come back: `resize` evicts, too, before the prompt comes
            gone = gone[~self.directory.inside(gone)]
            gone = gone[np.sort(len(gone) - 1 - np.unique(gone[::-1], return_index=True)[1])]
        return self._leaving(gone, keys)

    def enter(self, ids: Ids, keys: Keys) -> None:
        self._ids.put(ids, keys)

    def evict(self, count: int, keys: Keys) -> Ids:
        while len(gone := self.directory.evict(count)):
            ids = self._leaving(gone, keys)
            if len(ids):
                return ids
        return np.zeros(0, np.int32)

    def _leaving(self, gone: Keys, keys: Keys) -> Ids:
        """Blocks that were to come, and never did, have no ids."""
        ids = self._ids.find(gone, keys)
        ids = ids[ids >= 0]
        self._ids.drop(ids, keys)
        return ids

    def inside(self, ids: Ids, keys: Keys) -> npt.NDArray[np.bool_]:
        return self.directory.inside(keys[ids])

    def forget(self, ids: Ids, keys: Keys) -> None:
        words = keys[ids]
        inside = self.directory.inside(words)
        if inside.any():  # of what has left before, a directory may remember more than the tier does
            self.directory.forget(words[inside])
        self._ids.drop(ids, keys)

    def resize(self, capacity: int) -> None:
        self.directory.resize(capacity)

    def hint(self, key: int, kind: str, seconds: float, now_s: float) -> None:
        """See `TakesHints`. A directory that takes none ignores it."""
        hint = getattr(self.directory, "hint", None)
        if hint is not None:
            hint(key, kind, seconds, now_s)

    @property
    def nbytes(self) -> int:
        return self.directory.nbytes + self._ids.nbytes


def default_policy() -> EvictionPolicy:
    """The best there is here: the return-index policy with the extension module, else the least recently used."""
    module = native()
    if module is None or not hasattr(module, "ReturnIndex"):
        return LruTailFirst()
    return DirectoryPolicy("return-index", module.ReturnIndex(1), module.KeyMap())
