"""Reads of some layers of a block: its header and the parts wanted, into staging, past the slots."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from kvterrace.buffers import Bytes
from kvterrace.engine.core import Core
from kvterrace.engine.landing import Landing, Want, is_lost, not_read, read_ended, verifying
from kvterrace.engine.outbox import Outbox
from kvterrace.engine.record_reads import stopped
from kvterrace.format.record import PAGE_NBYTES
from kvterrace.io.base import IoClass, IoKind, IoRequest, IoResult
from kvterrace.types import Expired, GetOutcome

__all__ = ["LayerReads"]


class _NewLanding(Protocol):
    def __call__(self, want: Want, memory: Bytes, parts: range | None = None) -> Landing: ...


class LayerReads:
    """Called under the store's lock, except for what runs on the engine's threads."""

    def __init__(
        self,
        core: Core,
        *,
        landing: _NewLanding,
        discard: Callable[[Landing, GetOutcome], None],
        answer: Callable[[Want, GetOutcome], None],
    ) -> None:
        """
        Args:
            landing: makes the landing of a want.
            discard: gives up the copy that a landing was to bring, and says so.
            answer: ends a want.
        """
        self._core = core
        self._landing = landing
        self._discard = discard
        self._answer = answer

    def start(self, want: Want, outbox: Outbox) -> bool:
        """Read the header and the parts of the wanted layers into staging; False if there is no room for it now."""
        core, ledger = self._core, self._core.ledger
        entry, layers = core.entry_of(want.block), want.transfer.layers
        assert layers is not None and entry.namespace is not None
        layout = entry.namespace.layout
        parts = range(layers.start * layout.parts_per_layer, layers.stop * layout.parts_per_layer)
        header_nbytes = entry.geometry.header_nbytes
        first = int(entry.parts["offset"][parts.start]) // PAGE_NBYTES * PAGE_NBYTES
        last = int(entry.parts["offset"][parts.stop - 1]) + int(entry.parts["nbytes"][parts.stop - 1])
        span = -(-(last - first) // PAGE_NBYTES) * PAGE_NBYTES
        staging = ledger.reserve_extent(header_nbytes + span)
        if staging is None:
            return False
        memory = core.arena.view(staging, header_nbytes + span)
        landing = self._landing(want, memory, parts)
        volume, gate = landing.volume, landing.volume.gate
        results: list[IoResult] = []

        def on_result(result: IoResult) -> None:
            if result.lent:
                return
            landing.segment.readers -= 1
            if result.request.kind is IoKind.READ:
                gate.ended(result)
            core.stats.ssd_read_nbytes += result.nbytes
            results.append(result)
            if len(results) < 2:
                return
            failed = [result for result in results if not result.complete and not result.expired]
            if failed:
                for one in failed:
                    not_read(landing, one)
                    if is_lost(landing, one.error):
                        break
                end(one.error)
            elif any(result.expired for result in results):
                landing.outcome = Expired()
                end(None)
            elif any(result.request.kind is not IoKind.READ for result in results):
                landing.outcome = stopped(volume)
                end(None)
            else:
                call = IoRequest(IoKind.CALL, IoClass.DEMAND, finish=verifying(landing, first), tag=on_verified)
                core.engine.submit([call])

        def on_verified(result: IoResult) -> None:
            read_ended(landing, result)
            end(None)

        def end(error: OSError | None) -> None:
            ledger.dram.allocator.free(staging)
            outcome = landing.outcome
            assert outcome is not None, "a read ended without a verdict"
            if is_lost(landing, error):
                self._discard(landing, outcome)
            self._answer(want, landing.fault or outcome)

        file = volume.files.file(landing.segment.number)
        end_s = want.transfer.deadline_s
        left_s = None if end_s is None else max(0.0, end_s - core.clock.monotonic_s())
        for at, piece in (
            (landing.offset, memory[:header_nbytes]),
            (landing.offset + header_nbytes + first, memory[header_nbytes:]),
        ):
            core.stats.ssd_read_requests += 1
            landing.segment.readers += 1
            request = IoRequest(IoKind.READ, IoClass.DEMAND, file, at, [piece], tag=on_result, deadline_s=left_s)
            if gate.admit(request):
                outbox.add(volume.engine, request)
            else:
                outbox.add(core.engine, IoRequest(IoKind.CALL, IoClass.DEMAND, tag=on_result))  # the drive is not asked
        return True
