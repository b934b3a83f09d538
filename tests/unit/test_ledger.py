"""The ledger, event by event: what it decides, and what it then knows. No store, no bytes, no clock."""

from __future__ import annotations

import numpy as np
import pytest
from tests.harness import SMALL, chain_of

from kvterrace.engine import reclaim
from kvterrace.engine.blocks import DramState, Ids
from kvterrace.engine.dirty import WriteBatch, WritePolicy
from kvterrace.engine.ledger import SCORE_HALF_LIFE_S, Geometry, Ledger
from kvterrace.engine.space import Segment, SegmentSpace, SegmentState
from kvterrace.keys import KeyChain
from kvterrace.testing.invariants import check_ledger
from kvterrace.types import Tier

RECORD = 8192
SEGMENT = 10 * RECORD


def make(dram_blocks: int = 8, segments: int = 4, **writes: float) -> Ledger:
    space = SegmentSpace(segments * SEGMENT, SEGMENT, lambda records, namespaces: 4096)
    ledger = Ledger(dram_blocks * RECORD, space, writes=WritePolicy(**writes))  # type: ignore[arg-type]
    ledger.add_namespace(0, Geometry(4096, 256), SMALL.digest)
    return ledger


def open_segment(ledger: Ledger) -> Segment:
    assert ledger.space is not None
    segment = ledger.space.begin()
    segment.state = SegmentState.OPEN
    ledger.space.open = segment
    return segment


def put(ledger: Ledger, chain: KeyChain, now_s: float, start: int = 0) -> Ids:
    ids, _ = ledger.begin_put(chain, start, len(chain), namespace=0, sequence=b"", now_s=now_s)
    for block in ids.tolist():
        ledger.filled(block, now_s)
    for block in ids[::-1].tolist():
        ledger.let_go(block)
    ledger.touch(chain, start + len(ids), now_s)
    check_ledger(ledger)
    return ids


def write(ledger: Ledger, now_s: float) -> WriteBatch:
    batch = ledger.next_write(now_s, pressed=True)
    assert batch is not None
    ledger.written(batch)
    check_ledger(ledger)
    return batch


def tiers(ledger: Ledger, chain: KeyChain) -> list[Tier]:
    return ledger.resident(ledger.find(chain))


A = chain_of(SMALL, [0] * 4)
B = chain_of(SMALL, [1] * 4)
AB = chain_of(SMALL, [0, 0, 1, 1])  # shares two blocks with A


def test_a_put_is_there_when_it_is_filled() -> None:
    ledger = make()
    ids, seq = ledger.begin_put(A, 0, 4, namespace=0, sequence=b"", now_s=0.0)
    assert (len(ids), seq, ledger.next_put_seq) == (4, 1, 5)
    assert ledger.table.put_seq[ids].tolist() == [1, 2, 3, 4]
    assert tiers(ledger, A) == []
    check_ledger(ledger)
    for block in ids[:2].tolist():
        ledger.filled(block, 0.0)
    assert tiers(ledger, A) == [Tier.DRAM] * 2
    assert ledger.dirty.nbytes == 2 * RECORD
    for block in ids[2:].tolist():
        ledger.undo(block)
    for block in ids[::-1].tolist():
        ledger.let_go(block)
    check_ledger(ledger)
    assert ledger.table.used == 2
    assert ledger.dram.allocator.used_nbytes == 2 * RECORD


def test_a_put_takes_as_many_blocks_as_there_is_room_for() -> None:
    ledger = make(dram_blocks=3)
    assert len(put(ledger, A, 0.0)) == 3
    assert len(put(ledger, B, 1.0)) == 0  # all three wait to be written
    open_segment(ledger)
    write(ledger, 2.0)
    assert len(put(ledger, B, 3.0)) == 3
    assert tiers(ledger, A) == [Tier.SSD] * 3
    assert tiers(ledger, B) == [Tier.DRAM] * 3


def test_a_fork_splits_the_run_that_it_leaves() -> None:
    ledger = make()
    put(ledger, A, 0.0)
    put(ledger, AB, 1.0, start=2)
    assert sorted(len(run) for run in ledger.tree) == [2, 2, 2]
    assert tiers(ledger, A) == tiers(ledger, AB) == [Tier.DRAM] * 4
    assert ledger.find(A)[:2].tolist() == ledger.find(AB)[:2].tolist()


