"""Clients: what an inference engine does with a store, in every mix, each byte and each outcome looked at."""

from __future__ import annotations

import random
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from tests.soak.memory import Lent
from tests.soak.truth import Conversation, Grave, chain_of, shape_of

from kvterrace import Expired, Hit, KeyChain, KVTerraceError, Pending, Rejected, Store, StoreClosedError, Tier
from kvterrace.engine.transfers import Transfer

if TYPE_CHECKING:
    from tests.soak.life import Life

#: Bounds of what does not wait for the drive, of a read without a deadline (the store gives up after 30 s without a
#: block), and of a put: it may wait for room, and then for the copy.
CALL_S = 5.0
READ_S = 40.0
PUT_S = 10.0
#: Memory that a read has left untouched is looked at again after this long, and when the store is closed.
_LATE_S = 3.0
_MOST_LATE = 8
#: A read may end this long after its deadline, and ten times as late as threads of this process are waked.
_LATE_READ_S = 3.0


@dataclass(eq=False)
class _Sent:
    """A read under way. `leaps`: of the clock, before it was sent."""

    transfer: Transfer
    lent: Lent
    at_s: float
    deadline_s: float | None
    leaps: int


@dataclass
class _Late:
    lent: Lent
    outcomes: list[Any]
    at_s: float


