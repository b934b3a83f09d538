"""The same calls, on the same drive with the same faults, with the native passes and without: the same outcomes, bytes
in the callers' memory, counts and requests.
"""

from __future__ import annotations

import errno
import re
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from tests.harness import LARGE, SMALL, Box, Get, chain_of

from kvterrace.engine.transfers import Transfer
from kvterrace.format import passes
from kvterrace.io.base import IoKind
from kvterrace.io.faults import Fail, FlipBit, PretendDone, Short, Slow
from kvterrace.keys import KeyChain

pytest.importorskip("kvterrace._native", reason="the native module is not built")
if passes.native() is None:
    pytest.skip("the native passes are switched off", allow_module_level=True)

_PATHS = [[0] * 10, [0, 0, 0, 1, 1, 1], [1, 1, 1, 1]]
_CHAINS = [chain_of(SMALL, path) for path in _PATHS] + [chain_of(LARGE, path[:4]) for path in _PATHS]

chains = st.integers(0, len(_CHAINS) - 1)
faults = st.one_of(
    st.just(Fail(errno.EIO)),
    st.just(PretendDone()),
    st.builds(FlipBit, st.integers(0, 40_000), st.integers(0, 7)),
    st.builds(Short, st.integers(0, 8).map(lambda pages: pages * 4096)),
    st.builds(Slow, st.sampled_from([0.001, 1.0])),
)
harmed = st.tuples(
    st.just("harmed"),
    chains,
    st.sampled_from([0, 0, 9]),
    faults,
    st.integers(1, 2),
    st.sampled_from([None, range(1), range(1, 2)]),
)
calls = st.one_of(
    st.tuples(st.just("put"), chains, st.sampled_from([None, 0.0, 20.0])),
    st.tuples(
        st.just("get"),
        chains,
        st.integers(0, 9),
        st.sampled_from([None, None, range(1), range(1, 2), range(2)]),
        st.sampled_from([None, None, 0.0, 0.0002]),
        st.booleans(),
    ),
    st.tuples(st.just("prefetch"), chains),
    st.tuples(st.just("invalidate"), chains, st.integers(0, 3)),
    st.tuples(st.just("cool")),
    harmed,
    harmed,
    st.tuples(st.just("reopen")),
    st.tuples(st.just("step"), st.sampled_from([0.0, 0.0001, 0.1, 3.0])),
    st.tuples(st.just("fault"), faults, st.sampled_from([IoKind.READ, IoKind.READ, IoKind.WRITE]), st.integers(1, 3)),
)


class Run:
    """The calls, and what became of them."""

    def __init__(self, root: Path, given_calls: list[tuple[Any, ...]]) -> None:
        self.box = Box(root, dram_blocks=9, segments=8)
        self.transfers: list[Transfer] = []
        self.gets: list[Get] = []
        self.told: list[Any] = []
        for name, *values in given_calls:
            getattr(self, name)(*values)
            self.told.append(repr(self.box.store.stats()))
        self.box.faults.clear()
        for transfer in self.transfers:
            self.box.wait(transfer)
        self.told.append([transfer.outcomes for transfer in self.transfers])
        self.memory = [get.out.tobytes() for get in self.gets]
        for get in self.gets:
            get.check()
        self.box.rest()
        self.box.check()
        self.box.store.close(100.0)

    @property
    def story(self) -> str:
        """All of it but what is new with each store: names, nonces, and so the CRC of an old record in a slot that a
        read left as it was.
        """
        text = repr((self.told, self.box.asked))
        return re.sub(r"[0-9a-f]{32}|partitions/p\d+|(?<=CRC is )[0-9a-f]{8}", "...", text)

    def put(self, number: int, deadline_s: float | None) -> None:
        self.transfers.append(self.box.put(_CHAINS[number], deadline_s=deadline_s))

    def get(self, number: int, start: int, layers: range | None, deadline_s: float | None, wait: bool) -> None:
        chain: KeyChain = _CHAINS[number]
        self.gets.append(Get(self.box.store, chain, min(start, len(chain) - 1), layers=layers, deadline_s=deadline_s))
        self.transfers.append(self.gets[-1].transfer)
        if wait:
            self.box.wait(self.gets[-1].transfer)

    def prefetch(self, number: int) -> None:
        self.transfers.append(self.box.store.prefetch(_CHAINS[number]))

    def invalidate(self, number: int, start: int) -> None:
        self.box.store.invalidate(_CHAINS[number], start=start)

    def cool(self) -> None:
        self.box.store.flush(10.0)
        self.box.store._core.ledger.evict_idle()

    def harmed(self, number: int, start: int, effect: Any, nth: int, layers: range | None) -> None:
        """Read from the drive what is there, and meet a fault."""
        self.put(number, None)
        self.box.wait(self.transfers[-1])
        self.cool()
        self.box.faults.add(effect, IoKind.READ, nth=nth)
        self.get(number, start, layers, None, True)

    def reopen(self) -> None:
        for transfer in self.transfers:
            self.box.wait(transfer)
        self.told.append([transfer.outcomes for transfer in self.transfers])
        self.box.reopen()

    def step(self, seconds: float) -> None:
        self.box.step(seconds)

    def fault(self, effect: Any, kind: IoKind, nth: int) -> None:
        self.box.faults.add(effect, kind, nth=nth)


BEGINNING = [("put", 0, None), ("put", 3, None), ("cool",)]


@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(calls, min_size=3, max_size=25).map(lambda more: [*BEGINNING, *more]))
def test_the_same_becomes_of_the_same_calls(given_calls: list[tuple[Any, ...]]) -> None:
    assert passes.native() is not None
    with tempfile.TemporaryDirectory(prefix="kvterrace-agree-") as folder:
        native = Run(Path(folder) / "native", given_calls)
        with mock.patch.object(passes, "native", return_value=None):
            python = Run(Path(folder) / "python", given_calls)
    for kind in ("Hit", "Corrupt", "Stale", "DeviceFailed", "Expired"):
        if f"{kind}(" in native.story:
            event(f"a block ended in {kind}")
    assert native.story.replace("/native/", "/x/") == python.story.replace("/python/", "/x/")
    assert native.memory == python.memory
