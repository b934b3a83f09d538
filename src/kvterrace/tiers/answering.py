"""Waiting for a drive while a store is opened: nothing else watches it yet, so the wait has its own bound."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from kvterrace.errors import StoreUnusableError
from kvterrace.io.base import IoClass, IoEngine, IoKind, IoRequest, IoResult

__all__ = ["SILENT_S", "answer", "answers"]

#: A drive that ends nothing for this long does not answer. The longest step is a scan of one segment, of 64 MiB.
SILENT_S = 60
_T = TypeVar("_T")


def answers(engine: IoEngine, folder: Path, count: int) -> Iterator[IoResult]:
    """The next `count` results of `engine`, which has nothing else to do, as they come. Blocks. What has not ended when
    this raises may still end: the memory of its requests stays theirs.

    Raises:
        StoreUnusableError: the drive of `folder` has ended nothing for `SILENT_S` seconds.
    """
    silent_s = 0
    while count > 0:
        results = engine.poll(1.0)
        # not by a clock: a process that was stopped has not waited
        silent_s = 0 if results else silent_s + 1
        if silent_s >= SILENT_S:
            raise StoreUnusableError(
                f"the drive of {folder} has not answered for {SILENT_S} s while the store was opened; see whether it "
                "hangs, then open the store again, or, if it is one of several drives, leave it out of the list"
            )
        count -= len(results)
        yield from results


def answer(engine: IoEngine, folder: Path, ask: Callable[[], _T]) -> _T:
    """What `ask` returns, called on a thread of `engine`, which has nothing else to do. Blocks.

    Raises:
        StoreUnusableError: as `answers`. What `ask` raises.
    """
    engine.submit([IoRequest(IoKind.CALL, IoClass.DEMOTION, finish=lambda _: ask())])
    (result,) = answers(engine, folder, 1)
    if result.crash is not None:
        raise result.crash
    value: _T = result.value  # type: ignore[assignment] # what `ask` returned
    return value
