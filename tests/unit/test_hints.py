"""What clients say of the future: what it changes, and how it ends (R48)."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.harness import SMALL, Box, chain_of, kinds
from tests.unit.test_ledger import RECORD

from kvterrace.engine import hints as module
from kvterrace.engine.hints import HOLDS_S, REPRIEVES, Hints
from kvterrace.engine.ledger import Geometry, Ledger
from kvterrace.errors import ConfigError
from kvterrace.policy.eviction import LruTailFirst
from kvterrace.types import Hint, Hit, Tier

A, B, C = (chain_of(SMALL, [way] * 4) for way in (1, 2, 3))


def two_chains(tmp_path: Path) -> Box:
    """DRAM is full of A (used first) and B, both on the drive, too."""
    box = Box(tmp_path / "store", dram_blocks=8, segments=24)
    box.put_now(A, sequence=b"a")
    box.step(1.0)
    box.put_now(B, sequence=b"b")
    assert box.store.flush(100.0)
    return box


def in_dram(box: Box, chain: Any) -> int:
    return box.store.match(chain).tiers.count(Tier.DRAM)


@pytest.mark.parametrize("kind", [Hint.CLOSED, Hint.ONE_OFF])
def test_what_is_over_goes_before_what_was_used_longer_ago(tmp_path: Path, kind: Hint) -> None:
    box = two_chains(tmp_path)
    box.store.hint(b"b", kind)
    box.put_now(C, 0, 2, sequence=b"c")
    assert (in_dram(box, A), in_dram(box, B)) == (4, 2)
    assert box.store.match(B).tiers == (Tier.DRAM,) * 2 + (Tier.SSD,) * 2, "its tail first"
    box.check()


@pytest.mark.parametrize(
    ("kind", "seconds"), [(Hint.SHARED, None), (Hint.PRIORITY, None), (Hint.RETURNS, 30.0), (Hint.PRIORITY, 5.0)]
)
def test_what_is_to_stay_goes_after_what_was_used_later(tmp_path: Path, kind: Hint, seconds: float | None) -> None:
    box = two_chains(tmp_path)
    box.store.hint(b"a", kind, seconds=seconds)
    box.put_now(C, sequence=b"c")
    assert (in_dram(box, A), in_dram(box, B)) == (4, 0)
    box.check()


def test_nothing_is_kept_for_ever_unused(tmp_path: Path) -> None:
    """Every four blocks that come take the place of others; what is passed over each time is gone after the last."""
    box = two_chains(tmp_path)
    box.store.hint(b"a", Hint.PRIORITY)
    stayed = 0
    while in_dram(box, A):
        box.put_now(chain_of(SMALL, [100 + stayed] * 4), sequence=bytes([100 + stayed]))
        assert box.store.flush(100.0)
        stayed += 1
    # the hint itself counts as a use; then it is passed over so often, and goes with its next turn
    assert REPRIEVES <= stayed <= 2 * (REPRIEVES + 2)
    box.check()


def test_a_use_ends_what_was_wrong(tmp_path: Path) -> None:
    box = two_chains(tmp_path)
    box.store.hint(b"b", Hint.CLOSED)
    box.step(5.0)
    assert kinds(box.get_now(B)) == ["Hit"] * 4  # it was not over
    box.put_now(C, 0, 2, sequence=b"c")
    assert (in_dram(box, A), in_dram(box, B)) == (2, 4)
    box.check()


def test_what_others_hang_on_is_not_over_with_the_sequence_that_put_it(tmp_path: Path) -> None:
    box = Box(tmp_path / "store", dram_blocks=8, segments=24)
    box.put_now(chain_of(SMALL, [1, 1, 2, 2]), sequence=b"first")
    box.put_now(chain_of(SMALL, [1, 1, 3, 3]), sequence=b"second")
    assert box.store.flush(100.0)
    box.store.hint(b"first", Hint.CLOSED)
    box.put_now(chain_of(SMALL, [4] * 5), sequence=b"c")  # two slots are free, three more are wanted
    assert box.store.match(chain_of(SMALL, [1, 1, 2, 2])).tiers == (Tier.DRAM,) * 2 + (Tier.SSD,) * 2
    assert box.store.match(chain_of(SMALL, [1, 1, 3, 3])).tiers == (Tier.DRAM,) * 3 + (Tier.SSD,)
    box.check()


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("kind", [Hint.CLOSED, Hint.ONE_OFF])
def test_what_is_over_is_not_written_and_leaves_with_its_slot(tmp_path: Path, kind: Hint, when: str) -> None:
    box = Box(tmp_path / "store", dram_blocks=8, segments=24)
    if when == "before" and kind is Hint.ONE_OFF:
        box.store.hint(b"a", kind)
    box.put_now(A, sequence=b"a")
    box.store.hint(b"a", kind)
    box.put_now(B, sequence=b"b")
    box.step(60.0)
    box.rest()
    assert box.store.flush(100.0), "it is owed to nobody"
    assert box.store.match(A).tiers == (Tier.DRAM,) * 4
    assert box.store.stats().ssd_refused_blocks == 4
    box.put_now(C, sequence=b"c")
    assert box.store.match(A).blocks == 0
    assert box.store.stats().dropped_blocks == 4
    box.check()
    assert box.reopen()
    assert (box.store.match(A).blocks, box.store.match(B).blocks) == (0, 4)


def test_what_comes_of_a_one_off_sequence_goes_before_what_is_older(tmp_path: Path) -> None:
    box = Box(tmp_path / "store", dram_blocks=8, segments=24)
    box.store.hint(b"b", Hint.ONE_OFF)
    box.put_now(A, sequence=b"a")
    box.step(1.0)
    box.put_now(B, sequence=b"b")
    assert box.store.flush(100.0)
    box.put_now(C, 0, 2, sequence=b"c")
    assert (in_dram(box, A), in_dram(box, B)) == (4, 2)
    box.check()


def test_what_was_not_written_is_owed_again_once_it_was_used(tmp_path: Path) -> None:
    box = Box(tmp_path / "store", dram_blocks=12, segments=24)
    box.put_now(A, sequence=b"a")
    box.store.hint(b"a", Hint.CLOSED)
    assert box.store.flush(100.0)
    box.step(10.0)
    assert box.get_now(A) == [Hit(Tier.DRAM)] * 4
    box.check()
    assert box.store.stats().dirty_nbytes > 0
    box.cool()
    assert box.get_now(A) == [Hit(Tier.SSD)] * 4
    box.check()


def test_on_the_drive_what_is_over_goes_first_and_what_is_to_stay_later(tmp_path: Path) -> None:
    """By age the chains go one by one, in the order they were put; one of them fills most of a segment."""
    left: dict[bool, list[int]] = {}
    for hinted in (False, True):
        box = Box(tmp_path / str(hinted), dram_blocks=8, segments=8)
        chains = [chain_of(SMALL, [way] * 6) for way in range(12)]
        for way, chain in enumerate(chains):
            box.put_now(chain, sequence=bytes([1, way]))
            assert box.store.flush(100.0)
            if hinted and way == 6:
                box.store.hint(bytes([1, 2]), Hint.SHARED)
            if hinted and way == 9:
                box.store.hint(bytes([1, 8]), Hint.CLOSED)
            box.step(400.0)
        left[hinted] = [box.store.match(chain).blocks for chain in chains]
        box.check()
    assert (left[False][2], left[False][8]) == (0, 6)
    assert (left[True][2], left[True][8]) == (6, 0)


def test_hints_are_bounded_expire_and_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a dict that remembers all, and by hand for what counts when."""
    monkeypatch.setattr(module, "MOST_HINTS", 50)
    rng, hints, model = random.Random(5), Hints(), dict[bytes, tuple[Hint, float]]()
    now_s = 0.0
    for _ in range(3000):
        now_s += rng.random() * 100.0
        name = bytes([rng.randrange(70)])
        match rng.randrange(3):
            case 0:
                kind = rng.choice(list(Hint))
                seconds = rng.choice([None, 1.0, 200.0, 1e6])
                if kind is Hint.RETURNS:
                    holds_s = min(max(2 * (seconds or 0.0), 10.0), 600.0)
                else:
                    holds_s = HOLDS_S if seconds is None else seconds
                hints.give(name, kind, seconds, now_s)
                model.pop(name, None)
                model[name] = (kind, now_s + holds_s)
                while len(model) > 50:
                    del model[next(iter(model))]
            case 1:
                idle_s = rng.choice([0.5, 5.0])
                hints.came_back(name, idle_s, now_s)
                known = model.get(name)
                if known is not None and now_s < known[1]:
                    if known[0] in (Hint.CLOSED, Hint.RETURNS) or (known[0] is Hint.ONE_OFF and idle_s >= 1.0):
                        del model[name]
                elif known is not None:
                    del model[name]
            case 2:
                known = model.get(name)
                if known is not None and now_s >= known[1]:
                    del model[name]
                    known = None
                assert hints.of(name, now_s) == (None if known is None else known[0])
        assert len(hints) == len(model) <= 50