def test_the_tail_of_the_least_recently_used_run_goes_first() -> None:
    ledger = make(dram_blocks=8)
    open_segment(ledger)
    put(ledger, A, 0.0)
    put(ledger, B, 1.0)
    write(ledger, 2.0)
    ledger.touch(A, 4, 3.0)
    assert ledger.reserve_extent(2 * RECORD) is not None
    assert tiers(ledger, B) == [Tier.DRAM, Tier.DRAM, Tier.SSD, Tier.SSD]
    assert tiers(ledger, A) == [Tier.DRAM] * 4


@pytest.mark.parametrize("hold", ["users", "pins"])
def test_what_is_used_or_pinned_is_not_evicted(hold: str) -> None:
    ledger = make(dram_blocks=4)
    open_segment(ledger)
    ids = put(ledger, A, 0.0)
    write(ledger, 1.0)
    if hold == "users":
        ledger.hold(ids)
    else:
        ledger.pin(ids)
    assert ledger.reserve_extent(RECORD) is None
    assert tiers(ledger, A) == [Tier.DRAM] * 4


def test_last_copies_go_only_where_nothing_can_be_written() -> None:
    ledger = make(dram_blocks=4)
    put(ledger, A, 0.0)
    assert ledger.reserve_extent(RECORD) is None
    assert ledger.space is not None
    ledger.space.can_write = False
    assert ledger.reserve_extent(RECORD) is not None
    assert tiers(ledger, A) == [Tier.DRAM] * 3
    assert ledger.dropped_blocks == 1
    check_ledger(ledger)


def test_reads_for_later_never_cost_a_last_copy() -> None:
    ledger = make(dram_blocks=4)
    open_segment(ledger)
    cold = put(ledger, A, 0.0)
    write(ledger, 1.0)
    ledger.evict_idle()
    put(ledger, B, 2.0)
    assert ledger.space is not None
    ledger.space.can_write = False
    ledger.hold(cold)
    assert ledger.reserve_all(cold, DramState.READING, last_copies=False) == 0
    assert ledger.reserve_all(cold, DramState.READING, last_copies=True) == 4
    assert tiers(ledger, B) == []
    check_ledger(ledger)


def test_a_write_takes_dirty_blocks_in_order_one_behind_the_other() -> None:
    ledger = make()
    segment = open_segment(ledger)
    first, second = put(ledger, A, 0.0), put(ledger, B, 1.0)
    batch = ledger.next_write(1.0, pressed=True)
    assert batch is not None
    assert batch.ids.tolist() == [*first.tolist(), *second.tolist()]
    assert (batch.offset, batch.nbytes, batch.segment) == (4096, 8 * RECORD, segment)
    assert segment.writers == 1
    assert ledger.next_write(1.0, pressed=True) is None
    check_ledger(ledger)
    ledger.written(batch)
    assert ledger.table.page[batch.ids].tolist() == [1 + 2 * n for n in range(8)]
    assert (segment.live_nbytes, segment.writers, ledger.dirty.nbytes) == (8 * RECORD, 0, 0)
    assert not ledger.dirty.since_s
    check_ledger(ledger)


def test_a_failed_write_leaves_its_blocks_dirty() -> None:
    ledger = make()
    segment = open_segment(ledger)
    put(ledger, A, 0.0)
    batch = ledger.next_write(0.0, pressed=True)
    assert batch is not None
    ledger.write_failed(batch)
    assert (segment.live_nbytes, segment.used_nbytes) == (0, 4096 + 4 * RECORD)
    assert ledger.dirty.nbytes == 4 * RECORD and ledger.dirty.since_s
    check_ledger(ledger)
    again = ledger.next_write(0.0, pressed=True)
    assert again is not None and again.offset == 4096 + 4 * RECORD


