"""Scores of attention decide what leaves DRAM (R18), with some that a model gave (`fixtures/make_attention.py`)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from tests.harness import Box, kinds

from kvterrace.engine.attention import RECENT_TOKENS, SCORE_HALF_LIFE_S
from kvterrace.keys import KeyChain, Namespace, chain_keys
from kvterrace.layout import KVLayout
from kvterrace.types import Tier

#: As recorded: [step, layer group, block], what the queries of a step gave to each block.
RECORDED: npt.NDArray[np.float32] = np.load(Path(__file__).parents[1] / "fixtures" / "attention.npz")["scores"]
STEPS, GROUPS, BLOCKS = RECORDED.shape
BLOCK_TOKENS = 32
SMALL = Namespace("scored", KVLayout(layers=2, kv_heads=1, head_dim=1, dtype="float16", block_tokens=BLOCK_TOKENS))


def chain(way: int, blocks: int) -> KeyChain:
    return chain_keys(SMALL, np.full(blocks * BLOCK_TOKENS, way, np.int64))


def filled(tmp_path: Path, *chains: KeyChain, dram_blocks: int) -> Box:
    box = Box(tmp_path / "store", dram_blocks=dram_blocks, segments=40)
    for one in chains:
        assert set(kinds(box.put_now(one))) == {"Stored"}
        box.step(1.0)
    assert box.store.flush(100.0)
    return box


def in_dram(box: Box, one: KeyChain) -> list[int]:
    return [at for at, tier in enumerate(box.store.match(one).tiers) if tier is Tier.DRAM]


def model(steps: int, every_s: float) -> npt.NDArray[np.float64]:
    """Scores of blocks after so many steps, in float64."""
    fade = 0.5 ** (every_s / SCORE_HALF_LIFE_S)
    found = np.zeros(BLOCKS)
    for step in range(steps):
        found = found * fade + RECORDED[step].astype(np.float64).sum(0)
    return found


def test_recorded_scores_are_what_they_say() -> None:
    """Every query gives 1 to what is before it; the first block, a sink, has more than any other of its size."""
    assert (STEPS, GROUPS, BLOCKS) == (12, 3, 48)
    assert RECORDED.sum(axis=2) == pytest.approx(np.ones((12, 3)), abs=1e-4)
    assert (RECORDED[:, :, 0] == RECORDED.max(axis=2)).all()


def test_the_coldest_blocks_leave_first_sinks_and_recent_ones_stay(tmp_path: Path) -> None:
    mine = chain(1, BLOCKS)
    box = filled(tmp_path, mine, dram_blocks=BLOCKS)
    for step in range(STEPS):
        box.store.touch(mine, scores=RECORDED[step])
        box.step(10.0)
    scores = model(STEPS, 10.0)
    recent = RECENT_TOKENS // BLOCK_TOKENS
    may = [at for at in range(1, BLOCKS - recent) if scores[at] < 0.7 * scores[1:].mean()]
    coldest = sorted(may, key=lambda at: scores[at])
    assert len(coldest) >= 3, "the recording has some"
    box.put_now(chain(2, 2))
    assert sorted(set(range(BLOCKS)) - set(in_dram(box, mine))) == sorted(coldest[:2])
    box.put_now(chain(3, len(coldest) - 1))
    gone = set(range(BLOCKS)) - set(in_dram(box, mine))
    assert gone == {*coldest, BLOCKS - 1}, "then the tail, as ever"
    box.check()
    assert set(kinds(box.get_now(mine))) == {"Hit"}, "the drive has all of it"


def test_a_sink_and_what_is_recent_are_not_cold_whatever_they_have(tmp_path: Path) -> None:
    mine = chain(1, BLOCKS)
    box = filled(tmp_path, mine, dram_blocks=BLOCKS)
    scores = np.ones(BLOCKS)
    scores[[0, 5, BLOCKS - RECENT_TOKENS // BLOCK_TOKENS, BLOCKS - 1]] = 0.0
    box.store.touch(mine, scores=scores)
    box.put_now(chain(2, 3))
    assert sorted(set(range(BLOCKS)) - set(in_dram(box, mine))) == [5, BLOCKS - 2, BLOCKS - 1]
    box.check()


def test_a_well_attended_run_is_passed_over_once_until_its_scores_have_faded(tmp_path: Path) -> None:
    for wait_s, stays in ((1.0, True), (20 * SCORE_HALF_LIFE_S, False)):
        old, young, more = chain(1, 4), chain(2, 4), chain(3, 4)
        box = filled(tmp_path / str(stays), old, young, dram_blocks=8)
        box.store.touch(old, scores=np.full(4, 5.0))
        box.store.touch(young, scores=np.full(4, 0.1))
        box.step(wait_s)
        box.put_now(more)
        assert (len(in_dram(box, old)), len(in_dram(box, young))) == ((4, 0) if stays else (0, 4))
        if stays:
            assert box.store.flush(100.0)
            box.put_now(chain(4, 4))  # `more` was used since `old` was passed over: it had its delay
            box.put_now(chain(5, 4))
            assert in_dram(box, old) == []
        box.check()


def test_scores_by_layer_group_follow_the_run(tmp_path: Path) -> None:
    mine = chain(1, 4)
    box = filled(tmp_path, mine, dram_blocks=8)
    given = np.array([[1.0, 2.0, 3.0, 4.0], [10.0, 0.0, 0.0, 0.0]])
    box.store.touch(mine, scores=given)
    ledger = box.store._core.ledger
    now_s = box.clock.monotonic_s()
    (run,) = list(ledger.tree)
    assert ledger.attention.by_group(run.number, now_s) == pytest.approx([10.0, 10.0])
    assert ledger.attention.by_group(run.number, now_s + SCORE_HALF_LIFE_S) == pytest.approx([5.0, 5.0])
    tokens = np.array([1] * 2 * BLOCK_TOKENS + [9] * 2 * BLOCK_TOKENS)
    box.put_now(chain_keys(SMALL, tokens), 2)  # a fork after two blocks: they have 1 + 2 + 10 of 20
    sums = [
        ledger.attention.by_group(one.number, now_s).sum() for one in ledger.tree if one.number in ledger.attention.runs
    ]
    assert sorted(sums) == pytest.approx([7.0, 13.0])
    box.check()
    box.store.invalidate(mine)
    box.rest()
    box.check()
    assert not ledger.attention.runs


def test_what_dram_alone_holds_is_not_cold(tmp_path: Path) -> None:
    """A hole in a chain without a copy below would take all behind it along."""
    del tmp_path
    mine = chain(1, BLOCKS)
    box = Box(None, dram_blocks=BLOCKS)
    box.put_now(mine)
    for step in range(STEPS):
        box.store.touch(mine, scores=RECORDED[step])
        box.step(10.0)
    scores = model(STEPS, 10.0)
    assert (scores[1 : BLOCKS - RECENT_TOKENS // BLOCK_TOKENS] < 0.7 * scores[1:].mean()).sum() > 1, "some are cold"
    box.put_now(chain(2, 3))
    assert in_dram(box, mine) == list(range(BLOCKS - 3))
    box.check()


@pytest.mark.parametrize("shape", [(17, 4), (0, 4), (1, 1, 4), (2, 3), (3,)])
def test_other_shapes_are_refused(tmp_path: Path, shape: tuple[int, ...]) -> None:
    from kvterrace.errors import ConfigError

    box = filled(tmp_path, chain(1, 4), dram_blocks=8)
    with pytest.raises(ConfigError, match="scores"):
        box.store.touch(chain(1, 4), scores=np.zeros(shape))
