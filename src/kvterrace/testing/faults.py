"""Faults for any I/O engine, a real one included: wrap it, and say what goes wrong when.

    plan = FaultPlan().add(Fail(errno.EIO), IoKind.READ, nth=3)
    engine = FaultyEngine(PosixEngine(), plan)

| effect | READ, `read_now` | WRITE | SYNC | create, open, reopen, truncate, unlink, sync_folder |
|---|---|---|---|---|
| `Fail(errno)` | that error, nothing moves | the same | the same | raises it, nothing done |
| `Short(nbytes)` | that much arrives | whole pages of it arrive | - | - |
| `FlipBit(byte, bit)` | one bit of what arrives is wrong | - | - | - |
| `Astray(offset)` | what lies at `offset` arrives | - | - | - |
| `PretendDone()` | success, the buffers as they were | a lost write | a lost flush | truncate, unlink, sync_folder:
nothing done | | `Torn(pages, errno)` | - | only these pages arrive; success, or the error | - | - |
| `Slow(seconds)` | later | later | later | blocks that long |
| `Hang()` | not before `release()` | the same | the same | blocks until `release()` |

A dash is a plan that makes no sense: AssertionError. What hangs or is slow has not reached the inner engine yet: it
holds none of its threads, touches no buffer, and its deadline has not begun to run. `FakeDevice` has faults of its own
that hold a place in its queue.
"""

from __future__ import annotations

import errno
import heapq
import mmap
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np

from kvterrace.buffers import Bytes
from kvterrace.clock import Clock, ManualClock, SystemClock
from kvterrace.errors import StoreClosedError
from kvterrace.io.base import PAGE_NBYTES, FileInfo, IoEngine, IoFile, IoKind, IoRequest, IoResult
from kvterrace.io.faults import (
    Astray,
    Effect,
    Fail,
    FaultPlan,
    FileCall,
    FlipBit,
    Hang,
    Operation,
    PretendDone,
    Short,
    Slow,
    Torn,
)

__all__ = [
    "Astray",
    "Effect",
    "Fail",
    "FaultPlan",
    "FaultyEngine",
    "FileCall",
    "FlipBit",
    "Hang",
    "Operation",
    "PretendDone",
    "Short",
    "Slow",
    "Torn",
]

_MAKES_SENSE: dict[IoKind, tuple[type[Effect], ...]] = {
    IoKind.READ: (Fail, Short, FlipBit, Astray, PretendDone, Slow, Hang),
    IoKind.WRITE: (Fail, Short, Torn, PretendDone, Slow, Hang),
    IoKind.SYNC: (Fail, PretendDone, Slow, Hang),
}
_CAN_BE_PRETENDED: tuple[FileCall, ...] = ("truncate", "unlink", "sync_folder")


@dataclass(order=True, slots=True)
class _Held:
    due_s: float
    number: int
    request: IoRequest = field(compare=False)


class _Shadow(IoRequest):
    """What the inner engine gets in place of a request, its `tag`. Its `value` is what the submitter sees."""

    __slots__ = ()


