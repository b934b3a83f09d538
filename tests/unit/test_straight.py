"""Reads past DRAM, straight into the caller's memory: which ones, and what may never come of them."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.harness import LARGE, LARGE_NBYTES, Box, Get, chain_of, contents, kinds, memory_of

from kvterrace.buffers import Bytes
from kvterrace.engine.mover import STALL_S
from kvterrace.health.breaker import BreakerState, Side
from kvterrace.io.base import IoKind, IoRequest, IoResult
from kvterrace.io.faults import Fail, FlipBit, Hang, PretendDone, Short
from kvterrace.keys import KeyChain, Namespace, chain_keys
from kvterrace.layout import KVLayout
from kvterrace.types import Expired, Hit, Tier

COLD, WARM = chain_of(LARGE, [0] * 3), chain_of(LARGE, [1] * 4)
#: Two parts of 16 KiB.
PARTED = Namespace("parted", KVLayout(layers=1, kv_heads=2, head_dim=128, dtype="float16", block_tokens=32))


class Watched(Box):
    """DRAM for four blocks, full of `WARM`; `COLD` on the drive alone. Knows in what memory reads landed."""

    def __init__(self, root: Path, cold: KeyChain = COLD, warm: KeyChain = WARM, **options: Any) -> None:
        super().__init__(root, dram_blocks=8, segments=24, **options)
        self.landed: list[Bytes] = []
        #: What happens between the end of a read and the look at what it brought.
        self.before_finish: Callable[[], object] = lambda: None
        submit = self.device.submit

        def watched(requests: Sequence[IoRequest]) -> None:
            for one in requests:
                if one.kind is IoKind.READ and one.finish is not None:
                    self.landed += one.buffers
                    one.finish = self._then(one.finish)
            submit(requests)

        self.device.submit = watched  # type: ignore[method-assign]
        self.put_now(cold)
        self.cool()
        self.put_now(warm)
        assert self.store.flush(100.0)
        assert set(self.store.match(warm).tiers) == {Tier.DRAM}
        self.reads.clear()
        self.landed.clear()

    def _then(self, finish: Callable[[IoResult], object]) -> Callable[[IoResult], object]:
        def then(result: IoResult) -> object:
            self.before_finish()
            return finish(result)

        return then

    def straight(self, get: Get) -> bool:
        """Whether a read landed in the memory of `get`."""
        return any(np.shares_memory(memory, get.out) for memory in self.landed)

    def tiers(self, chain: KeyChain) -> set[Tier]:
        return set(self.store.match(chain).tiers)


class Always:
    """A rule of one answer."""

    def __init__(self, *, keep: bool) -> None:
        self._keep = keep

    def keeps(self, blocks: Any, slot_nbytes: int, free_nbytes: int) -> Any:
        del slot_nbytes, free_nbytes
        return np.full(len(blocks), self._keep)


@pytest.fixture
def box(tmp_path: Path) -> Watched:
    return Watched(tmp_path / "store")


def ended(box: Box, get: Get) -> list[Any]:
    box.wait(get.transfer)
    get.check()
    box.check()
    return get.transfer.outcomes


# -- which blocks ------------------------------------------------------------------------------------------------------


def test_what_goes_past_a_full_dram_brings_nothing_along(tmp_path: Path) -> None:
    """Into a DRAM with room, a read brings what lies behind its end."""
    cold = chain_of(LARGE, [0] * 6)
    box = Watched(tmp_path / "store", cold)
    get = Get(box.store, cold, 0, 2)
    box.wait(get.transfer)
    get.check()
    box.rest()
    assert len(box.reads) == 1
    assert box.store.match(WARM).tiers == (Tier.DRAM,) * 4
    assert box.store.match(cold).tiers == (Tier.SSD,) * 6
    box.check()


def test_what_comes_once_goes_past_a_full_dram_and_pushes_nothing_out(box: Watched) -> None:
    """C15."""
    get = Get(box.store, COLD)
    assert ended(box, get) == [Hit(Tier.SSD)] * 3
    assert box.straight(get)
    assert box.reads == [("00000001.seg", 4096, 3 * LARGE_NBYTES)]
    assert box.tiers(WARM) == {Tier.DRAM} and box.tiers(COLD) == {Tier.SSD}


def test_what_comes_again_soon_is_kept(box: Watched) -> None:
    ended(box, Get(box.store, COLD))
    box.landed.clear()
    again = Get(box.store, COLD)
    assert ended(box, again) == [Hit(Tier.SSD)] * 3
    assert not box.straight(again) and box.tiers(COLD) == {Tier.DRAM}
    assert ended(box, Get(box.store, COLD)) == [Hit(Tier.DRAM)] * 3
    assert sum(nbytes for _, _, nbytes in box.reads) == 6 * LARGE_NBYTES


def test_cold_blocks_read_ten_times_cost_one_read_of_the_drive(tmp_path: Path) -> None:
    """C19, of memory that a drive could read into."""
    box = Box(tmp_path / "store", dram_blocks=8, segments=24)
    box.put_now(COLD)
    box.cool()
    box.reads.clear()
    outcomes = [ended(box, Get(box.store, COLD)) for _ in range(10)]
    assert outcomes == [[Hit(Tier.SSD)] * 3] + [[Hit(Tier.DRAM)] * 3] * 9
    assert sum(nbytes for _, _, nbytes in box.reads) == 3 * LARGE_NBYTES


def test_free_room_in_dram_is_used_and_the_rest_goes_past_it(box: Watched) -> None:
    box.store.invalidate(WARM, start=3)  # room for one block
    get = Get(box.store, COLD)
    assert ended(box, get) == [Hit(Tier.SSD)] * 3
    assert box.store.match(COLD).tiers == (Tier.DRAM, Tier.SSD, Tier.SSD)
    assert box.straight(get)
    assert box.reads == [("00000001.seg", 4096, 3 * LARGE_NBYTES)]  # they still share a request


def test_with_a_deadline_it_is_staged_and_an_expired_read_touches_nothing(box: Watched) -> None:
    box.faults.add(Hang(), IoKind.READ, nth=1)
    get = Get(box.store, COLD, deadline_s=0.001)
    assert ended(box, get) == [Expired()] * 3
    box.device.release()
    box.rest()
    get.check()  # it compares every byte, also after the late completion
    assert not get.lent and not box.straight(get)


@pytest.mark.parametrize("layers", [None, range(2)])
def test_memory_that_does_not_lie_in_pages_and_parts_of_blocks_are_staged(box: Watched, layers: range | None) -> None:
    get = Get(box.store, COLD, layers=layers, in_pages=layers is not None)
    assert ended(box, get) == [Hit(Tier.SSD)] * 3
    assert not box.straight(get)


def test_many_who_want_a_block_at_once_cost_two_reads_of_it_at_most(box: Watched) -> None:
    gets = [Get(box.store, COLD) for _ in range(5)]
    for get in gets:
        assert ended(box, get) == [Hit(Tier.SSD)] * 3
    assert [box.straight(get) for get in gets] == [True] + [False] * 4
    assert sum(nbytes for _, _, nbytes in box.reads) == 2 * 3 * LARGE_NBYTES


def test_what_several_wait_for_is_kept(box: Watched) -> None:
    """Whatever the rule says by then."""
    ledger = box.store._core.ledger
    ledger.dram.promotion = Always(keep=True)
    with box.store.pin(WARM):
        gets = [Get(box.store, COLD[:1]) for _ in range(2)]
        ledger.dram.promotion = Always(keep=False)
        box.step(0.1)
        assert not box.reads
    for get in gets:
        assert ended(box, get) == [Hit(Tier.SSD)]
    assert len(box.reads) == 1 and not any(box.straight(get) for get in gets)


def test_many_requests_for_more_than_dram_holds_read_each_block_twice_at_most(tmp_path: Path) -> None:
    """C18."""
    chain = chain_of(LARGE, [2] * 20)
    box = Watched(tmp_path / "store", chain)
    gets = [Get(box.store, chain) for _ in range(6)]
    for get in gets:
        assert ended(box, get) == [Hit(Tier.SSD)] * 20
    assert sum(nbytes for _, _, nbytes in box.reads) <= 2 * 20 * LARGE_NBYTES


def test_parts_of_an_engines_own_memory_are_read_into(tmp_path: Path) -> None:
    """Blocks in the middle of two arrays, of every second one."""
    tokens = np.arange(6 * PARTED.layout.block_tokens)
    cold, warm = chain_keys(PARTED, tokens[: 2 * 32]), chain_keys(PARTED, tokens + 10_000)
    box = Watched(tmp_path / "store", cold, warm[:1])
    arrays = [memory_of(4 * 16384).reshape(4, 1, 16384) for _ in range(2)]
    transfer = box.store.get(cold, [array[::2] for array in arrays])
    box.wait(transfer)
    assert transfer.outcomes == [Hit(Tier.SSD)] * 2
    assert any(np.shares_memory(memory, arrays[1]) for memory in box.landed)
    want = np.frombuffer(contents(cold), np.uint8).reshape(2, 2, 16384)
    for part, array in enumerate(arrays):
        assert np.array_equal(array[::2, 0], want[:, part])
        assert (array[1::2] == 0xA5).all()
    box.check()


# -- what is wrong -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("effect", [FlipBit(4096 + 12287, 7), FlipBit(3, 0), Short(8192), Short(0), PretendDone()])
def test_what_arrives_wrong_once_is_read_again_and_right(box: Watched, effect: FlipBit | Short | PretendDone) -> None:
    box.faults.add(effect, IoKind.READ, nth=1)
    get = Get(box.store, COLD)
    assert ended(box, get) == [Hit(Tier.SSD)] * 3
    assert box.store.stats().ssd_quarantined == 0
    assert box.store.match(COLD).blocks == 3


def test_what_lies_wrong_on_the_drive_is_corrupt_and_costs_no_other(box: Watched) -> None:
    path = next(path for path in box.device.snapshot() if path.name == "00000001.seg")
    where = 4096 + LARGE_NBYTES + 4096 + 5000  # in the payload of block 1
    box.device.poke(path, where, bytes([box.device.snapshot()[path][where] ^ 1]))
    box.store._core.ledger.dram.promotion = Always(keep=False)  # the second read goes to a slot all the same
    get = Get(box.store, COLD)
    assert kinds(ended(box, get)) == ["Hit", "Corrupt", "Hit"]
    assert box.store.stats().ssd_quarantined > 0
    assert box.store.match(COLD).blocks == 1
    assert set(kinds(box.put_now(COLD))) == {"Present", "Stored"}
    assert kinds(ended(box, Get(box.store, COLD))) == ["Hit"] * 3


def test_the_record_of_another_block_is_not_served(box: Watched) -> None:
    path = next(path for path in box.device.snapshot() if path.name == "00000001.seg")
    image = box.device.snapshot()[path]
    box.device.poke(path, 4096, image[4096 + LARGE_NBYTES : 4096 + 2 * LARGE_NBYTES])
    assert kinds(ended(box, Get(box.store, COLD))) == ["Corrupt", "Hit", "Hit"]


def test_a_caller_who_writes_to_memory_it_has_lent_harms_no_copy(box: Watched) -> None:
    def scribble() -> None:
        get.out[5] ^= 1
        box.before_finish = lambda: None

    box.before_finish = scribble
    get = Get(box.store, COLD)
    assert ended(box, get) == [Hit(Tier.SSD)] * 3
    assert sum(nbytes for _, _, nbytes in box.reads) == 4 * LARGE_NBYTES  # block 0 twice
    assert box.store.stats().ssd_quarantined == 0


def test_memory_that_no_drive_can_read_into_is_no_fault_of_the_drive(box: Watched) -> None:
    gate = box.store._core.volumes[0].gate
    for _ in range(3):
        box.faults.add(Fail(errno.EFAULT), IoKind.READ, nth=1)
        box.store._core.ledger.dram.promotion = Always(keep=False)
        get = Get(box.store, COLD)
        assert ended(box, get) == [Hit(Tier.SSD)] * 3
        box.store._core.ledger.evict_idle()
    assert gate.breaker.state(Side.READ) is BreakerState.CLOSED
    assert box.store.stats().ssd_quarantined == 0


def test_a_bad_place_is_given_up_and_named(box: Watched) -> None:
    box.faults.add(Fail(errno.EIO), IoKind.READ)
    assert kinds(ended(box, Get(box.store, COLD))) == ["DeviceFailed"] * 3
    box.faults.clear()
    assert box.store.match(COLD).blocks == 0


# -- what hangs --------------------------------------------------------------------------------------------------------


def test_memory_stays_lent_until_the_drive_answers(box: Watched) -> None:
    box.faults.add(Hang(), IoKind.READ, nth=1)
    get = Get(box.store, COLD)
    box.step(STALL_S + 1)
    box.step(STALL_S + 1)
    assert not get.transfer.done and kinds(get.transfer.outcomes) == ["Pending"] * 3
    box.device.release()
    assert ended(box, get) == [Hit(Tier.SSD)] * 3


def test_a_close_while_the_drive_hangs_says_so_and_keeps_the_memory_lent(box: Watched) -> None:
    box.faults.add(Hang(), IoKind.READ, nth=1)
    get = Get(box.store, COLD)
    assert not box.store.close(1.0)
    assert not get.transfer.done and kinds(get.transfer.outcomes) == ["Pending"] * 3


def test_what_is_invalidated_while_it_is_read_is_gone_after_that(box: Watched) -> None:
    get = Get(box.store, COLD)
    box.store.invalidate(COLD, start=1)
    box.wait(get.transfer)
    get.check()
    box.rest()
    box.check()
    assert box.store.match(COLD).blocks == 1
