"""What is written to the SSD where writes are short (R21, R35; C15 of `docs/cases.md`)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.harness import SMALL, SMALL_NBYTES, Box, chain_of
from tests.unit.test_ledger import RECORD, open_segment, put, tiers

from kvterrace.clock import ManualClock
from kvterrace.engine.blocks import Verdict
from kvterrace.engine.budgeting import recover_budget
from kvterrace.engine.ledger import Geometry, Ledger
from kvterrace.engine.space import SegmentSpace
from kvterrace.keys import KeyChain
from kvterrace.policy.admission import Admission, History, WriteBudget, default_daily_nbytes
from kvterrace.tiers.budget import BudgetFile
from kvterrace.types import Hint, Tier

A, B = chain_of(SMALL, [1] * 4), chain_of(SMALL, [2] * 4)
GiB = 1 << 30


def keys(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.uint64)


def short(left_share: float, dram_blocks: int = 8) -> Ledger:
    """A ledger with so much left of a day's 1000 records, in a day that brings nearly nothing."""
    space = SegmentSpace(40 * 10 * RECORD, 10 * RECORD, lambda records, namespaces: 4096)
    daily = 1000.0 * RECORD
    budget = WriteBudget(daily, left_nbytes=left_share * daily, day_s=1e12)
    ledger = Ledger(dram_blocks * RECORD, space, budget=budget)
    ledger.add_namespace(0, Geometry(4096, 256), SMALL.digest)
    open_segment(ledger)
    return ledger


def use(ledger: Ledger, chain: KeyChain, now_s: float) -> None:
    known = ledger.find(chain)
    ledger.wanted(known, now_s)
    ledger.touch(chain, len(known), now_s)


def written(ledger: Ledger, now_s: float) -> int:
    """Write all that is due; how many blocks that was."""
    count = 0
    while (batch := ledger.next_write(now_s, pressed=True)) is not None:
        ledger.written(batch)
        count += len(batch.ids)
    return count


# -- the budget --------------------------------------------------------------------------------------------------------


def test_a_day_brings_a_days_budget_and_saves_no_more() -> None:
    budget = WriteBudget(2400.0, day_s=24.0)
    assert budget.left_nbytes(100.0) == 2400.0
    budget.spend(2000.0, 100.0)
    assert budget.left_nbytes(103.0) == pytest.approx(400.0 + 300.0)
    budget.spend(1000.0, 103.0)  # what must be written is written
    assert budget.left_nbytes(103.0) == pytest.approx(-300.0)
    assert budget.left_nbytes(102.0) == pytest.approx(-300.0)
    assert budget.left_nbytes(106.0) == pytest.approx(0.0)
    assert budget.left_nbytes(1000.0) == 2400.0


def test_the_default_follows_the_size_of_the_drive() -> None:
    assert default_daily_nbytes(4 * 10**12) == 1_200_000_000_000
    assert default_daily_nbytes(8 << 20) == 40 * GiB


def test_the_budget_survives_a_restart_and_time_away_counts(tmp_path: Path) -> None:
    clock = ManualClock(5000.0)
    file = BudgetFile(tmp_path)
    assert recover_budget([file], 86400, clock).left_nbytes(0.0) == 86400.0
    file.write(-100, 5000.0, 86400)
    clock.advance(600.0)
    assert recover_budget([file], 86400, clock).left_nbytes(0.0) == pytest.approx(500.0)
    clock.advance(1e9)
    assert recover_budget([file], 1000, clock).left_nbytes(0.0) == 1000.0
    file.write(10, 9e9, 86400)  # a clock that was wrong then
    assert recover_budget([file], 86400, clock).left_nbytes(0.0) == pytest.approx(10.0)


def test_of_several_drives_the_one_that_says_least_counts(tmp_path: Path) -> None:
    files = []
    for number, left in enumerate((700, 300)):
        folder = tmp_path / str(number)
        folder.mkdir()
        files.append(BudgetFile(folder))
        files[-1].write(left, 0.0, 86400)
    assert recover_budget(files, 86400, ManualClock(0.0)).left_nbytes(0.0) == 300.0


@pytest.mark.parametrize("at", range(0, 40, 4))
def test_a_damaged_file_says_nothing(tmp_path: Path, at: int) -> None:
    file = BudgetFile(tmp_path)
    file.write(77, 5.0, 1000)
    assert file.read() == (77, 5.0, 1000)
    data = bytearray(file.path.read_bytes())
    assert len(data) == 40
    data[at] ^= 1
    file.path.write_bytes(data)
    assert file.read() is None
    file.path.write_bytes(data[:at])
    assert file.read() is None
    assert file.path.stat().st_mode & 0o777 == 0o600


