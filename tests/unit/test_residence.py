"""R21: what was written to the SSD a moment ago is not what makes room, unless nothing older is there."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.harness import SMALL, Box, chain_of
from tests.unit.test_ledger import make, sealed

from kvterrace.engine import residence


def test_what_was_written_lately_goes_after_what_was_there_before() -> None:
    """By recency alone the young one would go: it was used last before the old one was used again."""
    ledger = make(dram_blocks=64, segments=8)
    old, young = chain_of(SMALL, [1] * 4), chain_of(SMALL, [2] * 4)
    first, second = sealed(ledger, old, 0.0), sealed(ledger, young, 400.0)
    ledger.touch(old, len(old), 500.0)
    first.written_s, second.written_s = 0.0, 400.0
    for now_s, goes in ((550.0, first), (699.0, first), (700.0, second), (5000.0, second)):
        found = residence.choose(ledger, now_s)
        assert found is not None and found[0] is goes, now_s


def test_where_all_is_young_or_the_old_cannot_go_the_young_goes() -> None:
    ledger = make(dram_blocks=64, segments=8)
    first, second = sealed(ledger, chain_of(SMALL, [1] * 4), 0.0), sealed(ledger, chain_of(SMALL, [2] * 4), 1.0)
    first.written_s, second.written_s = 0.0, 1.0
    found = residence.choose(ledger, 2.0)
    assert found is not None and found[0] is first
    first.written_s = -1000.0
    first.readers = 1
    found = residence.choose(ledger, 2.0)
    assert found is not None and found[0] is second
    first.readers = 0
    found = residence.choose(ledger, 2.0, only=lambda one: one is second)
    assert found is not None and found[0] is second


def test_segments_know_when_they_were_written_and_found_ones_count_as_old(tmp_path: Path) -> None:
    box = Box(tmp_path / "store", dram_blocks=16, segments=8)
    box.put_now(chain_of(SMALL, [1, 2]))
    box.cool()
    space = box.store._core.ledger.space
    assert space is not None
    (segment,) = space.segments.values()
    assert 1000.0 <= segment.written_s <= box.clock.monotonic_s()
    box.step(400.0)
    box.put_now(chain_of(SMALL, [1, 2, 3]))
    box.cool()
    assert segment.written_s == pytest.approx(box.clock.monotonic_s(), abs=1.0)
    box.reopen()
    space = box.store._core.ledger.space
    assert space is not None
    assert [one.written_s for one in space.segments.values()] == [float("-inf")]