def test_behind_a_run_is_written_once_it_was_idle_for_long_enough() -> None:
    ledger = make(dram_blocks=40, after_s=2.0)
    open_segment(ledger)
    put(ledger, A, 10.0)
    b = put(ledger, B, 10.5)
    assert ledger.next_write(11.9, pressed=False) is None
    ledger.touch(A, 4, 11.9)
    assert ledger.next_write(12.4, pressed=False) is None
    batch = ledger.next_write(12.5, pressed=False)
    assert batch is not None and batch.ids.tolist() == b.tolist()
    assert ledger.next_write(13.8, pressed=False) is None
    batch = ledger.next_write(13.9, pressed=False)
    assert batch is not None and set(batch.ids.tolist()) == set(ledger.find(A).tolist())


def test_half_a_dirty_arena_is_written_without_waiting() -> None:
    ledger = make(dram_blocks=8, after_s=100.0, dirty_fraction=0.5)
    open_segment(ledger)
    put(ledger, A, 0.0)
    assert ledger.next_write(0.0, pressed=False) is None
    put(ledger, chain_of(SMALL, [1]), 0.0)
    assert ledger.next_write(0.0, pressed=False) is not None


def test_a_batch_and_a_segment_have_an_end() -> None:
    ledger = make(dram_blocks=40, batch_nbytes=3 * RECORD)
    put(ledger, chain_of(SMALL, [0] * 12), 0.0)
    assert ledger.next_write(0.0, pressed=True) is None and ledger.needs_segment()
    open_segment(ledger)
    sizes = []
    while (batch := ledger.next_write(0.0, pressed=True)) is not None:
        sizes.append(len(batch.ids))
        ledger.written(batch)
    assert sizes == [3, 3, 3]  # ten records, less the header page and the footer
    assert ledger.needs_segment()
    check_ledger(ledger)


def test_one_write_takes_eight_mebibytes_of_blocks_and_their_headers() -> None:
    record = (2 << 20) + 4096
    space = SegmentSpace(4 * 32 * record, 32 * record, lambda records, namespaces: 4096)
    ledger = Ledger(12 * record, space)
    ledger.add_namespace(0, Geometry(4096, 2 << 20), SMALL.digest)
    put(ledger, chain_of(SMALL, [0] * 12), 0.0)
    open_segment(ledger)
    assert [len(write(ledger, 0.0).ids) for _ in range(3)] == [4, 4, 4]


def test_a_large_idle_block_is_not_stuck_behind_a_small_busy_one() -> None:
    """The open segment has room for a small record, and none for the large one that is due."""
    ledger = make(dram_blocks=40, after_s=2.0)
    ledger.add_namespace(1, Geometry(4096, 9 * RECORD - 4096), b"another")
    open_segment(ledger)
    put(ledger, chain_of(SMALL, [2]), 0.0)
    write(ledger, 0.0)
    put(ledger, A, 1.0)
    ids, _ = ledger.begin_put(B, 0, 1, namespace=1, sequence=b"", now_s=1.0)
    ledger.filled(int(ids[0]), 1.0)
    ledger.let_go(int(ids[0]))
    ledger.touch(A, 4, 9.0)
    assert ledger.next_write(9.5, pressed=False) is None
    assert ledger.needs_segment()


def test_a_lost_copy_makes_what_dram_holds_dirty_again() -> None:
    ledger = make()
    segment = open_segment(ledger)
    ids = put(ledger, A, 0.0)
    write(ledger, 1.0)
    ledger.lost(int(ids[1]), 2.0)
    assert (ledger.dirty.nbytes, segment.live_nbytes) == (RECORD, 3 * RECORD)
    check_ledger(ledger)
    ledger.lost(int(ids[1]), 2.0)  # nothing more to lose
    assert ledger.dirty.nbytes == RECORD
    ledger.lost(int(ids[2]), 2.0, segment=segment.number, page=1)  # the copy of another place: not this one
    assert segment.live_nbytes == 3 * RECORD
    ledger.lost(int(ids[2]), 2.0, segment=segment.number, page=5)
    assert segment.live_nbytes == 2 * RECORD
    check_ledger(ledger)


def test_forgetting_drops_all_that_hangs_on_a_block() -> None:
    ledger = make()
    ids = put(ledger, A, 0.0)
    put(ledger, AB, 1.0, start=2)
    ledger.forget(int(ids[1]))
    assert tiers(ledger, A) == tiers(ledger, AB) == [Tier.DRAM]
    assert ledger.dropped_blocks == 5
    assert ledger.table.used == 1
    check_ledger(ledger)


