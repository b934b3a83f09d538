"""Which blocks DRAM keeps of what is read, against a model that counts one by one."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvterrace.policy.promotion import SecondTouch

SLOT = 4096


def keeps(rule: SecondTouch, *blocks: int, free: int = 0, slot: int = SLOT) -> list[bool]:
    found: list[bool] = rule.keeps(np.array(blocks, np.int32), slot, free * slot).tolist()
    return found


def test_free_room_takes_all_that_fits() -> None:
    rule = SecondTouch(4 * SLOT)
    assert keeps(rule, 1, 2, free=2) == [True, True]
    assert keeps(rule, 3, 4, free=1) == [True, False]
    assert keeps(rule, 3, 4) == [False, True]  # 3 was kept, so it has not passed; 4 has


def test_the_second_touch_is_kept_while_no_more_than_dram_has_passed_since() -> None:
    for between, kept in ((3, True), (4, True), (5, False)):
        rule = SecondTouch(4 * SLOT)
        assert keeps(rule, 7) == [False]
        assert keeps(rule, *range(100, 100 + between)) == [False] * between
        assert keeps(rule, 7) == [kept]


def test_what_is_kept_may_be_asked_of_again() -> None:
    rule = SecondTouch(2 * SLOT)
    assert keeps(rule, 5) == [False]
    assert [keeps(rule, 5) for _ in range(3)] == [[True]] * 3


@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 12), min_size=1, max_size=6, unique=True), st.integers(0, 3)), max_size=30
    ),
    st.integers(1, 8),
)
def test_against_a_model(calls: list[tuple[list[int], int]], dram: int) -> None:
    rule, passed, at = SecondTouch(dram * SLOT), 0, dict[int, int]()
    for blocks, free in calls:
        want, before = [], passed
        for place, block in enumerate(blocks):
            kept = place < free or before - at.get(block, -(10**9)) <= dram
            want.append(kept)
            if not kept:
                passed += 1
                at[block] = passed
        assert keeps(rule, *blocks, free=free) == want
