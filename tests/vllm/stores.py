"""Stores that stand between a worker and its own: they hold transfers back, or say that blocks did not arrive."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kvterrace.types import Corrupt, Miss, Pending


class Held:
    """A read that ends when it is let go; it has moved nothing before that."""

    def __init__(self, begin: Callable[[], Any], blocks: int) -> None:
        self._begin, self._blocks = begin, blocks
        self._inner: Any = None
        self.given_up = False

    def let_go(self) -> None:
        self._inner = self._begin()

    def give_up(self, outcome: Any) -> None:
        self.given_up = True

    @property
    def done(self) -> bool:
        return self._inner is not None and self._inner.done

    @property
    def outcomes(self) -> list[Any]:
        return [Pending()] * self._blocks if self._inner is None else self._inner.outcomes


class Between:
    """Passes everything on, but:

    `holding`: reads wait in `held`. `stuck`: puts do not end before they are let go. `spoil`: given (start, stop) of a
    read, {block: outcome} for blocks that fail; their rows are filled with rubbish, and what ends in Miss or Corrupt
    leaves the store. `refuse`: (what is asked) raises what it returns. `put_outcome`: given (start, stop) of a put, how
    all its blocks end without being taken, if not None.
    """

    def __init__(self, store: Any) -> None:
        self.store = store
        self.holding = self.stuck = False
        self.held: list[Held] = []
        self.spoil: Callable[[int, int], dict[int, Any]] = lambda start, stop: {}
        self.put_outcome: Callable[[int, int], Any] = lambda start, stop: None
        self.refuse: Callable[[str], Exception | None] = lambda what: None
        self.asked: list[str] = []
        self.puts: list[Any] = []

    def _note(self, what: str) -> None:
        self.asked.append(what)
        error = self.refuse(what)
        if error is not None:
            raise error

    def match(self, chain: Any) -> Any:
        self._note("match")
        return self.store.match(chain)

    def get(self, chain: Any, out: Any, *, start: int, stop: int, deadline_s: float | None) -> Any:
        self._note("get")

        def begin() -> Any:
            transfer = self.store.get(chain, out, start=start, stop=stop, deadline_s=deadline_s)
            bad = self.spoil(start, stop)
            if bad:
                self.store.wait(transfer, 30.0)
                for block in bad:
                    for part in out.parts:
                        part[out.rows[block - start]] = np.uint8(0xA5)
                gone = [block for block, outcome in bad.items() if isinstance(outcome, Miss | Corrupt)]
                if gone:
                    self.store.invalidate(chain, start=min(gone))
                outcomes = transfer.outcomes
                for block, outcome in bad.items():
                    outcomes[block - start] = outcome
                return Ended(outcomes)
            return transfer

        if not self.holding:
            return begin()
        held = Held(begin, stop - start)
        self.held.append(held)
        return held

    def put(self, chain: Any, blocks: Any, *, start: int, stop: int, sequence: bytes, deadline_s: float | None) -> Any:
        self._note("put")

        def begin() -> Any:
            return self.store.put(chain, blocks, start=start, stop=stop, sequence=sequence, deadline_s=deadline_s)

        if self.stuck:
            self.puts.append(Held(begin, stop - start))
            return self.puts[-1]
        outcome = self.put_outcome(start, stop)
        if outcome is not None:
            return Ended([outcome] * (stop - start))

        self.puts.append(Dawdling(begin, stop - start))
        return self.puts[-1]

    def wait(self, transfer: Any, timeout_s: float | None = None) -> list[Any]:
        if isinstance(transfer, Ended):
            return transfer.outcomes
        if isinstance(transfer, Dawdling):
            transfer.waited()
        if isinstance(transfer, Held):
            return self.wait(transfer._inner, timeout_s) if transfer._inner is not None else transfer.outcomes
        outcomes: list[Any] = self.store.wait(transfer, timeout_s)
        return outcomes

    def invalidate(self, chain: Any, *, start: int = 0) -> None:
        self._note("invalidate")
        self.store.invalidate(chain, start=start)

    def stats(self) -> Any:
        return self.store.stats()

    def take_departed(self) -> bytes:
        found: bytes = self.store.take_departed()
        return found

    def close(self, timeout_s: float = 30.0) -> bool:
        closed: bool = self.store.close(timeout_s)
        return closed

    def let_go(self) -> None:
        self.holding = False
        for held in self.held:
            held.let_go()
        self.held.clear()


class Dawdling(Held):
    """A put that reads the caller's memory only when it was waited for twice."""

    def __init__(self, begin: Callable[[], Any], blocks: int) -> None:
        super().__init__(begin, blocks)
        self._waits = 0

    def waited(self) -> None:
        self._waits += 1
        if self._waits == 2:
            self.let_go()


class Ended:
    """A transfer that is over."""

    def __init__(self, outcomes: list[Any]) -> None:
        self.outcomes, self.done = outcomes, True


def between(engine: Any, rank: int = 0) -> Between:
    """Put one between the worker of `engine` and its store."""
    side = engine.workers[rank]._worker
    made = side._store = side._saver._store = Between(side._store)
    return made