def test_invalidated_blocks_in_use_go_when_they_are_let_go() -> None:
    ledger = make()
    ids = put(ledger, A, 0.0)
    ledger.hold(ids[2:3])
    keys = ledger.invalidate(A, 1)
    assert keys == [A.key(1), A.key(2), A.key(3)]
    assert tiers(ledger, A) == [Tier.DRAM]
    assert ledger.doomed(ids).tolist() == [False, False, True, False]
    assert ledger.dirty.nbytes == 2 * RECORD
    check_ledger(ledger)
    ledger.let_go(int(ids[2]))
    assert ledger.table.used == 1 and ledger.dirty.nbytes == RECORD
    check_ledger(ledger)


def test_invalidating_names_all_keys_behind_also_unknown_ones() -> None:
    ledger = make()
    put(ledger, A[:2], 0.0)
    put(ledger, AB, 0.0, start=2)
    assert sorted(ledger.invalidate(A, 1)) == sorted([*list(A)[1:], *list(AB)[2:]])
    assert ledger.invalidate(B, 3) == [B.key(3)]
    assert ledger.invalidate(B, 4) == []
    check_ledger(ledger)


def test_scores_decay_by_half_and_add_up() -> None:
    ledger = make()
    ids = put(ledger, A, 0.0)
    ledger.add_scores(A, np.array([1, 2, 3, 4], np.float32), 0.0)
    ledger.add_scores(A[:2], np.array([1, 1], np.float32), SCORE_HALF_LIFE_S)
    assert ledger.table.score[ids].tolist() == [1.5, 2.0, 1.5, 2.0]
    ledger.add_scores(A, np.zeros(4, np.float32), 3 * SCORE_HALF_LIFE_S)
    assert ledger.table.score[ids].tolist() == [0.375, 0.5, 0.375, 0.5]


def test_a_touch_makes_all_above_as_young() -> None:
    ledger = make()
    put(ledger, A, 0.0)
    put(ledger, AB, 1.0, start=2)
    ledger.touch(A, 4, 5.0)
    ages: dict[int, set[float]] = {run.depth: set() for run in ledger.tree}
    for run in ledger.tree:
        ages[run.depth].add(float(ledger.tree.used_s[run.number]))
    assert ages == {0: {5.0}, 2: {5.0, 1.0}}
    ledger.touch(A, 1, 7.0)
    assert {run.depth for run in ledger.tree} == {0, 1, 2}
    check_ledger(ledger)


# -- reclaim -----------------------------------------------------------------------------------------------------------


def sealed(ledger: Ledger, chain: KeyChain, now_s: float, start: int = 0) -> Segment:
    """`chain` from `start` on in a segment of its own, and not in DRAM."""
    segment = open_segment(ledger)
    put(ledger, chain, now_s, start)
    write(ledger, now_s)
    segment.state = SegmentState.SEALED
    segment.file_nbytes = segment.used_nbytes + 4096  # cut behind its footer
    assert ledger.space is not None
    ledger.space.open = None
    ledger.evict_idle()
    return segment


def test_the_oldest_content_is_reclaimed_first_and_nothing_old_is_carried() -> None:
    ledger = make(dram_blocks=8, segments=4)
    first = sealed(ledger, A, 0.0)
    sealed(ledger, B, 100.0)
    found = reclaim.choose(ledger, 200.0)
    assert found is not None and found[0] is first and len(found[1]) == 0
    ledger.touch(A, 4, 199.0)
    found = reclaim.choose(ledger, 200.0)
    assert found is not None and found[0] is not first


def test_of_one_chain_the_end_is_reclaimed_before_the_beginning() -> None:
    ledger = make(dram_blocks=8, segments=4)
    chain = chain_of(SMALL, [0] * 12)
    segments = [sealed(ledger, chain[:stop], 0.0, stop - 4) for stop in (4, 8, 12)]
    found = reclaim.choose(ledger, 10.0)
    assert found is not None and found[0] is segments[-1]
    reclaim.give_up(ledger, found[0], found[1], 10.0)
    check_ledger(ledger)
    assert tiers(ledger, chain) == [Tier.SSD] * 8
    assert ledger.dropped_blocks == 4