class Client(threading.Thread):
    """One of them. Ends when the life ends, or when the store is closed under it."""

    def __init__(self, life: Life, number: int, rng: random.Random) -> None:
        super().__init__(name=f"soak-client-{number}", daemon=True)
        self._life, self._rng = life, rng
        self._late: deque[_Late] = deque()
        self._open: list[_Sent] = []
        self.ops = 0

    def run(self) -> None:
        life, rng = self._life, self._rng
        while not life.ending.is_set():
            one = life.pool.take(rng)
            try:
                self._once(one)
            except StoreClosedError:
                if not life.closing.is_set():
                    life.verdict.fail("closed", "a client was told that the store is closed, and nobody has closed it")
                break
            except Exception as error:  # noqa: BLE001 - whatever it is, it is a finding
                kind = "store failed" if isinstance(error, KVTerraceError) else "exception"
                life.verdict.fail(kind, "".join(traceback.format_exception(error))[-1500:])
                break
            finally:
                life.pool.give_back(one)
            self.ops += 1
        self._leave()

    def _leave(self) -> None:
        """Wait for what is still open, also of a store that was closed: every outcome is counted by somebody."""
        for sent in self._open:
            self._finish_get(sent)
        self._open.clear()

    def check_late(self, now_s: float) -> None:
        """Look again at memory that was given back without a hit: nobody may write to it any more."""
        while self._late and (now_s - self._late[0].at_s >= _LATE_S or len(self._late) > _MOST_LATE):
            one = self._late.popleft()
            wrong = one.lent.wrong(one.outcomes)
            if wrong is not None:
                self._life.verdict.fail("late write", f"memory was touched after the transfer had ended: {wrong}")

    # One step of a conversation

    def _once(self, one: Conversation) -> None:
        rng, chain = self._rng, chain_of(one)
        self.check_late(time.monotonic())
        choice = rng.random()
        if choice < 0.70:
            self._turn(one, chain)
        elif choice < 0.78:
            self._get(chain, 0, len(chain))  # match or no match
        elif choice < 0.84:
            self._prefetch(chain, self._match(chain))
        elif choice < 0.90:
            self._layers(chain)
        elif choice < 0.92:
            self._hold_and_look(chain)
        elif choice < 0.95:
            self._give_up(one, chain)
        else:
            self._look_at_a_grave()

    def _turn(self, one: Conversation, chain: KeyChain) -> None:
        """Restore what is there, recompute the rest of the prompt, store it and a little more."""
        life, rng, store = self._life, self._rng, self._life.store
        there = self._match(chain)
        pin = None
        if rng.random() < 0.3:
            with self._op("pin", CALL_S):
                pin = store.pin(chain[:there])
        try:
            if rng.random() < 0.2:
                self._prefetch(chain, there, wait=rng.random() < 0.5)
            outcomes: list[Any] = []
            if there and rng.random() < 0.2:
                cut = rng.randint(0, there)
                first = self._send_get(chain, 0, cut)
                self._open.append(first)  # should the store be closed before the second is sent
                second = self._send_get(chain, cut, there)
                self._open.remove(first)
                outcomes = self._finish_get(first) + self._finish_get(second)
            elif there:
                outcomes = self._get(chain, 0, there)
            hits = next((at for at, outcome in enumerate(outcomes) if not isinstance(outcome, Hit)), there)
            prefix, _ = shape_of(one)
            stop = min(len(chain), max(there, prefix) + rng.randint(1, 6))
            self._put(chain, hits, stop, one)
            if rng.random() < 0.3:
                with self._op("touch", CALL_S):
                    store.touch(chain, scores=np.array([rng.random() for _ in range(len(chain))]))
        finally:
            if pin is not None:
                with self._op("release", CALL_S):
                    pin.release()
        life.seen.add("turns")

    def _match(self, chain: KeyChain) -> int:
        with self._op("match", CALL_S):
            return self._life.store.match(chain).blocks

    def _deadline(self) -> float | None:
        rng = self._rng
        return rng.choice([0.0, rng.uniform(0.001, 0.05), 0.5, 3.0]) if rng.random() < 0.3 else None

    def _get(self, chain: KeyChain, start: int, stop: int, layers: range | None = None) -> list[Any]:
        sent = self._send_get(chain, start, stop, layers)
        if sent.deadline_s is not None and self._rng.random() < 0.3:
            self._open.append(sent)  # looked at some time later, while other things go on
            if len(self._open) > 3:
                self._finish_get(self._open.pop(0))
            return []
        return self._finish_get(sent)

    def _send_get(self, chain: KeyChain, start: int, stop: int, layers: range | None = None) -> _Sent:
        lent = Lent(self._rng, chain, start, stop, layers)
        deadline_s = self._deadline()
        lent.unhurried = deadline_s is None
        sent_s, leaps = time.monotonic(), self._life.leaps
        with self._op("get", CALL_S):
            transfer = self._life.store.get(
                chain, lent.argument, start=start, stop=stop, layers=layers, deadline_s=deadline_s
            )
        return _Sent(transfer, lent, sent_s, deadline_s, leaps)

    def _finish_get(self, sent: _Sent) -> list[Any]:
        life, transfer, lent, deadline_s = self._life, sent.transfer, sent.lent, sent.deadline_s
        start_s = time.monotonic()
        with self._op("wait for a get", READ_S if deadline_s is None else deadline_s + CALL_S):
            outcomes = cast("list[Any]", life.store.wait(transfer))
        now_s = time.monotonic()
        taken_s, waited_s = now_s - sent.at_s, now_s - start_s
        if deadline_s is not None and waited_s > deadline_s + _LATE_READ_S + 10 * life.watchdog.lag_s:
            life.verdict.fail(
                "late", f"a read with a deadline of {deadline_s:.3f} s took {waited_s:.1f} s: {outcomes[:3]}"
            )
        if any(isinstance(one, Pending) for one in outcomes):
            life.verdict.fail("pending", f"waited without a limit, and blocks of {transfer!r} are pending")
            return []
        if deadline_s == 0.0 and Hit(Tier.SSD) in outcomes:
            life.verdict.fail("late", f"a read that had no time at all waited for the drive: {outcomes[:3]}")
        wrong = lent.wrong(outcomes)
        if wrong is not None:
            life.verdict.fail("wrong bytes", wrong)
        hits = sum(isinstance(one, Hit) for one in outcomes)
        life.seen.get(outcomes, hits * lent.width)
        if any(isinstance(one, Expired) for one in outcomes):
            limit_s = 30.0 if deadline_s is None else deadline_s
            if taken_s < limit_s - 0.01 and life.leaps == sent.leaps and not life.closing.is_set():
                life.verdict.fail("early", f"a read expired after {taken_s:.3f} s, its limit was {limit_s:.3f} s")
        if hits < len(outcomes):
            self._late.append(_Late(lent, outcomes, time.monotonic()))
        return outcomes

    def _put(self, chain: KeyChain, start: int, stop: int, one: Conversation) -> None:
        if start >= stop:
            return
        life, rng = self._life, self._rng
        lent = Lent(rng, chain, start, stop).fill()
        deadline_s = rng.choice([0.0, 0.05, 1.0]) if rng.random() < 0.2 else None
        with self._op("put", CALL_S):
            transfer = life.store.put(
                chain,
                lent.argument,
                start=start,
                stop=stop,
                sequence=f"{one.kind}/{one.slot}".encode(),
                deadline_s=deadline_s,
            )
        with self._op("wait for a put", PUT_S if deadline_s is None else deadline_s + CALL_S):
            outcomes = cast("list[Any]", life.store.wait(transfer))
        if any(isinstance(outcome, Pending) for outcome in outcomes):
            life.verdict.fail("pending", f"waited without a limit, and blocks of {transfer!r} are pending")
            return
        life.seen.put(outcomes, len(outcomes) * lent.width)
        for outcome in outcomes:
            if isinstance(outcome, Rejected) and "put it first" not in outcome.reason:
                life.verdict.fail("rejected", outcome.reason)
                break

    def _prefetch(self, chain: KeyChain, stop: int, *, wait: bool = True) -> None:
        with self._op("prefetch", CALL_S):
            transfer = self._life.store.prefetch(chain, stop=stop)
        self._life.seen.add("prefetches")
        if wait:
            with self._op("wait for a prefetch", READ_S):
                self._life.store.wait(transfer)

    def _layers(self, chain: KeyChain) -> None:
        there = self._match(chain)
        layers = chain.namespace.layout.layers
        start = self._rng.randrange(layers)
        if there:
            first = self._rng.randrange(there)
            self._get(chain, first, there, range(start, self._rng.randint(start + 1, layers)))
            self._life.seen.add("layered")

    def _hold_and_look(self, chain: KeyChain) -> None:
        """What is pinned stays on the ladder, unless it is invalidated, or a fault has taken its copy."""
        life, store = self._life, self._life.store
        before = life.disturbances()
        with self._op("pin", CALL_S):
            pin = store.pin(chain)
        self._turns_of_others()
        there = self._match(chain)
        if there < pin.blocks and life.disturbances() == before:
            life.verdict.fail("pin", f"{pin.blocks} blocks were pinned, {there} are there")
        with self._op("release", CALL_S):
            pin.release()
        life.seen.add("pins")

    def _turns_of_others(self) -> None:
        for _ in range(self._rng.randint(1, 4)):
            one = self._life.pool.take(self._rng)
            try:
                self._turn(one, chain_of(one))
            finally:
                self._life.pool.give_back(one)

    # Giving up

    def _give_up(self, one: Conversation, chain: KeyChain) -> None:
        """Invalidate; from then on no block of its own is ever put again."""
        life, rng, store = self._life, self._rng, self._life.store
        prefix, length = shape_of(one)
        self._leave()  # no read of it is left open
        with self._op("pin", CALL_S):
            pin = store.pin(chain)  # so that what is known now is known when it is invalidated
        known = pin.blocks
        start = rng.choice([0, prefix, prefix, rng.randint(prefix, length - 1)])
        if rng.random() < 0.8:
            life.disturb()
            with self._op("invalidate", CALL_S):
                store.invalidate(chain, start=start)
            pin.release()
        else:
            pin.release()
            life.disturb()
            with self._op("invalidate", CALL_S):
                store.invalidate(chain, start=start)
            known = start  # reclaim may have dropped some in between, and left them without a tombstone
        life.pool.retire(one)
        grave = Grave(one, max(start, prefix), known)
        self._no_hit(chain, grave)
        if grave.known > grave.start:
            life.dig(grave)
        life.seen.add("invalidations")

    def _look_at_a_grave(self) -> None:
        grave = self._life.graves.sample(self._rng)
        if grave is not None:
            self._no_hit(chain_of(grave.one), grave)

    def _no_hit(self, chain: KeyChain, grave: Grave) -> None:
        life = self._life
        there = self._match(chain)
        if there > grave.start:
            life.verdict.fail("undead", f"{there} blocks of {grave} match; durable: {grave.durable}")
        outcomes = self._finish_get(self._send_get(chain, grave.start, len(chain)))
        if any(isinstance(outcome, Hit) for outcome in outcomes):
            life.verdict.fail("undead", f"{grave} was invalidated, and read: {outcomes}")
        life.seen.add("graves visited")

    def _op(self, what: str, bound_s: float) -> Any:
        return self._life.watchdog.op(what, bound_s)


