"""What is read ahead, how much of it, and what is made of how it went (R19, R20; C18, C19 of `docs/cases.md`)."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from tests.harness import SMALL, SMALL_NBYTES, Box, Get, chain_of, kinds

from kvterrace.engine.dram import AWAITED_S
from kvterrace.engine.foresight import _REST_S, _Trial
from kvterrace.io.base import IoKind
from kvterrace.io.faults import Slow
from kvterrace.keys import KeyChain
from kvterrace.types import Hit, Tier


def cold(tmp_path: Path, *paths: list[int], dram_blocks: int = 40) -> tuple[Box, list[KeyChain]]:
    box = Box(tmp_path / "store", dram_blocks=dram_blocks, segments=60)
    chains = [chain_of(SMALL, path) for path in paths]
    for chain in chains:
        known = box.store.match(chain).blocks
        assert set(kinds(box.put_now(chain, known))) == {"Stored"}
        assert box.store.flush(100.0)
    box.cool()
    box.reads.clear()
    return box, chains


def blocks_read(box: Box) -> int:
    return sum(nbytes for _, _, nbytes in box.reads) // SMALL_NBYTES


def test_a_cold_read_brings_the_rest_of_its_run(tmp_path: Path) -> None:
    box, (chain,) = cold(tmp_path, [1] * 8)
    assert box.get_now(chain, 0, 3) == [Hit(Tier.SSD)] * 3
    box.rest()
    assert box.store.match(chain).tiers == (Tier.DRAM,) * 8
    assert box.get_now(chain, 3) == [Hit(Tier.DRAM)] * 5
    assert blocks_read(box) == 8
    stats = box.store.stats()
    assert (stats.prefetched_blocks, stats.prefetch_useful_nbytes) == (5, 5 * SMALL_NBYTES)
    assert (stats.prefetch_late_nbytes, stats.prefetch_wasted_nbytes) == (0, 0)
    box.check()


def test_a_read_from_dram_of_layers_or_past_what_is_known_brings_nothing(tmp_path: Path) -> None:
    box, (chain,) = cold(tmp_path, [1] * 8)
    box.get_now(chain, 0, 3, layers=range(1))
    other = chain_of(SMALL, [1, 1, 1, 7])  # leaves the run after three blocks
    assert kinds(box.get_now(other)) == ["Hit"] * 3 + ["Miss"]
    box.rest()
    box.get_now(chain, 0, 3)
    box.rest()
    assert box.store.match(chain).tiers == (Tier.DRAM,) * 3 + (Tier.SSD,) * 5
    box.check()


def test_only_the_branch_that_was_read_is_brought(tmp_path: Path) -> None:
    box, (left, right) = cold(tmp_path, [1, 1, 2, 2, 2, 2], [1, 1, 3, 3, 3, 3])
    box.get_now(left, 0, 1)
    box.rest()
    for chain in (left, right):
        assert box.store.match(chain).tiers == (Tier.DRAM,) * 2 + (Tier.SSD,) * 4, "up to the fork"
    box.get_now(left, 0, 3)
    box.rest()
    assert box.store.match(left).tiers == (Tier.DRAM,) * 6
    assert box.store.match(right).tiers == (Tier.DRAM,) * 2 + (Tier.SSD,) * 4
    box.check()


def test_no_more_than_a_quarter_of_dram_is_brought_and_displaces_no_prefetch(tmp_path: Path) -> None:
    box, (first, second, third) = cold(tmp_path, [1] * 12, [2] * 12, [3] * 6, dram_blocks=24)
    box.get_now(first, 0, 1)
    box.rest()
    assert box.store.match(first).tiers.count(Tier.DRAM) == 1 + 6
    box.get_now(second, 0, 1)
    box.rest()
    assert box.store.match(second).tiers.count(Tier.DRAM) == 1, "six that were not used yet are there"
    box.get_now(first, 1, 7)
    box.get_now(second, 0, 2)
    box.rest()
    assert box.store.match(second).tiers.count(Tier.DRAM) == 2 + 6
    assert set(kinds(box.get_now(third))) == {"Hit"}
    box.check()


def test_who_waits_goes_first(tmp_path: Path) -> None:
    """Ten reads at once, each of which brings something: the drive is given what is waited for before all that."""
    box, chains = cold(tmp_path, *([way] * 6 for way in range(10)), dram_blocks=200)
    gets = [Get(box.store, chain, 0, 2) for chain in chains]
    for get in gets:
        box.wait(get.transfer)
        get.check()
    box.rest()
    wanted = {table_place(box, chain, at) for chain in chains for at in range(2)}
    order = [(name, at) for name, start, nbytes in box.reads for at in range(start, start + nbytes, SMALL_NBYTES)]
    demand = [place in wanted for place in order]
    assert sum(demand) == 20 and all(demand[:2])
    assert Counter(order).most_common(1)[0][1] == 1, "each block is read once"
    box.check()


def table_place(box: Box, chain: KeyChain, at: int) -> tuple[str, int]:
    ledger = box.store._core.ledger
    block = int(ledger.find(chain)[at])
    number, page = int(ledger.table.segment[block]), int(ledger.table.page[block])
    return f"{number:08x}.seg", page * 4096


def test_a_prefetch_that_somebody_waits_for_is_late(tmp_path: Path) -> None:
    box, (chain,) = cold(tmp_path, [1] * 4)
    box.faults.add(Slow(0.5), IoKind.READ)
    prefetch = box.store.prefetch(chain)
    box.step(0.01)
    get = Get(box.store, chain)
    box.wait(prefetch)
    box.wait(get.transfer)
    get.check()
    assert blocks_read(box) == 4
    stats = box.store.stats()
    assert (stats.prefetch_late_nbytes, stats.prefetch_useful_nbytes) == (4 * SMALL_NBYTES, 0)
    box.check()


def test_what_leaves_unused_was_wasted(tmp_path: Path) -> None:
    box, (chain, other) = cold(tmp_path, [1] * 4, [2] * 8, dram_blocks=8)
    box.wait(box.store.prefetch(chain))
    box.step(60.0)
    box.get_now(other)
    box.step(2.0)
    box.step()
    stats = box.store.stats()
    assert (stats.prefetch_wasted_nbytes, stats.prefetch_useful_nbytes) == (4 * SMALL_NBYTES, 0)
    box.get_now(chain)
    assert box.store.stats().prefetch_useful_nbytes == 0, "it was read a second time"
    box.check()


def test_where_it_wastes_more_than_it_saves_it_rests_and_tries_again(tmp_path: Path) -> None:
    """Only beginnings are read, and DRAM is too small for the rest to stay: once 32 blocks were seen to be wasted,
    nothing is brought along; half a minute later it is.
    """
    box, chains = cold(tmp_path, *([way] * 6 for way in range(24)), dram_blocks=20)
    box.patience = 10**5

    def brought(chain: KeyChain) -> int:
        before = blocks_read(box)
        box.get_now(chain, 0, 1)
        box.rest()
        return blocks_read(box) - before - 1

    got: list[int] = []
    while not got or got[-1]:
        got.append(brought(chains[len(got)]))
        box.step(AWAITED_S + 1.5)
        box.step()
    # 32 are seen to have left when so many have taken the 20 slots; no more than those slots hold are under way then
    assert got == [5] * (len(got) - 1) + [0] and 32 < sum(got) <= 32 + 20 + 5
    assert brought(chains[len(got)]) == 0
    wasted = box.store.stats().prefetch_wasted_nbytes
    assert wasted >= 32 * SMALL_NBYTES > box.store.stats().prefetch_useful_nbytes
    box.step(_REST_S)
    assert brought(chains[20]) == 5
    box.check()


def test_a_strategy_rests_longer_each_time_and_no_longer_once_it_was_good() -> None:
    trial, now_s = _Trial(), 0.0

    def rest_s() -> float:
        nonlocal now_s
        since_s = now_s
        while not trial.is_on(now_s):
            now_s += 1.0
        return now_s - since_s

    rests = []
    for _ in range(10):
        for _ in range(32):
            trial.ended(0.0, 1.0, now_s)
        rests.append(rest_s())
    assert rests == [30.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 3600.0, 3600.0, 3600.0]
    for good in (1.0, 0.6):
        for at in range(32):
            trial.ended(good if at % 2 else 0.0, 0.0 if at % 2 else 0.5, now_s)
        assert rest_s() == 0.0
    for _ in range(32):
        trial.ended(0.0, 1.0, now_s)
    assert rest_s() == 30.0


@pytest.mark.parametrize("seed", range(3))
def test_the_books_of_prefetches_add_up(tmp_path: Path, seed: int) -> None:
    """Whatever is read and prefetched in whatever order: each block brought is used, late, wasted, or still there."""
    rng = np.random.default_rng(seed)
    box, chains = cold(tmp_path, *([way] * 6 for way in range(12)), dram_blocks=24)
    box.patience = 10**6
    for _ in range(150):
        chain = chains[rng.integers(12)]
        stop = int(rng.integers(1, 7))
        if rng.random() < 0.4:
            box.store.prefetch(chain, stop=stop)
        else:
            get = Get(box.store, chain, 0, stop)
            box.wait(get.transfer)
            get.check()
        box.step(float(rng.choice([0.0, 0.5, 3.0])))
    box.rest()
    box.step(5.0)
    box.step(5.0)
    stats, there = box.store.stats(), box.store._mover._reader._foresight._there
    counted = stats.prefetch_useful_nbytes + stats.prefetch_late_nbytes + stats.prefetch_wasted_nbytes
    assert counted + len(there) * SMALL_NBYTES == stats.prefetched_blocks * SMALL_NBYTES
    assert stats.prefetched_blocks > 20
    box.check()
