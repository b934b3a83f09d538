"""Blocks by key, against a dict, while they come and go."""

from __future__ import annotations

import numpy as np
import pytest

from kvterrace.engine import key_index
from kvterrace.engine.blocks import BlockTable, Ids
from kvterrace.engine.key_index import KeyIndex


def enter(table: BlockTable, keys: list[bytes]) -> Ids:
    ids = table.allocate(len(keys))
    table.key[ids] = np.frombuffer(b"".join(keys), np.uint8).reshape(-1, 32)
    table.run[ids] = 0
    return ids


@pytest.mark.parametrize("few", [1, 64, 4096])
@pytest.mark.parametrize("seed", range(3))
def test_what_a_dict_finds_while_blocks_come_and_go(monkeypatch: pytest.MonkeyPatch, seed: int, few: int) -> None:
    """Ids are used again, keys come back, and many keys share their first eight bytes."""
    monkeypatch.setattr(key_index, "_LOOSE", few)
    rng = np.random.default_rng(seed)
    starts = [rng.bytes(8) for _ in range(40)]
    names = [starts[int(rng.integers(40))] + rng.bytes(24) if rng.random() < 0.5 else rng.bytes(32) for _ in range(900)]
    table, reference = BlockTable(), dict[bytes, int]()
    before = names[:100]
    reference.update(zip(before, enter(table, before).tolist(), strict=True))
    index = KeyIndex(table)
    for _ in range(120):
        new = [name for name in {names[at] for at in rng.integers(0, 900, 40).tolist()} if name not in reference]
        reference.update(zip(new, enter(table, new).tolist(), strict=True))
        if rng.random() < 0.7:
            gone = [name for name in reference if rng.random() < 0.1]
            table.release(np.array([reference.pop(name) for name in gone], np.int32))
        if rng.random() < 0.6:
            asked = [names[at] for at in rng.permutation(900)[:200].tolist()]
            assert index.find(asked) == {name: reference[name] for name in asked if name in reference}
            assert list(index.find(asked)) == [name for name in asked if name in reference]
    assert index.find([]) == {}
    assert index.find(names) == {name: reference[name] for name in names if name in reference}


def test_blocks_that_are_gone_are_forgotten() -> None:
    table = BlockTable()
    index = KeyIndex(table)
    rng = np.random.default_rng(1)
    for _ in range(20):
        ids = enter(table, [rng.bytes(32) for _ in range(5000)])
        index.find([])
        table.release(ids)
    assert len(index._ids) + len(index._loose) <= 2 * 5000


def test_what_came_is_not_kept_twice() -> None:
    table = BlockTable()
    index = KeyIndex(table)
    for number in range(50):
        enter(table, [bytes([number]) * 32])
        index.find([])
    assert not index._came
    assert index.find([bytes([7]) * 32, bytes([99]) * 32]) == {bytes([7]) * 32: 7}
