"""A writer and two readers on one drive against a dict: any order of calls, looks, restarts and deaths.

Every byte that a read brings is compared with what its key stands for, the books of each store are counted after each
step, and what a reader that has looked knows is compared with what the bytes on the drive say.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from tests.harness import Get, contents
from tests.property.paths import ALL, named, names
from tests.shared import Library, below, prefix

from kvterrace.handles import Pin
from kvterrace.types import Busy, Expired, Hit, Miss, Present, Rejected, Stored

_ROOT = Path(tempfile.mkdtemp(prefix="kvterrace-readers-"))


@pytest.fixture(scope="module", autouse=True)
def _tidy() -> Any:
    yield
    shutil.rmtree(_ROOT, ignore_errors=True)


class ReadersMachine(RuleBasedStateMachine):
    drives = 1

    @initialize(
        dram_blocks=st.integers(4, 12),
        segments=st.integers(4, 8),
        batch_blocks=st.sampled_from([1, 3, 1024]),
        after_s=st.sampled_from([0.0, 2.0]),
    )
    def open(self, dram_blocks: int, segments: int, batch_blocks: int, after_s: float) -> None:
        self.library = Library(
            _ROOT / f"store{self.drives}",
            drives=self.drives,
            dram_blocks=dram_blocks,
            segments=segments,
            batch_nbytes=batch_blocks * 8192,
            after_s=after_s,
        )
        self.box = self.library.box
        self.readers = [self.library.open_reader(dram_blocks=blocks) for blocks in (4, 12)]
        self.gets: list[tuple[int, Get]] = []
        self.pins: list[tuple[int, Pin]] = []
        self.own: list[bool] = [False, False]  # whether this reader has given something up by itself

    # -- the writer --------------------------------------------------------------------------------------------------

    @rule(name=names())
    def put(self, name: str) -> None:
        chain = named(name)
        outcomes = self.box.put_now(chain)
        assert all(isinstance(one, Stored | Present | Busy | Rejected) for one in outcomes), outcomes

    @rule()
    def flush(self) -> None:
        self.box.store.flush(50.0)

    @rule(name=names(), data=st.data())
    def invalidate(self, name: str, data: st.DataObject) -> None:
        chain = named(name)
        self.box.store.invalidate(chain, start=data.draw(st.integers(0, len(chain) - 1)))

    @rule(seconds=st.sampled_from([0.0, 0.0001, 0.1, 3.0]))
    def step(self, seconds: float) -> None:
        self.box.step(seconds)

    @rule(kill=st.booleans())
    def restart(self, kill: bool) -> None:
        self.library.restart_writer(kill=kill)

    # -- the readers -------------------------------------------------------------------------------------------------

    @rule(which=st.integers(0, 1), name=names(), wait=st.booleans(), data=st.data())
    def get(self, which: int, name: str, wait: bool, data: st.DataObject) -> None:
        chain = named(name)
        start = data.draw(st.integers(0, len(chain) - 1))
        layers = data.draw(st.sampled_from([None, None, range(1, 2)]))
        self.gets.append((which, Get(self.readers[which], chain, start, layers=layers)))
        if wait:
            self.end_gets()

    @rule(which=st.integers(0, 1))
    def poll(self, which: int) -> None:
        self.readers[which].poll()

    @rule()
    def end_gets(self) -> None:
        for which, get in self.gets:
            for _ in range(2000):
                if get.transfer.done:
                    break
                self.readers[which].wait(get.transfer, 0.01)
            get.check()
            for outcome in get.transfer.outcomes:
                assert isinstance(outcome, Hit | Miss | Busy | Expired), outcome
        self.gets.clear()

    @rule(which=st.integers(0, 1), name=names())
    def pin(self, which: int, name: str) -> None:
        chain = named(name)
        self.pins.append((which, self.readers[which].pin(chain)))

    @precondition(lambda self: self.pins)
    @rule()
    def release(self) -> None:
        self.pins.pop(0)[1].release()

    @rule(which=st.integers(0, 1), name=names())
    def own_put(self, which: int, name: str) -> None:
        chain = named(name)
        before = {path: content.changes for medium in self.library.media for path, content in medium.names.items()}
        blocks = contents(chain)
        transfer = self.readers[which].put(chain, blocks)
        assert self.readers[which].flush(50.0)
        assert transfer.done, "a flush does not wait for the puts under way"
        self.readers[which].wait(transfer, 0.0)
        after = {path: content.changes for medium in self.library.media for path, content in medium.names.items()}
        assert after == before, "a reader's put has reached the drive"

    @rule(which=st.integers(0, 1), name=names(), data=st.data())
    def own_invalidate(self, which: int, name: str, data: st.DataObject) -> None:
        chain = named(name)
        start = data.draw(st.integers(0, len(chain) - 1))
        self.readers[which].invalidate(chain, start=start)
        assert self.readers[which].match(chain).blocks <= start
        self.own[which] = True

    @rule(which=st.integers(0, 1), at_rest=st.booleans())
    def look(self, which: int, at_rest: bool) -> None:
        """What a reader knows after a look is what the drive holds."""
        reader = self.readers[which]
        if at_rest:
            self.box.rest()
        dropped = reader.stats().dropped_blocks
        self.library.settle(reader)
        self.own[which] |= dropped > 0
        if at_rest:
            self.compare(which)

    def compare(self, which: int) -> None:
        reader, there = self.readers[which], self.library.on_drive()
        held = any(number == which for number, _ in self.pins) or any(number == which for number, _ in self.gets)
        if not held:
            assert below(reader) <= there, "a reader believes in what the drive does not hold"
            gone = [
                segment
                for segment in reader._core.ledger.spaces[0].segments.values()
                if segment.state.value == "reclaiming"
            ]
            assert not gone, f"{gone} are held for nobody"
        if not self.own[which]:
            for chain in ALL:
                found, want = reader.match(chain).blocks, prefix(chain, there)
                assert found >= want, f"{want} blocks of a chain lie on the drive, {found} are found"

    @rule(which=st.integers(0, 1))
    def reopen(self, which: int) -> None:
        self.end_gets()
        for number, pin in self.pins:
            if number == which:
                pin.release()
        self.pins = [one for one in self.pins if one[0] != which]
        assert self.library.close_reader(self.readers[which])
        self.readers[which] = self.library.open_reader(dram_blocks=4 + 8 * which)
        self.own[which] = False

    def teardown(self) -> None:
        if not hasattr(self, "library"):
            return
        self.end_gets()
        for _, pin in self.pins:
            pin.release()
        self.pins.clear()
        self.box.rest()
        for which in (0, 1):
            self.look(which, True)
        taken = sum(content.allocated_nbytes for medium in self.library.media for content in medium._contents)
        linked = sum(content.allocated_nbytes for medium in self.library.media for content in medium.names.values())
        assert taken == linked, "bytes of removed files are still held"
        self.library.close()


class StripedReadersMachine(ReadersMachine):
    """Over two drives."""

    drives = 2


_SETTINGS = {
    "stateful_step_count": 40,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large],
}

TestReaders = ReadersMachine.TestCase
TestReaders.settings = settings(max_examples=100, **_SETTINGS)  # type: ignore[arg-type]
TestStripedReaders = StripedReadersMachine.TestCase
TestStripedReaders.settings = settings(max_examples=60, **_SETTINGS)  # type: ignore[arg-type]
