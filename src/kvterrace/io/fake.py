"""A FAKE drive, for tests and simulation: files in memory, virtual time, planned faults, power cuts. Keeps nothing.

Time: `parallel` servers take the waiting request of the smallest `IoClass`, first come first served within a class. A
READ or WRITE takes `latency_s`, then its bytes pass a link of `bytes_per_s` that all share, in order of start; a SYNC
takes `latency_s`, a CALL nothing. What it has begun at its deadline goes on. With a `ManualClock`, `poll` and `close`
move the clock themselves, so that a run is the same each time and takes no real time; with any other clock they wait
for it.

Medium: data moves at completion. What was written since the file's last SYNC, page by page, and what was created or
removed since the last `sync_folder`, may be lost by a power cut: see `crash_image`.
"""

from __future__ import annotations

import errno
import heapq
import math
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvterrace.buffers import Bytes
from kvterrace.clock import Clock, ManualClock
from kvterrace.errors import StoreClosedError
from kvterrace.io.base import PAGE_NBYTES, FileInfo, IoClass, IoFile, IoKind, IoRequest, IoResult
from kvterrace.io.deadlines import Deadlines, Given
from kvterrace.io.fake_medium import Content, FakeFile, Medium, Unsynced, keep_randomly, os_error
from kvterrace.io.faults import Effect, Fail, FaultPlan, FlipBit, Hang, Operation, PretendDone, Short, Slow, Torn

__all__ = ["FakeDevice", "FakeFile", "Unsynced", "keep_randomly"]


@dataclass(order=True, slots=True)
class _Active:
    done_s: float
    number: int
    given: Given = field(compare=False)
    effect: Effect | None = field(compare=False)
    changes: int = field(compare=False)  # to the file, landed before it started: what a SYNC makes durable
    started_s: float = field(compare=False, default=0.0)

    @property
    def request(self) -> IoRequest:
        return self.given.request


