"""How large slots and records are, which is one number for all of a namespace."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvterrace.engine.blocks import Geometry, Ids
from kvterrace.engine.tree import RunTree

__all__ = ["SlotSizes"]


class SlotSizes:
    """Geometries by namespace number. Not thread-safe: the ledger's owner serialises."""

    def __init__(self, tree: RunTree) -> None:
        self._tree = tree
        self.geometries: dict[int, Geometry] = {}
        self._nbytes: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        self._same: int | None = None  # where all are of one size

    def add(self, namespace: int, geometry: Geometry) -> None:
        """Sizes of a namespace; of one that was added already, other sizes."""
        self.geometries[namespace] = geometry
        if namespace >= len(self._nbytes):
            self._nbytes = np.concatenate([self._nbytes, np.zeros(namespace + 1 - len(self._nbytes), np.int64)])
        self._nbytes[namespace] = geometry.record_nbytes
        sizes = {one.record_nbytes for one in self.geometries.values()}
        self._same = sizes.pop() if len(sizes) == 1 else None

    def __getitem__(self, namespace: int) -> int:
        return self.geometries[namespace].record_nbytes

    @property
    def mean_nbytes(self) -> float:
        """Over all namespaces; 0 if there are none."""
        sizes = [one.record_nbytes for one in self.geometries.values()]
        return sum(sizes) / len(sizes) if sizes else 0.0

    def of(self, ids: Ids) -> npt.NDArray[np.int64]:
        """Of each of these blocks."""
        if self._same is not None:
            return np.full(len(ids), self._same)
        return self._nbytes[self._tree.namespaces[self._tree.table.run[ids]]]

    def total(self, ids: Ids) -> int:
        """Of these blocks together."""
        return self._same * len(ids) if self._same is not None else int(self.of(ids).sum())