class FaultyEngine:
    """An `IoEngine` over another, with the effects of a `FaultPlan`. Thread-safe. Owns the inner engine.

    Without a fault, requests, results and files are the inner engine's own, untouched. `finish` always runs on the
    thread of the inner engine that completed the request. Slow requests go on when somebody polls.
    """

    def __init__(self, inner: IoEngine, plan: FaultPlan | None = None, clock: Clock | None = None) -> None:
        """`clock` is what Slow is measured by; the inner engine's, if that has one. None: the system's."""
        self.name = f"faulty {inner.name}"
        self.plan = plan if plan is not None else FaultPlan()
        self._inner = inner
        self._clock = clock if clock is not None else SystemClock()
        self._lock = threading.Condition()
        self._slow: list[_Held] = []  # a heap
        self._hung: list[IoRequest] = []
        self._blocked = 0  # file calls that hang
        self._releases = 0
        self._numbered = 0
        self._woken = self._closed = False

    # Requests

    def submit(self, requests: Sequence[IoRequest]) -> None:
        with self._lock:
            if self._closed:
                raise StoreClosedError(f"I/O engine {self.name} was closed; open the store again")
            passed: list[IoRequest] = []
            held = False
            for request in requests:
                effect = self._effect_on(request)
                match effect:
                    case Hang():
                        self._hung.append(request)
                    case Slow(seconds):
                        self._numbered += 1
                        due_s = self._clock.monotonic_s() + seconds
                        heapq.heappush(self._slow, _Held(due_s, self._numbered, request))
                        held = True
                    case None:
                        passed.append(request)
                    case _:
                        passed.append(_shadow(request, effect))
            self._inner.submit(passed)
        if held:
            self._inner.wake()  # a waiting poll must not sleep past what has become due

    def poll(self, timeout_s: float) -> list[IoResult]:
        left_s = timeout_s
        while True:
            with self._lock:
                self._let_go()
                now_s = self._clock.monotonic_s()
                step_s = min(left_s, max(0.0, self._slow[0].due_s - now_s)) if self._slow else left_s
            results = [_unwrapped(result) for result in self._inner.poll(step_s)]
            left_s -= step_s
            with self._lock:
                woken, self._woken = self._woken, False
                self._let_go()
            if results or woken or left_s <= 0:
                return results

    def wake(self) -> None:
        with self._lock:
            self._woken = True
        self._inner.wake()

    def subscribe(self, on_result: Callable[[], None]) -> bool:  # noqa: ARG002 - results come into being in poll
        return False

    @property
    def in_flight(self) -> int:
        with self._lock:
            return self._inner.in_flight + len(self._slow) + len(self._hung)

    @property
    def hanging(self) -> int:
        """Requests and file calls that hang now."""
        with self._lock:
            return len(self._hung) + self._blocked

    def release(self) -> int:
        """Let everything that hangs go on from now, without a fault; returns how many."""
        with self._lock:
            hung, self._hung = self._hung, []
            count = len(hung) + self._blocked
            self._releases += 1
            if hung:
                self._inner.submit(hung)
            self._lock.notify_all()
        self._inner.wake()
        return count

    def close(self, timeout_s: float) -> bool:
        """As in `IoEngine`. While something hangs it answers False after `timeout_s`, and the inner engine stays open:
        `release`, then close again.
        """
        with self._lock:
            self._closed = True
            for held in sorted(self._slow):  # it would be in time after `close`, too: no need to wait for it
                self._inner.submit([held.request])
            self._slow.clear()
            if not isinstance(self._clock, ManualClock):  # which nobody moves while this thread waits
                self._lock.wait_for(lambda: not (self._hung or self._blocked), timeout_s)
            if self._hung or self._blocked:
                return False
        return self._inner.close(timeout_s)

    def _effect_on(self, request: IoRequest) -> Effect | None:
        if request.kind is IoKind.CALL or request.file is None:
            return None
        nbytes = sum(buffer.nbytes for buffer in request.buffers)
        effect = self.plan.effect_on(Operation(request.kind, request.file.path, request.offset, nbytes))
        if effect is not None and not isinstance(effect, _MAKES_SENSE[request.kind]):
            raise AssertionError(f"a {request.kind.value} cannot suffer {effect}")
        return effect

    def _let_go(self) -> None:
        now_s = self._clock.monotonic_s()
        while self._slow and self._slow[0].due_s <= now_s:
            self._inner.submit([heapq.heappop(self._slow).request])

    # Files

    def create(self, path: Path, nbytes: int) -> IoFile:
        self._suffer("create", path, nbytes)
        return self._inner.create(path, nbytes)

    def open(self, path: Path) -> IoFile:
        self._suffer("open", path)
        return self._inner.open(path)

    def reopen(self, path: Path) -> IoFile:
        self._suffer("reopen", path)
        return self._inner.reopen(path)

    def read_now(self, file: IoFile, offset: int, buffer: Bytes) -> int:
        effect = self.plan.effect_on(Operation(IoKind.READ, file.path, offset, buffer.nbytes))
        match effect:
            case Fail(number):
                raise _os_error(number, file.path)
            case PretendDone():
                return buffer.nbytes
            case Short(nbytes):
                bounce = _bounce([buffer])[0]
                moved = min(nbytes, self._inner.read_now(file, offset, bounce))
                buffer[:moved] = bounce[:moved]
                return moved
            case Torn():
                raise AssertionError(f"a read cannot suffer {effect}")
            case Slow() | Hang():
                self._block(effect)
            case Astray():
                offset = effect.offset
        moved = self._inner.read_now(file, offset, buffer)
        if isinstance(effect, FlipBit) and effect.byte < moved:
            _flip([buffer], effect)
        return moved

    def truncate(self, file: IoFile, nbytes: int) -> None:
        if self._suffer("truncate", file.path, nbytes):
            self._inner.truncate(file, nbytes)

    def close_file(self, file: IoFile) -> None:
        self._inner.close_file(file)

    def unlink(self, path: Path) -> None:
        if self._suffer("unlink", path):
            self._inner.unlink(path)

    def list(self, folder: Path) -> Sequence[FileInfo]:
        return self._inner.list(folder)

    def sync_folder(self, folder: Path) -> None:
        if self._suffer("sync_folder", folder):
            self._inner.sync_folder(folder)

    def free_nbytes(self, folder: Path) -> int:
        return self._inner.free_nbytes(folder)

    def _suffer(self, call: FileCall, path: Path, nbytes: int = 0) -> bool:
        """Do to a file call what is planned; whether it is still to be carried out."""
        effect = self.plan.effect_on(Operation(call, path, 0, nbytes))
        match effect:
            case None:
                return True
            case Fail(number):
                raise _os_error(number, path)
            case Slow() | Hang():
                self._block(effect)
                return True
            case PretendDone() if call in _CAN_BE_PRETENDED:
                return False
            case _:
                raise AssertionError(f"a {call} cannot suffer {effect}")

    def _block(self, effect: Slow | Hang) -> None:
        """Hold the calling thread up."""
        if isinstance(effect, Slow):
            if isinstance(self._clock, ManualClock):
                self._clock.advance(effect.seconds)
            else:
                threading.Event().wait(effect.seconds)
            return
        with self._lock:
            releases = self._releases
            self._blocked += 1
            self._lock.wait_for(lambda: self._releases != releases)
            self._blocked -= 1
            self._lock.notify_all()