def test_the_file_is_not_written_through_a_link(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes(b"mine")
    folder = tmp_path / "p"
    folder.mkdir()
    (folder / "budget").symlink_to(outside)
    file = BudgetFile(folder)
    with pytest.raises(OSError, match="budget"):
        file.write(1, 1.0, 1)
    assert outside.read_bytes() == b"mine"


# -- the choice --------------------------------------------------------------------------------------------------------


def test_histories_are_admitted_by_what_they_were_worth() -> None:
    budget = WriteBudget(1000.0, left_nbytes=500.0, day_s=1e12)
    admission = Admission(budget)

    def admitted(left: float) -> list[History]:
        budget.spend(budget.left_nbytes(0.0) - left, 0.0)
        return [one for one in History if admission.admits(one, 0.0)]

    assert not admission.is_short(0.0)
    # by the first guess: seen (1), goes on (1/2), new (1/4). Half of a day is what counts as short, in thirds
    assert admitted(499.0) == [History.SEEN, History.GOES_ON, History.NEW]
    assert admission.is_short(0.0)
    assert admitted(330.0) == [History.SEEN, History.GOES_ON]
    assert admitted(160.0) == [History.SEEN]
    assert admitted(0.0) == []
    # 1000 new blocks, each asked for twice: (25 + 2000) / (100 + 1000) = 1.84 > 1/2; what was seen stays the first
    for run in range(100):
        some = keys(*range(1 + run * 10, 11 + run * 10))
        admission.judged(some, History.NEW)
        admission.judged(some, History.NEW)  # again, while it is remembered: no news
        admission.asked(some)
        admission.asked(some)
    assert admission.worth == pytest.approx([1.0, 0.5, 2025 / 1100], rel=1e-3)
    assert admitted(160.0) == [History.SEEN]
    assert admitted(330.0) == [History.SEEN, History.NEW]


def test_while_there_is_enough_all_is_written() -> None:
    ledger = short(0.9)
    put(ledger, A, 0.0)
    assert written(ledger, 5.0) == 4
    assert ledger.admitting.refused_blocks == 0


def test_the_budget_is_charged_for_what_is_written() -> None:
    ledger = short(0.9)
    put(ledger, A, 0.0)
    written(ledger, 5.0)
    budget = ledger.admitting.admission.budget
    assert budget is not None
    assert budget.left_nbytes(5.0) == pytest.approx((900 - 4) * RECORD, abs=1.0)


def test_where_writes_are_short_the_second_turn_is_written_and_not_the_first() -> None:
    ledger = short(0.1)
    put(ledger, A, 0.0)
    use(ledger, A, 0.5)  # the same turn
    assert written(ledger, 5.0) == 0
    assert tiers(ledger, A) == [Tier.DRAM] * 4, "it stays as long as its room is not wanted"
    assert (ledger.dirty.nbytes, ledger.admitting.refused_blocks) == (0, 4)
    use(ledger, A, 10.0)
    assert ledger.dirty.nbytes == 4 * RECORD
    assert written(ledger, 15.0) == 4


def test_what_was_dropped_and_comes_again_was_seen() -> None:
    """In one go, and block by block: a key stands for all that is before it."""
    for pieces in (1, 4):
        ledger = short(0.1)
        put(ledger, A, 0.0)
        assert written(ledger, 5.0) == 0
        ledger.evict_idle()
        put(ledger, B, 6.0)
        put(ledger, chain_of(SMALL, [3] * 4), 7.0)
        written(ledger, 8.0)
        put(ledger, chain_of(SMALL, [4] * 4), 9.0)
        assert ledger.find(A).tolist() == []
        assert ledger.dropped_blocks >= 4
        for start in range(0, 4, 4 // pieces):
            put(ledger, A[: start + 4 // pieces], 20.0, start=start)
        assert written(ledger, 25.0) == 4
        assert tiers(ledger, A) == [Tier.DRAM] * 4


def test_of_a_run_the_seen_part_is_written_and_the_new_rest_is_not() -> None:
    ledger = short(0.1, dram_blocks=16)
    put(ledger, A, 0.0)
    assert written(ledger, 5.0) == 0
    longer = chain_of(SMALL, [1] * 9)
    use(ledger, A, 10.0)
    put(ledger, longer, 10.0, start=4)
    assert written(ledger, 15.0) == 4
    found = ledger.find(longer)
    assert (ledger.table.segment[found] >= 0).tolist() == [True] * 4 + [False] * 5


def test_nothing_is_written_that_hangs_on_what_was_refused() -> None:
    """The branch is judged later, when there is budget again; alone on the drive it would be worth nothing."""
    ledger = short(0.1, dram_blocks=16)
    put(ledger, A, 0.0)
    assert written(ledger, 5.0) == 0
    budget = ledger.admitting.admission.budget
    assert budget is not None
    budget.spend(-900.0 * RECORD, 5.0)
    ids, _ = ledger.begin_put(chain_of(SMALL, [1, 1, 2, 2]), 2, 4, namespace=0, sequence=b"", now_s=6.0)
    for block in ids.tolist():
        ledger.filled(block, 6.0)
        ledger.let_go(block)
    assert written(ledger, 10.0) == 0


def test_what_two_hang_on_was_seen_by_both() -> None:
    """Two branches within a second of each other: no turn of its own for what they share."""
    ledger = short(0.1, dram_blocks=16)
    put(ledger, A, 0.0)
    put(ledger, chain_of(SMALL, [1, 1, 2, 2]), 0.2, start=2)
    assert written(ledger, 5.0) == 2
    assert (ledger.table.segment[ledger.find(A)] >= 0).tolist() == [True, True, False, False]


@pytest.mark.parametrize("kind", [Hint.SHARED, Hint.PRIORITY, Hint.RETURNS])
def test_what_a_client_wants_kept_is_written_whatever_is_left(kind: Hint) -> None:
    ledger = short(0.0)
    ids, _ = ledger.begin_put(A, 0, 4, namespace=0, sequence=b"a", now_s=0.0)
    for block in ids.tolist():
        ledger.filled(block, 0.0)
        ledger.let_go(block)
    ledger.hint(b"a", kind, 60.0, 0.0)
    assert written(ledger, 5.0) == 4


def test_what_had_a_copy_and_lost_it_is_written_again() -> None:
    """As reclaim does it, after a restart: what is carried over must not be lost for want of budget."""
    ledger = short(0.6)
    ids = put(ledger, A, 0.0)
    assert written(ledger, 5.0) == 4
    budget = ledger.admitting.admission.budget
    assert budget is not None
    budget.spend(700.0 * RECORD, 5.0)
    ledger.table.verdict[ids] = Verdict.NONE  # what was found on the drive was never judged
    for block in ids.tolist():
        ledger.lost(block, 6.0)
    assert written(ledger, 10.0) == 4


# -- C15 ---------------------------------------------------------------------------------------------------------------


def test_one_off_blocks_neither_push_out_shared_prompts_nor_wear_the_drive(tmp_path: Path) -> None:
    """Sixteen shared prompts that come back; between them 400 blocks a round that never do: ten times what the drive
    holds. Of the flood no more is written than the budget has, and the prompts are there after it.
    """
    daily_nbytes = 200 * SMALL_NBYTES
    found = {}
    for budget in (None, daily_nbytes):
        box = Box(tmp_path / str(budget), dram_blocks=64, segments=20, daily_write_nbytes=budget)
        box.patience = 10**6
        prompts = [chain_of(SMALL, [1000 + way] * 4) for way in range(16)]
        oneoff = 0
        for _ in range(6):
            for prompt in prompts:
                known = box.store.match(prompt).blocks
                if known:
                    box.get_now(prompt, 0, known)
                if known < 4:
                    box.put_now(prompt, known)
                for _ in range(6):
                    oneoff += 1
                    box.put_now(chain_of(SMALL, [5000 + oneoff] * 4))
                box.step(3.0)
                box.rest()
        box.step(30.0)
        box.rest()
        there = sum(box.store.match(prompt).blocks for prompt in prompts)
        spent_s = box.clock.monotonic_s() - 1000.0
        box.check()
        found[budget] = there, box.store.stats().ssd_written_nbytes, spent_s
    (there, _, _), (kept, written_nbytes, spent_s) = found[None], found[daily_nbytes]
    assert kept == 64 > there
    assert written_nbytes <= daily_nbytes * (1.0 + spent_s / 86400.0) + 8 * SMALL_NBYTES


def test_the_accounting_survives_restarts_of_a_store(tmp_path: Path) -> None:
    daily_nbytes = 100 * SMALL_NBYTES
    box = Box(tmp_path / "store", dram_blocks=16, segments=24, daily_write_nbytes=daily_nbytes)
    left = []
    for round_ in range(3):
        box.put_now(chain_of(SMALL, [10 + round_] * 10))
        assert box.store.flush(100.0)
        left.append(box.store.stats().ssd_write_left_nbytes)
        assert box.reopen()
        assert box.store.stats().ssd_write_left_nbytes == pytest.approx(left[-1], abs=SMALL_NBYTES / 4)
    assert left == pytest.approx([(90 - 10 * round_) * SMALL_NBYTES for round_ in range(3)], abs=SMALL_NBYTES / 2)
    assert (tmp_path / "store" / "partitions" / box.partition / "budget").stat().st_size == 4096
    box.check()


def test_a_budget_of_nothing_is_written_down_once_and_writes_nothing(tmp_path: Path) -> None:
    box = Box(tmp_path / "store", dram_blocks=16, segments=24, daily_write_nbytes=0)
    box.put_now(chain_of(SMALL, [1] * 4))
    assert box.store.flush(100.0), "nothing is owed"
    box.patience = 50
    for _ in range(200):
        box.step(1.0)
    assert box.store.stats().ssd_written_nbytes == 0
    box.check()


def test_what_a_put_hangs_on_stays_though_it_is_not_worth_a_write(tmp_path: Path) -> None:
    """No more fits: the rest of the put is refused, and nothing before it goes for what comes behind it."""
    box = Box(tmp_path / "store", dram_blocks=4, segments=24, daily_write_nbytes=0, after_s=0.0)
    chain = chain_of(SMALL, [1] * 8)
    assert [type(one).__name__ for one in box.put_now(chain)] == ["Stored"] * 4 + ["Busy"] * 4
    assert box.store.match(chain).tiers == (Tier.DRAM,) * 4
    assert box.store.stats().ssd_refused_blocks == 4
    box.check()
