"""The one object that a user holds."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Self

import numpy as np

from kvterrace.arguments import (
    require_chain,
    require_hint,
    require_scores,
    require_sequence,
    require_span,
    require_transfer,
)
from kvterrace.buffers import BlockBuffers
from kvterrace.clock import Clock
from kvterrace.config import require_limit, require_seconds
from kvterrace.engine import ending
from kvterrace.engine.blocks import Ids
from kvterrace.engine.counters import StoreStats
from kvterrace.engine.dirty import WritePolicy
from kvterrace.engine.driver import Driver
from kvterrace.engine.recording import Recorder
from kvterrace.engine.starting import follow, lead
from kvterrace.engine.transfers import Transfer, TransferKind
from kvterrace.errors import KVTerraceError, StoreClosedError
from kvterrace.handles import Match, Pin
from kvterrace.io.base import IoClass, IoEngine, IoKind, IoRequest, IoResult
from kvterrace.keys import KeyChain, Namespace
from kvterrace.policy.eviction import EvictionPolicy
from kvterrace.shutdown import closed
from kvterrace.tiers.directory import StoreDirectory
from kvterrace.types import GetOutcome, Hint, PutOutcome

__all__ = ["Store"]

_log = logging.getLogger(__name__)

_FINISHED_KEPT = 4096


class Store:
    """A ladder of DRAM and SSD for KV blocks. Thread-safe. Get one from `open_store`.

    `get`, `put` and `prefetch` submit and return at once; `wait` and `poll` tell how it ended. Outcomes are values,
    one for each block; exceptions are for the caller's mistakes and for a store that cannot be used.
    """

    def __init__(
        self,
        *,
        dram_nbytes: int,
        ssd_nbytes: int,
        directory: StoreDirectory | None,
        engine: IoEngine,
        clock: Clock,
        more: Sequence[tuple[StoreDirectory, IoEngine]] = (),
        writes: WritePolicy | None = None,
        busy_after_s: float = 5.0,
        segment_nbytes: int | None = None,
        background: bool = True,
        read_only: bool = False,
        make_policy: Callable[[], EvictionPolicy] | None = None,
        recorder: Recorder | None = None,
        daily_write_nbytes: int | None = None,
    ) -> None:
        """For tests and embedders; see `open_store`. Takes over directories and engines.

        Args:
            ssd_nbytes: of all drives together; each has an equal share.
            directory: of the first drive; None for DRAM alone.
            engine: of the first drive. Copies in memory run on it too, and must not be held up by that drive.
            more: directory and engine of each further drive.
            segment_nbytes: size of new segments; None: 64 MiB, or a sixteenth of the capacity if that is less.
            background: drive the store by a thread of its own; otherwise `poll`, `wait` and `flush` drive it, on the
                caller's.
            read_only: follow the process that writes the partition; `directory` and `more` are from
                `StoreDirectory.view`, and `ssd_nbytes`, `segment_nbytes` and `daily_write_nbytes` mean nothing.
            make_policy: makes the order of eviction of a tier; None: of DRAM least recently used first, of the SSD the
                oldest.
            recorder: is told what the store does, and closed with it.
            daily_write_nbytes: what may be written to all drives together in a day; None: as much as comes.
        """
        self._clock = clock
        drives = [*([] if directory is None else [(directory, engine)]), *more]
        self._engine = engine
        self._drives = drives
        self._closed = False
        self._closer: int | None = None  # thread that is closing the store
        self._rest = threading.Event()  # set when nobody is closing it (any more)
        self._fine = False
        self._pid = os.getpid()
        if read_only:
            mover = follow(
                drives, engine, clock, dram_nbytes=dram_nbytes, busy_after_s=busy_after_s, make_policy=make_policy
            )
        else:
            mover = lead(
                drives,
                engine,
                clock,
                dram_nbytes=dram_nbytes,
                ssd_nbytes=ssd_nbytes,
                segment_nbytes=segment_nbytes,
                writes=writes,
                busy_after_s=busy_after_s,
                make_policy=make_policy,
                daily_write_nbytes=daily_write_nbytes,
            )
        self._core = mover.core
        self._mover = mover
        self._recorder = mover.recorder = recorder
        if recorder is not None:
            table = mover.core.ledger.table
            table.on_enter, table.on_leave = recorder.entered, recorder.left
        mover.pump()
        self._driver = Driver(mover)
        if background:
            self._driver.start("kvterrace-mover")

    # -- looking -------------------------------------------------------------------------------------------------------

    def match(self, chain: KeyChain) -> Match:
        """The longest prefix of `chain` that the ladder holds, and where. No side effects; does not block on I/O."""
        require_chain(chain)
        with self._entered():
            ids = self._core.ledger.find(chain)
            return Match(chain, tuple(self._core.ledger.resident(ids)))

    def take_departed(self) -> bytes:
        """Keys, 32 bytes each, of blocks that have left the ladder since the last call, whatever made them; the first
        call begins it. Some may be there again by now. Does not block on I/O. For one caller: what it was told is
        forgotten.
        """
        with self._entered():
            return self._core.ledger.table.take_departed()

    def stats(self) -> StoreStats:
        """Counts and sizes at this moment; a copy. Works on a closed store."""
        self._require_own_process()
        with self._driver.lock:
            return self._core.snapshot()

    # -- moving --------------------------------------------------------------------------------------------------------

    def get(
        self,
        chain: KeyChain,
        out: Any,
        *,
        start: int = 0,
        stop: int | None = None,
        layers: range | None = None,
        sequence: bytes = b"",
        deadline_s: float | None = None,
    ) -> Transfer:
        """Read blocks `start..stop` of `chain` into `out`. Returns at once.

        Args:
            out: the caller's memory for these blocks, in one of the forms of `kvterrace.buffers`; writable; lent
                until the transfer is done. With a deadline, or in memory that does not lie in whole pages of 4 KiB,
                only blocks that end in `Hit` are written. Otherwise a drive may read straight into it: then what
                belongs to a block that ends in anything else may hold anything.
            stop: None: to the end of the chain.
            layers: only these layers (`range` of step 1); `out` then holds just their parts. Such a read does not
                promote.
            sequence: as for `put`: who asks. Only a trace makes use of it.
            deadline_s: seconds from now; blocks that are not there by then end in `Expired`, their memory untouched.
                Without one, a read is given up likewise when no block of it has come for 30 s; but what a drive reads
                straight into `out` stays `Pending`, and `out` lent, until the drive has answered.

        Raises:
            LayoutError: `out` does not fit. StoreClosedError. IndexError: no such blocks. ConfigError: an argument of
                the wrong kind, a `sequence` that is too long, or a `deadline_s` that is negative.
        """
        start, stop = require_span(require_chain(chain), start, stop)
        sequence = require_sequence(sequence)
        buffers = BlockBuffers(chain.namespace.layout, out, stop - start, layers=layers).require_writable()
        return self._submit(
            TransferKind.GET, chain, start, stop, buffers, deadline_s=deadline_s, layers=layers, sequence=sequence
        )

    def put(
        self,
        chain: KeyChain,
        blocks: Any,
        *,
        start: int = 0,
        stop: int | None = None,
        sequence: bytes = b"",
        deadline_s: float | None = None,
    ) -> Transfer:
        """Store blocks `start..stop` of `chain` from `blocks`. Returns at once; copies into DRAM, to the SSD later.

        Args:
            blocks: as `out` of `get`; lent until the transfer is done.
            sequence: at most 16 bytes that name the conversation or document; its blocks are laid together on the SSD.
            deadline_s: seconds that a block may wait for room; None: `busy_after_s`.

        Raises:
            LayoutError, StoreClosedError, IndexError: as for `get`. ConfigError: `sequence` is too long, a key of
                `chain` comes twice, or `deadline_s` is as there.
        """
        start, stop = require_span(require_chain(chain), start, stop)
        sequence = require_sequence(sequence)
        chain.require_distinct()
        buffers = BlockBuffers(chain.namespace.layout, blocks, stop - start)
        return self._submit(TransferKind.PUT, chain, start, stop, buffers, deadline_s=deadline_s, sequence=sequence)

    def prefetch(self, chain: KeyChain, *, start: int = 0, stop: int | None = None) -> Transfer:
        """Bring blocks into DRAM, after all demand reads; what finds no room at once ends in `Busy`. Returns at once.

        A block that was prefetched gives way to no other prefetch until a `get` has used it, or 10 s have passed; to
        gets and puts, after everything else that has a copy on the SSD.
        """
        start, stop = require_span(require_chain(chain), start, stop)
        return self._submit(TransferKind.PREFETCH, chain, start, stop, None)

    def wait(self, transfer: Transfer, timeout_s: float | None = None) -> list[GetOutcome | PutOutcome]:
        """Block until `transfer` is done, or for `timeout_s`; returns its outcomes, `Pending` for blocks still under
        way.

        Raises:
            StoreClosedError: this process was forked from the one that opened the store.
        """
        require_transfer(transfer)
        timeout_s = _limit(timeout_s)
        self._require_own_process()
        self._driver.wait_for(lambda: transfer.done, timeout_s, urgent=True)
        with self._driver.lock:
            if transfer in self._mover.finished:
                self._mover.finished.remove(transfer)
        return transfer.outcomes

    def poll(self) -> list[Transfer]:
        """Transfers that are done and were not yet handed out by `poll` or `wait`. Does not block."""
        self._require_own_process()
        self._driver.turn()
        with self._driver.lock:
            finished = list(self._mover.finished)
            self._mover.finished.clear()
            return finished

    # -- keeping and letting go ----------------------------------------------------------------------------------------

    def pin(self, chain: KeyChain) -> Pin:
        """Hold the resident prefix of `chain` (active KV): what it holds stays on the ladder until released."""
        require_chain(chain)
        with self._entered():
            ledger = self._core.ledger
            ids = ledger.find(chain)
            ids = ids[: len(ledger.resident(ids))]
            ledger.pin(ids)
            return Pin(ids, self._unpin)

    def _unpin(self, ids: Ids) -> None:
        if os.getpid() != self._pid:
            return  # the pin is the parent's
        with self._driver.lock:
            self._core.ledger.unpin(ids)

    def touch(self, chain: KeyChain, *, scores: np.ndarray | None = None) -> None:
        """Say that the resident prefix of `chain` was used now.

        Args:
            scores: attention that each block of the chain received since the last touch, shape `(len(chain),)`, or
                `(groups, len(chain))` for up to 16 groups of layers; not negative. It is added to the block's decayed
                cumulative score. Cold blocks leave DRAM first, well-attended runs later; the SSD keeps both.
        """
        require_chain(chain)
        if scores is not None:
            scores = require_scores(scores, chain)
        with self._entered():
            now_s = self._clock.monotonic_s()
            self._core.ledger.touch(chain, len(chain), now_s)
            if scores is not None:
                self._core.ledger.add_scores(chain, scores, now_s)
            if self._recorder is not None:
                self._recorder.touched(chain, scores, now_s)

    def hint(self, sequence: bytes, kind: Hint, *, seconds: float | None = None) -> None:
        """Say what is known of a sequence's future. Does not block; a wrong hint costs little, and none is needed.

        Args:
            sequence: as given to `put`; it need not be known yet.
            kind: CLOSED and ONE_OFF: it goes first, and what of it is not on the SSD is not written any more. RETURNS,
                SHARED and PRIORITY: it goes after all else. The newest hint for a sequence counts. With the extension
                module, DRAM's policy weighs that against what it has learned, also of how often hints come true.
            seconds: for RETURNS, in how many it comes back: it is kept for twice as long, 10 s to 10 min. Else, for how
                long the hint holds; None: an hour.

        Raises:
            ConfigError: no name, no `Hint`, or RETURNS without `seconds`.
        """
        sequence, kind, seconds = require_hint(sequence, kind, seconds)
        with self._entered():
            now_s = self._clock.monotonic_s()
            self._core.ledger.hint(sequence, kind, seconds, now_s)
            if self._recorder is not None:
                self._recorder.hinted(sequence, kind, seconds, now_s)

    def invalidate(self, chain: KeyChain, *, start: int = 0) -> None:
        """Give up blocks of `chain` from `start` on and everything stored behind them, in every tier, also after a
        restart.

        It survives a crash once a `flush` that began after it has returned True; before that, a crash may bring the
        blocks back. It reaches blocks on the SSD that the index does not know, too, on any branch: a restart counts
        nothing as live that hangs on what was invalidated later than it was put. What it does not survive is damage to
        its own record on the drive.

        What is being read at this moment is given up when that has ended; it is no longer found from now on. In a store
        that is read only, all this holds for this process alone, and until the block is written anew.
        """
        start, _ = require_span(require_chain(chain), start, None)
        with self._entered():
            self._mover.invalidate(chain, start)
            if self._recorder is not None:
                self._recorder.invalidated(chain, start, self._clock.monotonic_s())

    # -- ending --------------------------------------------------------------------------------------------------------

    def flush(self, timeout_s: float | None = None) -> bool:
        """Write every block that has no copy on the SSD, and make what was written durable. Blocks.

        Returns whether all of it was written; False after `timeout_s`, or while the drive takes no writes. Of several
        drives: while none does, or one does not that must learn of an invalidation. A block that has gone wrong on
        every drive too often is not written any more, and is not waited for; nor is what is not worth a write: of a
        sequence that is over (see `hint`), or while the day's writes are short (`stats().ssd_refused_blocks`). A store
        that is read only owes nothing: True once the puts under way have ended.
        """
        timeout_s = _limit(timeout_s)
        with self._entered():
            pass
        return ending.flush(self._mover, self._driver, timeout_s)

    def close(self, timeout_s: float = 30.0) -> bool:
        """End transfers, write what is only in DRAM, make it durable, and give the partition back. Blocks for at most
        about `timeout_s`.

        Returns whether all was written and ended; False means that recent blocks were lost (never that wrong ones
        stay), or that a device hangs, in which case the memory it may still write to is leaked rather than freed, and
        the partition stays locked; closing once more gives it back if the device has answered by then. Else closing
        twice does nothing; while another thread closes the store, it waits for that. In a forked process it does
        nothing.
        """
        timeout_s = require_limit(timeout_s, "timeout_s")
        if os.getpid() != self._pid:
            return False
        me = threading.get_ident()
        with self._driver.lock:
            first, self._closed = not self._closed, True
            if first:
                self._closer = me
        if not first:
            if self._closer != me:
                self._rest.wait(timeout_s)
            if self._rest.is_set():
                for engine in self._core.engines:
                    engine.poll(0.0)  # results that came too late for anybody
                self._give_back([engine for engine in self._core.engines if not engine.in_flight])
            return self._fine
        try:
            self._fine, resting = ending.settle(self._mover, self._driver, timeout_s)
            self._give_back(resting)
            closed(self)
        finally:
            if self._recorder is not None:
                self._recorder.close()
            self._rest.set()
        return self._fine

    def _give_back(self, resting: list[IoEngine]) -> None:
        """Unlock what nothing can reach any more; a write that hangs could still land, so its drive stays locked."""
        for directory, engine in self._drives:
            if any(one is engine for one in resting):
                directory.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    # -- driving -------------------------------------------------------------------------------------------------------

    def _submit(
        self,
        kind: TransferKind,
        chain: KeyChain,
        start: int,
        stop: int,
        buffers: BlockBuffers | None,
        *,
        deadline_s: float | None = None,
        layers: range | None = None,
        sequence: bytes = b"",
    ) -> Transfer:
        if deadline_s is not None:
            deadline_s = require_seconds(deadline_s, "deadline_s")
        with self._entered():
            now_s = self._clock.monotonic_s()
            self._core.namespace_number(chain.namespace)
            self._describe(chain.namespace)
            transfer = Transfer(
                kind,
                chain,
                start,
                stop,
                buffers=buffers,
                submitted_s=now_s,
                deadline_s=None if deadline_s is None else now_s + deadline_s,
                layers=layers,
                sequence=sequence,
            )
            self._mover.submit(transfer)
            if len(self._mover.finished) > _FINISHED_KEPT:
                del self._mover.finished[0]
        if deadline_s is not None:
            self._driver.wake()  # the driver may be asleep for longer than this deadline
        return transfer

    def _describe(self, namespace: Namespace) -> None:
        """Have one of each engine's threads write down what a namespace stands for: it waits for the drive."""
        for directory, engine in self._drives:
            if directory.claim_description(namespace):
                describe = partial(_describe, directory, namespace)
                engine.submit([IoRequest(IoKind.CALL, IoClass.DEMOTION, finish=describe)])

    def _require_own_process(self) -> None:
        # Before any lock: in a forked process, its holder may be a thread that is not there.
        if os.getpid() != self._pid:
            raise StoreClosedError(
                f"the store was opened by process {self._pid}, and this one was forked from it; open the store after "
                "the fork"
            )

    @contextlib.contextmanager
    def _entered(self) -> Iterator[None]:
        self._require_own_process()
        with self._driver.lock:
            if self._closed:
                raise StoreClosedError("the store is closed; open it again")
            if self._mover.fault is not None:
                raise KVTerraceError(f"the store has failed and must be opened again: {self._mover.fault}")
            yield


def _describe(directory: StoreDirectory, namespace: Namespace, _: IoResult) -> None:
    directory.describe(namespace)


def _limit(timeout_s: float | None) -> float | None:
    return None if timeout_s is None else require_limit(timeout_s, "timeout_s")