def _shadow(request: IoRequest, effect: Effect) -> _Shadow:
    kind, buffers = request.kind, request.buffers
    offset, file = request.offset, request.file
    match effect:
        case Fail() | PretendDone():
            kind, buffers, offset, file = IoKind.CALL, (), 0, None
        case Short() if kind is IoKind.READ:
            buffers = _bounce(buffers)
        case Astray():
            offset = effect.offset
        case Short(nbytes):
            buffers = _first(buffers, nbytes // PAGE_NBYTES * PAGE_NBYTES)
        case Torn(pages):
            buffers = _first(buffers, pages * PAGE_NBYTES)
    finish = partial(_finish, request, effect)
    return _Shadow(kind, request.io_class, file, offset, buffers, finish, request, request.deadline_s)


def _finish(request: IoRequest, effect: Effect, inner: IoResult) -> IoResult:
    result = IoResult(request, inner.nbytes, inner.error, inner.started_s, inner.ended_s, expired=inner.expired)
    assert request.file is not None
    if inner.error is None and not inner.expired:
        match effect:
            case Fail(number):
                result.error = _os_error(number, request.file.path)
            case PretendDone():
                result.nbytes = result.wanted_nbytes
            case Short(nbytes) if request.kind is IoKind.READ:
                result.nbytes = min(nbytes, inner.nbytes)
                _copy_first(inner.request.buffers, request.buffers, result.nbytes)
            case FlipBit(byte) if byte < inner.nbytes:
                _flip(request.buffers, effect)
            case Torn(_, None):
                result.nbytes = result.wanted_nbytes
            case Torn(_, int(number)):
                result.error = _os_error(number, request.file.path)
    if request.finish is not None:
        try:
            result.value = request.finish(result)
        except BaseException as error:  # noqa: BLE001 - handed to the submitter
            result.crash = error
    return result


def _unwrapped(result: IoResult) -> IoResult:
    if not isinstance(result.request, _Shadow):
        return result
    if result.lent:
        assert isinstance(result.request.tag, IoRequest)
        return replace(result, request=result.request.tag)
    assert isinstance(result.value, IoResult), f"injecting a fault has failed: {result.crash!r}"
    return result.value


def _os_error(number: int, path: Path) -> OSError:
    return OSError(number, f"{os.strerror(number)} (planned {errno.errorcode.get(number, number)})", str(path))


def _bounce(buffers: Sequence[Bytes]) -> list[Bytes]:
    """Page-aligned memory of the same sizes."""
    return [np.frombuffer(mmap.mmap(-1, max(1, buffer.nbytes)), np.uint8)[: buffer.nbytes] for buffer in buffers]


def _first(buffers: Sequence[Bytes], nbytes: int) -> list[Bytes]:
    """Views of the first `nbytes` of them."""
    views = []
    for buffer in buffers:
        if nbytes <= 0:
            break
        views.append(buffer[:nbytes])
        nbytes -= buffer.nbytes
    return views


def _copy_first(source: Sequence[Bytes], target: Sequence[Bytes], nbytes: int) -> None:
    for one, other in zip(_first(source, nbytes), _first(target, nbytes), strict=True):
        other[:] = one


def _flip(buffers: Sequence[Bytes], effect: FlipBit) -> None:
    at = effect.byte
    for buffer in buffers:
        if at < buffer.nbytes:
            buffer[at] ^= np.uint8(1 << effect.bit)
            return
        at -= buffer.nbytes