class FakeDevice:
    """`IoEngine` in memory. Thread-safe. Buffers must be page-aligned, as for O_DIRECT: EINVAL otherwise.

    Folders exist by themselves. `read_now` takes no time; of the faults, Slow and Hang do not apply to it.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        latency_s: float = 100e-6,
        parallel: int = 8,
        bytes_per_s: float = 2e9,
        capacity_nbytes: int = 16 << 30,
        faults: FaultPlan | None = None,
        name: str = "fake",
    ) -> None:
        self.name = name
        self.faults = faults or FaultPlan()
        self._clock = clock
        self._latency_s, self._parallel, self._bytes_per_s = latency_s, parallel, bytes_per_s
        self._medium = Medium(capacity_nbytes)
        self._changed = threading.Condition()
        self._queues: tuple[deque[Given], ...] = tuple(deque() for _ in IoClass)
        self._deadlines = Deadlines()
        self._running: list[_Active] = []  # a heap
        self._hung: list[_Active] = []
        self._landed: list[IoResult] = []  # data moved, `finish` not run
        self._results: list[IoResult] = []  # finished by `close`
        self._started = self._in_flight = 0
        self._link_free_s = self._reached_s = -math.inf
        self._woken = self._closed = False

    # Requests

    def submit(self, requests: Sequence[IoRequest]) -> None:
        with self._changed:
            if self._closed:
                raise StoreClosedError(f"I/O engine {self.name} was closed; open the store again")
            self._settle()
            for request in requests:
                self._queues[request.io_class].append(self._deadlines.give(request, self._now_s()))
            self._in_flight += len(requests)
            self._expire(self._now_s())
            self._start(self._now_s())
            self._changed.notify_all()

    def poll(self, timeout_s: float) -> list[IoResult]:
        deadline_s = self._now_s() + timeout_s
        with self._changed:
            self._settle()
            while not (self._landed or self._results or self._woken) and self._let_pass(deadline_s):
                self._settle()
            self._woken = False
            results, self._results = self._results, []
            landed, self._landed = self._landed, []
        results += [_finished(result) for result in landed]
        with self._changed:
            self._in_flight -= sum(not result.lent for result in results)
        return results

    def wake(self) -> None:
        """Make a waiting `poll` return; if none waits, the next one returns at once."""
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    def subscribe(self, on_result: Callable[[], None]) -> bool:  # noqa: ARG002 - results come into being in poll
        return False

    @property
    def in_flight(self) -> int:
        return self._in_flight

    def release(self) -> int:
        """Let everything that hangs go on from now; returns how many."""
        with self._changed:
            self._settle()
            hung, self._hung = self._hung, []
            for active in hung:
                self._schedule(active, self._now_s(), 0.0)
            self._changed.notify_all()
        return len(hung)

    def close(self, timeout_s: float) -> bool:
        """As in `IoEngine`; results stay for `poll`. May be called again."""
        deadline_s = self._now_s() + timeout_s
        with self._changed:
            self._closed = True
            self._settle()
            while self._active and self._let_pass(deadline_s):
                self._settle()
            landed, self._landed = self._landed, []
            ended = not self._active and not self._hung
        finished = [_finished(result) for result in landed]
        with self._changed:
            self._results += finished
        return ended

    # Virtual time

    def _now_s(self) -> float:
        return max(self._clock.monotonic_s(), self._reached_s)

    def _let_pass(self, deadline_s: float) -> bool:
        """Let time go by to the next completion, or to the deadline if that is earlier. False if it is there."""
        now_s = self._now_s()
        due_s = self._deadlines.next_s
        target_s = min(deadline_s, due_s, self._running[0].done_s if self._running else math.inf)
        if now_s >= target_s or target_s == math.inf or (self._closed and not self._active):
            return False
        if isinstance(self._clock, ManualClock):
            self._clock.advance(target_s - now_s)
            self._reached_s = target_s  # whatever rounding made of the sum
        else:
            self._changed.wait(target_s - now_s)
        return True

    def _settle(self) -> None:
        """Complete what is due, and start what waited for it, in the order of virtual time."""
        now_s = self._now_s()
        while True:
            done_s = self._running[0].done_s if self._running else math.inf
            if min(done_s, self._deadlines.next_s) > now_s:
                return
            if done_s <= self._deadlines.next_s:
                active = heapq.heappop(self._running)
                self._deadlines.ended(active.given)
                self._landed.append(self._carry_out(active))
                self._expire(done_s)
                self._start(done_s)
            else:
                self._expire(self._deadlines.next_s)

    def _expire(self, now_s: float) -> None:
        for given in self._deadlines.due(now_s):
            if given.started_s is None:
                self._queues[given.request.io_class].remove(given)
                self._landed.append(given.unsent(now_s))
            else:
                self._landed.append(given.lent(now_s))

    @property
    def _active(self) -> bool:
        """Whether time will bring a result."""
        return bool(self._running) or self._deadlines.next_s < math.inf

    def _start(self, now_s: float) -> None:
        while len(self._running) + len(self._hung) < self._parallel:
            given = next((queue.popleft() for queue in self._queues if queue), None)
            if given is None:
                return
            given.started_s, request = now_s, given.request
            file, effect, changes = request.file, None, 0
            if isinstance(file, FakeFile):
                nbytes = sum(buffer.nbytes for buffer in request.buffers)
                effect = self.faults.effect_on(Operation(request.kind, file.path, request.offset, nbytes))
                changes = file.content.changes if file.content is not None else 0
            self._started += 1
            active = _Active(0.0, self._started, given, effect, changes, now_s)
            if isinstance(effect, Hang):
                self._hung.append(active)
            else:
                self._schedule(active, now_s, effect.seconds if isinstance(effect, Slow) else 0.0)

    def _schedule(self, active: _Active, now_s: float, extra_s: float) -> None:
        done_s = now_s
        if active.request.kind is not IoKind.CALL:
            done_s += self._latency_s
        nbytes = sum(buffer.nbytes for buffer in active.request.buffers)
        if nbytes:
            done_s = self._link_free_s = max(done_s, self._link_free_s) + nbytes / self._bytes_per_s
        active.done_s = done_s + extra_s
        heapq.heappush(self._running, active)

    # Data

    def _carry_out(self, active: _Active) -> IoResult:
        request, effect = active.request, active.effect
        result = IoResult(request, started_s=active.started_s, ended_s=active.done_s)
        if request.kind is IoKind.CALL:
            return result
        try:
            if not isinstance(request.file, FakeFile):
                raise os_error(errno.EINVAL, Path(repr(request.file)))
            content = request.file.to_write() if request.kind is IoKind.WRITE else request.file.to_read()
            if isinstance(effect, Fail):
                raise os_error(effect.errno, request.file.path)
            if isinstance(effect, PretendDone):
                result.nbytes = result.wanted_nbytes
            elif request.kind is IoKind.SYNC:
                content.sync(active.changes)
            else:
                _check_alignment(request, request.file.path)
                if request.kind is IoKind.READ:
                    _read(result, content, effect)
                else:
                    self._write(result, content, request.file.path, effect)
        except OSError as error:
            result.error = error
        return result

    def _write(self, result: IoResult, content: Content, path: Path, effect: Effect | None) -> None:
        wanted, offset = result.wanted_nbytes, result.request.offset
        limit = wanted
        if isinstance(effect, Short):
            limit = min(wanted, effect.nbytes)
        elif isinstance(effect, Torn):
            limit = min(wanted, effect.pages * PAGE_NBYTES)
        room = max(0, content.allocated_nbytes + self._medium.free_nbytes - offset) // PAGE_NBYTES * PAGE_NBYTES
        result.nbytes = min(limit, room)
        if result.nbytes:
            content.write(offset, _written(result.request)[: result.nbytes])
        if limit > room:
            raise os_error(errno.ENOSPC, path)
        if isinstance(effect, Torn):
            if effect.errno is not None:
                raise os_error(effect.errno, path)
            result.nbytes = wanted

    # Files

    def create(self, path: Path, nbytes: int) -> FakeFile:
        with self._changed:
            self._refuse_if_closed()
            match self.faults.effect_on(Operation("create", path, 0, nbytes)):
                case None:
                    return self._medium.create(path, nbytes)
                case Fail(number):
                    raise os_error(number, path)
                case other:
                    raise AssertionError(f"a create can only Fail, not {other}")

    def open(self, path: Path) -> FakeFile:
        with self._changed:
            self._refuse_if_closed()
            return self._medium.open(path, writable=False)

    def reopen(self, path: Path) -> FakeFile:
        with self._changed:
            self._refuse_if_closed()
            return self._medium.open(path, writable=True)

    def read_now(self, file: IoFile, offset: int, buffer: Bytes) -> int:
        request = IoRequest(IoKind.READ, IoClass.DEMAND, file, offset, (buffer,))
        with self._changed:
            self._settle()
            effect = self.faults.effect_on(Operation(IoKind.READ, file.path, offset, buffer.nbytes))
            result = self._carry_out(_Active(0.0, 0, Given(request), effect, 0))
        if result.error is not None:
            raise result.error
        return result.nbytes

    def truncate(self, file: IoFile, nbytes: int) -> None:
        with self._changed:
            self._settle()
            self._medium.resize(_fake(file), nbytes)

    def close_file(self, file: IoFile) -> None:
        """As in `IoEngine`. Closing twice does nothing; requests that complete later end with EBADF."""
        with self._changed:
            self._settle()
            self._medium.close(_fake(file))

    def unlink(self, path: Path) -> None:
        with self._changed:
            self._settle()
            self._medium.unlink(path)

    def list(self, folder: Path) -> Sequence[FileInfo]:
        with self._changed:
            self._settle()
            return self._medium.entries(folder)

    def sync_folder(self, folder: Path) -> None:
        with self._changed:
            self._medium.sync_folder(folder)

    def free_nbytes(self, folder: Path) -> int:  # noqa: ARG002 - one drive
        with self._changed:
            self._settle()
            return self._medium.free_nbytes

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise StoreClosedError(f"I/O engine {self.name} was closed; open the store again")

    # What only a fake can do

    def snapshot(self) -> dict[Path, bytes]:
        """The files, and what reading them now would return."""
        with self._changed:
            self._settle()
            return {path: content.current.tobytes() for path, content in sorted(self._medium.names.items())}

    def poke(self, path: Path, offset: int, data: bytes) -> None:
        """Change bytes on the medium behind everybody's back. All written to the file so far becomes durable, too."""
        with self._changed:
            self._settle()
            content = self._medium.names[path]
            content.write(offset, data)
            content.sync(content.changes)

    def crash_image(self, keep: Callable[[Unsynced], bool]) -> FakeDevice:
        """The drive after a power cut now: a healthy, idle device of the same kind and clock. This one lives on.

        What was synced is there. For each change that was not, `keep` says whether it survived; it is asked in a fixed
        order (by path, then in the order of the changes). Writes in flight are changes too, page by page. Space that
        was reserved and not written reads as zeros. A name made or removed without `sync_folder` goes back if not kept.
        """
        image = FakeDevice(
            self._clock,
            latency_s=self._latency_s,
            parallel=self._parallel,
            bytes_per_s=self._bytes_per_s,
            name=self.name,
        )
        with self._changed:
            self._settle()
            image._medium = self._medium.after_crash(self._in_flight_writes, keep)
        return image

    def _in_flight_writes(self, content: Content) -> Iterator[tuple[int, bytes]]:
        for active in sorted([*self._running, *self._hung], key=lambda active: active.number):
            request = active.request
            if request.kind is not IoKind.WRITE or isinstance(active.effect, (Fail, PretendDone)):
                continue
            if isinstance(request.file, FakeFile) and request.file.content is content:
                yield request.offset, _written(request)