def dram_alone(slots: int) -> Ledger:
    ledger = Ledger(slots * RECORD, None)
    ledger.add_namespace(0, Geometry(4096, 256), SMALL.digest)
    return ledger


def put(ledger: Ledger, chain: Any, start: int, sequence: bytes) -> list[int]:
    ids, _ = ledger.begin_put(chain, start, len(chain), namespace=0, sequence=sequence, now_s=0.0)
    ledger.filled_all(ids, 0.0)
    ledger.let_go_all(ids)
    assert len(ids) == len(chain) - start
    return [int(one) for one in ids]


def test_the_order_is_that_of_two_lists() -> None:
    """Random uses, some let go, some passed over, against plain lists. Each run is one block and stands for itself."""
    for seed in range(20):
        rng = random.Random(seed)
        ledger = dram_alone(30)
        dram, chains = ledger.dram, [chain_of(SMALL, [way]) for way in range(30)]
        blocks = [put(ledger, chain, 0, bytes([1, way]))[0] for way, chain in enumerate(chains)]
        lives = {block: rng.randrange(3) for block in blocks}
        runs = {int(ledger.table.run[block]): block for block in blocks}
        left = dict(lives)

        def spares(run: int, left: dict[int, int] = left, runs: dict[int, int] = runs) -> Any:
            left[runs[run]] -= 1
            return np.array([runs[run]] if left[runs[run]] >= 0 else [], np.int32)

        dram.spares = spares
        inside, line = list(blocks), list[int]()
        for _ in range(300):
            match rng.randrange(3):
                case 0:
                    way = rng.randrange(30)
                    ledger.touch(chains[way], 1, 0.0)
                    inside = [one for one in inside if one != blocks[way]] + [blocks[way]]
                    line = [one for one in line if one != blocks[way]]
                case 1:
                    going = [one for one in rng.sample(blocks, 3) if one not in line]
                    dram.let_go(np.array(going, np.int32))
                    inside = [one for one in inside if one not in going]
                    line += going
                case 2:
                    wanted = count = rng.randrange(1, 4)
                    expected, passed = line[:wanted], set[int]()
                    line = line[wanted:]
                    while len(expected) < wanted and inside:
                        turn, inside = inside[:count], inside[count:]
                        stay = [one for one in turn if one not in passed and lives[one] > 0]
                        for one in turn:
                            lives[one] -= one not in passed
                        passed.update(stay)
                        inside += stay
                        line += [one for one in turn if one not in stay]
                        more = wanted - len(expected)
                        expected, line, count = expected + line[:more], line[more:], 2 * count
                    got = dram.victims(wanted * RECORD, droppable=True)
                    assert got.tolist() == expected
                    dram.line.add(got)  # they are not given up after all
                    line += expected
            assert dram.line.ids().tolist() == line
            assert sorted(inside + line) == blocks


