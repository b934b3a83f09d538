"""Walking one chain again and again finds what there is then, not what there was."""

from __future__ import annotations

import os

import numpy as np
from tests.harness import SMALL

from kvterrace.engine.blocks import BlockTable
from kvterrace.engine.tree import RunTree
from kvterrace.keys import KeyChain

KEYS = os.urandom(32 * 6)
CHAIN = KeyChain(SMALL, SMALL.root_key(), KEYS)
OTHER = KeyChain(SMALL, SMALL.root_key(), KEYS[:96] + os.urandom(64))


def grown(blocks: int) -> RunTree:
    tree = RunTree(BlockTable())
    tree.name(0, SMALL.digest)
    tree.append(None, KEYS[: 32 * blocks], namespace=0, sequence=b"s", depth=0, now_s=0.0)
    return tree


def shares(tree: RunTree, chain: KeyChain, stop: int | None = None) -> list[int]:
    return [count for _, count in tree.walk(chain, stop)]


def test_up_to_other_places() -> None:
    tree = grown(5)
    assert [shares(tree, CHAIN, stop) for stop in (5, 3, None, 2, 5, 0)] == [[5], [3], [5], [2], [5], []]
    assert shares(tree, OTHER) == [3] and shares(tree, CHAIN) == [5]


def test_after_the_run_has_grown_was_cut_and_trimmed() -> None:
    tree = grown(4)
    assert shares(tree, CHAIN) == [4]
    ((run, _),) = tree.walk(CHAIN)
    tree.append(run, KEYS[128:192], namespace=0, sequence=b"s", depth=4, now_s=0.0)
    assert shares(tree, CHAIN) == [6]
    tail = tree.split(run, 3)
    assert shares(tree, CHAIN) == [3, 3]
    tree.table.release(tree.trim(tail, 0))
    assert shares(tree, CHAIN) == [3]
    # The ids of what is gone are given to other blocks, which are no part of the chain.
    _, ids = tree.append(run, OTHER.data[96:], namespace=0, sequence=b"s", depth=3, now_s=0.0)
    assert shares(tree, CHAIN) == [3] and shares(tree, OTHER) == [5]
    assert np.array_equal(tree.walk(OTHER)[0][0].ids[3:], ids)


def test_after_its_end_was_given_up_for_others() -> None:
    tree = grown(5)
    assert shares(tree, CHAIN) == [5]
    ((run, _),) = tree.walk(CHAIN)
    tree.table.release(tree.trim(run, 3))
    tree.append(run, OTHER.data[96:], namespace=0, sequence=b"s", depth=3, now_s=0.0)
    assert shares(tree, CHAIN) == [3]