def _read(result: IoResult, content: Content, effect: Effect | None) -> None:
    offset = result.request.offset
    limit = effect.nbytes if isinstance(effect, Short) else result.wanted_nbytes
    data = content.current[offset : offset + min(limit, result.wanted_nbytes)]
    if isinstance(effect, FlipBit) and effect.byte < data.nbytes:
        data = data.copy()
        data[effect.byte] ^= 1 << effect.bit
    result.nbytes = data.nbytes
    for buffer in result.request.buffers:
        buffer[: data.nbytes] = data[: buffer.nbytes]
        data = data[buffer.nbytes :]


def _finished(result: IoResult) -> IoResult:
    if result.request.finish is not None and not result.lent:
        try:
            result.value = result.request.finish(result)
        except BaseException as error:  # noqa: BLE001 - handed to the submitter
            result.crash = error
    return result


def _written(request: IoRequest) -> bytes:
    return b"".join(buffer.tobytes() for buffer in request.buffers)


def _check_alignment(request: IoRequest, path: Path) -> None:
    for buffer in request.buffers:
        if buffer.nbytes % PAGE_NBYTES or buffer.__array_interface__["data"][0] % PAGE_NBYTES:
            raise os_error(errno.EINVAL, path)
    if request.offset % PAGE_NBYTES:
        raise os_error(errno.EINVAL, path)


def _fake(file: IoFile) -> FakeFile:
    if not isinstance(file, FakeFile):
        raise TypeError(f"a FakeDevice cannot use {file!r}; it wants what its own create or open returned")
    return file