def test_what_is_kept_keeps_what_it_hangs_on() -> None:
    ledger = dram_alone(12)
    put(ledger, chain_of(SMALL, [1, 1]), 0, b"begins")
    put(ledger, chain_of(SMALL, [1, 1, 2, 2]), 2, b"goes on")
    later = put(ledger, B, 0, b"later")
    ledger.hint(b"goes on", Hint.PRIORITY, None, 1.0)
    ledger.touch(B, 4, 2.0)  # now it is the turn of the four before it
    going = ledger.dram.victims(4 * RECORD, droppable=True)
    assert going.tolist() == later[::-1]


def test_a_policy_that_takes_hints_is_told_where_the_sequence_ends() -> None:
    told: list[tuple[int, str, float, float]] = []

    class Policy(LruTailFirst):
        def hint(self, key: int, kind: str, seconds: float, now_s: float) -> None:
            told.append((key, kind, seconds, now_s))

    ledger = Ledger(16 * RECORD, None, policy=Policy())
    ledger.add_namespace(0, Geometry(4096, 256), SMALL.digest)
    left, right = chain_of(SMALL, [1, 1, 2]), chain_of(SMALL, [1, 1, 3])
    for chain, start in ((left, 0), (right, 2)):
        ids, _ = ledger.begin_put(chain, start, 3, namespace=0, sequence=b"a", now_s=0.0)
        for block in ids.tolist():
            ledger.filled(block, 0.0)
            ledger.let_go(block)
    ledger.hint(b"a", Hint.RETURNS, 7.0, 2.0)
    ledger.hint(b"unknown", Hint.CLOSED, None, 3.0)
    ends = {int.from_bytes(chain.key(2)[:8], "little") for chain in (left, right)}
    assert {one[0] for one in told} == ends and {one[1:] for one in told} == {("returns", 7.0, 2.0)}
    ledger.hint(b"a", Hint.ONE_OFF, None, 4.0)
    assert {one[1:] for one in told[2:]} == {("one_off", HOLDS_S, 4.0)}


@pytest.mark.parametrize(
    "arguments",
    [
        {"sequence": b"", "kind": Hint.CLOSED},
        {"sequence": bytes(16), "kind": Hint.CLOSED},
        {"sequence": "a", "kind": Hint.CLOSED},
        {"sequence": b"x" * 17, "kind": Hint.CLOSED},
        {"sequence": b"a", "kind": "closed"},
        {"sequence": b"a", "kind": Hint.RETURNS},
        {"sequence": b"a", "kind": Hint.RETURNS, "seconds": -1.0},
        {"sequence": b"a", "kind": Hint.SHARED, "seconds": "long"},
    ],
)
def test_what_is_no_hint_is_refused(tmp_path: Path, arguments: dict[str, Any]) -> None:
    box = Box(tmp_path / "store")
    with pytest.raises(ConfigError) as caught:
        box.store.hint(**arguments)
    assert "\n" not in str(caught.value)
    box.store.hint(b"never seen", Hint.SHARED)
