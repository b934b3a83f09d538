"""The drives of a store, opened for reading beside the process that writes it. Changes nothing on them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvterrace.errors import NotAStoreError, StoreUnusableError
from kvterrace.tiers.directory import StoreDirectory
from kvterrace.tiers.drives import Candidate, plan_drives, settled
from kvterrace.tiers.marker import read_marker

__all__ = ["view_drives"]


def view_drives(roots: Sequence[Path], partition: str) -> list[StoreDirectory]:
    """The partition on each of the drives with the folders `roots`, in the order of the drives. Blocks.

    They must be exactly the drives that the store has now: a reader cannot say on a drive that another is missing, and
    must not believe one that was away (I14).

    Raises:
        ConfigError, NotAStoreError, FormatVersionError, StoreUnusableError.
    """
    directories = [StoreDirectory.view(root, partition) for root in roots]
    try:
        plan = plan_drives(settled([Candidate(root, read_marker(root), there=True) for root in roots]))
    except OSError as error:
        raise StoreUnusableError(f"cannot read a drive of the store: {error}; see that all are mounted") from error
    if plan.new:
        raise NotAStoreError(f"{plan.new[0].root} holds no store to read; leave it out")
    if plan.missing:
        raise StoreUnusableError(
            f"{roots[0]}: {plan.missing} more drive(s) belong to this store; give exactly those that its writer has"
        )
    if plan.stale:
        raise StoreUnusableError(
            f"{plan.stale[0].root} was away while the store was used without it; give exactly the drives that its "
            "writer has"
        )
    return [directories[list(roots).index(one.root)] for one in plan.order]