def test_of_many_segments_of_one_age_the_end_of_the_chain_goes() -> None:
    """More than are compared one by one."""
    ledger = make(dram_blocks=8, segments=40)
    chain = chain_of(SMALL, [0] * 120)
    segments = [sealed(ledger, chain[:stop], 0.0, stop - 4) for stop in range(4, 124, 4)]
    found = reclaim.choose(ledger, 10.0)
    assert found is not None and found[0] is segments[-1]


def test_what_hangs_on_a_segment_is_lost_with_it_wherever_it_lies() -> None:
    ledger = make(dram_blocks=8, segments=8)
    root = chain_of(SMALL, [7] * 4)
    sealed(ledger, root, 0.0)
    lone = sealed(ledger, chain_of(SMALL, [8] * 4), 0.0)
    for branch in (1, 2):
        sealed(ledger, chain_of(SMALL, [7] * 4 + [branch] * 4), 0.0, 4)
    ledger.touch(root, 4, 0.0)
    found = reclaim.choose(ledger, 10.0, only=lambda one: one.number <= 2)
    assert found is not None and found[0] is lone, "4 blocks against 4 and the 8 that hang on them"
    ledger.hold(ledger.find(chain_of(SMALL, [8] * 4))[:1])
    found = reclaim.choose(ledger, 10.0, only=lambda one: one.number <= 2)
    assert found is not None and found[0].number == 1, "what is in use stays"


def test_a_segment_with_nothing_live_goes_first_and_the_least_live_before_others_as_old() -> None:
    ledger = make(dram_blocks=8, segments=8)
    one, two, three = (sealed(ledger, chain_of(SMALL, [n] * 4), 0.0) for n in (1, 2, 3))
    ledger.forget(int(ledger.find(chain_of(SMALL, [2] * 4))[1]))
    found = reclaim.choose(ledger, 10.0)
    assert found is not None and found[0] is two, "a quarter of it lives: it counts as four times as old"
    ledger.forget(int(ledger.find(chain_of(SMALL, [3] * 4))[0]))
    found = reclaim.choose(ledger, 10.0)
    assert found is not None and found[0] is three
    assert reclaim.choose(ledger, 10.0, only=lambda segment: segment.number > 3) is None
    check_ledger(ledger)
    assert one.live_nbytes == 4 * RECORD


def test_giving_up_the_beginning_drops_the_rest() -> None:
    ledger = make(dram_blocks=8, segments=4)
    chain = chain_of(SMALL, [0] * 8)
    first, second = (sealed(ledger, chain[:stop], 0.0, stop - 4) for stop in (4, 8))
    reclaim.give_up(ledger, first, np.zeros(0, np.int32), 1.0)
    assert tiers(ledger, chain) == [] and ledger.table.used == 0
    assert (first.live_nbytes, second.live_nbytes, ledger.dropped_blocks) == (0, 0, 8)
    check_ledger(ledger)


def test_active_kv_is_carried_and_reclaimed_last() -> None:
    ledger = make(dram_blocks=8, segments=4)
    first = sealed(ledger, A, 0.0)
    second = sealed(ledger, B, 100.0)
    pinned = ledger.find(A)[:1]
    ledger.pin(pinned)
    found = reclaim.choose(ledger, 200.0)
    assert found is not None and found[0] is second
    ledger.hold(ledger.find(B)[:1])
    found = reclaim.choose(ledger, 200.0)
    assert found is not None and found[0] is first and found[1].tolist() == pinned.tolist()
    ledger.pin(ledger.find(A))
    assert reclaim.choose(ledger, 200.0) is None  # all of it active: nothing would be gained


def test_a_segment_that_is_being_read_is_left_alone() -> None:
    ledger = make()
    segment = sealed(ledger, A, 0.0)
    segment.readers = 1
    assert reclaim.choose(ledger, 10.0) is None
    segment.readers = 0
    assert reclaim.choose(ledger, 10.0) is not None
