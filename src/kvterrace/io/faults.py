"""Faults of a device, planned: which operation goes wrong, and how. For tests only.

A plan is asked once for each operation, when the device starts it. Rules are tried in the order they were added, the
first that fires wins, and every rule counts every operation that it matches.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kvterrace.io.base import IoKind

__all__ = [
    "Astray",
    "Effect",
    "Fail",
    "FaultPlan",
    "FileCall",
    "FlipBit",
    "Hang",
    "Operation",
    "PretendDone",
    "Short",
    "Slow",
    "Torn",
]

#: Calls on files that a plan can hit. A `FakeDevice` asks for "create" alone; `testing.faults.FaultyEngine` for all.
FileCall = Literal["create", "open", "reopen", "truncate", "unlink", "sync_folder"]


@dataclass(frozen=True, slots=True)
class Operation:
    """What a device is about to do. `offset` and `nbytes` are 0 for a SYNC; a create has the size it reserves, a
    truncate the new size. A `read_now` is a READ.
    """

    kind: IoKind | FileCall
    path: Path
    offset: int = 0
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class Fail:
    """End with this error number (EIO, ENOSPC, ...); nothing moves. Works on a create, too."""

    errno: int


@dataclass(frozen=True, slots=True)
class Short:
    """Move only the first `nbytes`, and say so."""

    nbytes: int


@dataclass(frozen=True, slots=True)
class FlipBit:
    """READ: the data that arrives has bit `bit` (0..7) of byte `byte` of the transfer flipped. The medium is intact."""

    byte: int
    bit: int = 0


@dataclass(frozen=True, slots=True)
class Astray:
    """READ: the data comes from byte `offset` (whole pages) of the same file, and full success is reported if there is
    that much of it. For a `FaultyEngine` only: a `FakeDevice` ignores it.
    """

    offset: int


@dataclass(frozen=True, slots=True)
class PretendDone:
    """Report full success and do nothing: a stale completion (READ), a lost write (WRITE), a lost flush (SYNC)."""


@dataclass(frozen=True, slots=True)
class Torn:
    """WRITE: only the first `pages` reach the medium. Reports full success, or, with `errno`, that error."""

    pages: int
    errno: int | None = None


@dataclass(frozen=True, slots=True)
class Slow:
    """Take `seconds` more."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Hang:
    """Do not complete until the device's `release()`, then go on as usual. The data moves only after that."""


Effect = Fail | Short | FlipBit | Astray | PretendDone | Torn | Slow | Hang


@dataclass(slots=True)
class _Rule:
    effect: Effect
    kind: IoKind | FileCall | None
    nth: int | None
    when: Callable[[Operation], bool] | None
    seen: int = 0


class FaultPlan:
    """Rules that turn operations into faults. Thread-safe."""

    def __init__(self) -> None:
        self._rules: list[_Rule] = []
        self._lock = threading.Lock()
        #: What fired so far, in order.
        self.fired: list[tuple[Operation, Effect]] = []

    def add(
        self,
        effect: Effect,
        kind: IoKind | FileCall | None = None,
        *,
        nth: int | None = None,
        when: Callable[[Operation], bool] | None = None,
    ) -> FaultPlan:
        """Let `effect` happen to operations of `kind` (None: any) for which `when` is true; returns the plan itself.

        Args:
            nth: only to the n-th such operation from now on, counted from 1; None: to all of them.
        """
        with self._lock:
            self._rules.append(_Rule(effect, kind, nth, when))
        return self

    def clear(self) -> None:
        """Forget all rules: the device is healthy from now on."""
        with self._lock:
            self._rules.clear()

    def effect_on(self, operation: Operation) -> Effect | None:
        """The fault for this operation, or None. Counts it; a device asks once per operation."""
        with self._lock:
            chosen: Effect | None = None
            for rule in self._rules:
                if (rule.kind is None or rule.kind == operation.kind) and (rule.when is None or rule.when(operation)):
                    rule.seen += 1
                    if chosen is None and (rule.nth is None or rule.nth == rule.seen):
                        chosen = rule.effect
            if chosen is not None:
                self.fired.append((operation, chosen))
            return chosen