class Keeper(threading.Thread):
    """Flushes, asks for counts, takes in finished transfers, and audits the books, every second or so."""

    def __init__(self, life: Life, rng: random.Random, audit: Callable[[Store], None]) -> None:
        super().__init__(name="soak-keeper", daemon=True)
        self._life, self._rng, self._audit = life, rng, audit

    def run(self) -> None:
        life = self._life
        while not life.ending.wait(self._rng.uniform(0.3, 1.5)):
            try:
                self._once()
            except StoreClosedError:
                return
            except Exception as error:  # noqa: BLE001 - whatever it is, it is a finding
                kind = "books" if isinstance(error, AssertionError) else "exception"
                life.verdict.fail(kind, "".join(traceback.format_exception(error))[-1500:])
                return

    def _once(self) -> None:
        life, store = self._life, self._life.store
        choice = self._rng.random()
        if choice < 0.5:
            life.flush(self._rng.choice([0.5, 5.0, 15.0]))
        elif choice < 0.8:
            with life.watchdog.op("stats", CALL_S):
                stats = store.stats()
            if stats.ssd_file_nbytes > stats.ssd_nbytes or stats.dram_used_nbytes > stats.dram_nbytes:
                life.verdict.fail("cap", f"the store says that it takes more than it may: {stats}")
            store.poll()
        else:
            with life.watchdog.op("audit", CALL_S):
                self._audit(store)
