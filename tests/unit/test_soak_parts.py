"""The soak's own judgement: what it must notice, on cases small enough to see."""

from __future__ import annotations

import logging
import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.soak import growth
from tests.soak.inject import Shot
from tests.soak.judge import Seen, settle
from tests.soak.memory import Lent
from tests.soak.truth import KINDS, Conversation, Grave, Graves, Pool, chain_of, content, shape_of
from tests.soak.verdict import LogTap, Verdict
from tests.soak.watch import Watchdog
from tests.soak.witness import Segments

from kvterrace import Corrupt, Hit, Miss, StoreStats, Tier
from kvterrace.format.record import record_nbytes_for

ONE = Conversation(0, 3, 0)
WHERE = "/store/partitions/main/00000001.seg@4096"
CORRUPT = Corrupt(WHERE, "part 2: wrong checksum")


def test_records_are_as_large_as_the_soak_says() -> None:
    for kind in KINDS:
        assert record_nbytes_for(kind.namespace.layout.part_nbytes) == kind.record_nbytes
        assert kind.covered_nbytes <= kind.record_nbytes


def test_contents_differ_between_keys_and_between_places() -> None:
    chain = chain_of(ONE)
    blocks = [content(key, 16384).tobytes() for key in chain]
    assert len(set(blocks)) == len(chain)
    pages = {block[at : at + 4096] for block in blocks for at in range(0, 16384, 4096)}
    assert len(pages) == 4 * len(chain)


def test_conversations_of_a_group_share_its_prefix_and_no_more() -> None:
    one, other = chain_of(ONE), chain_of(Conversation(0, 3 + KINDS[0].groups, 0))
    prefix, _ = shape_of(ONE)
    same = [a == b for a, b in zip(one, other, strict=False)]
    assert all(same[:prefix]) and not any(same[prefix:])
    assert chain_of(Conversation(0, 3, 1)).data[prefix * 32 :] != one.data[prefix * 32 :]


@pytest.mark.parametrize("seed", range(4))  # both forms of memory
@pytest.mark.parametrize("kind", range(len(KINDS)))
def test_memory_is_looked_at_to_the_last_byte(kind: int, seed: int) -> None:
    chain = next(chain for slot in range(60) if len(chain := chain_of(Conversation(kind, slot, 0))) >= 2)
    lent = Lent(random.Random(seed), chain, 0, 2)
    missed: list[Any] = [Miss(), Miss()]
    assert lent.wrong(missed) is None
    hits: list[Any] = [Hit(Tier.DRAM), Hit(Tier.SSD)]
    assert lent.wrong(hits) is not None
    full = Lent(random.Random(seed), chain, 0, 2).fill()
    assert full.wrong(hits) is None and full.wrong([hits[0], Miss()]) is not None
    for at in random.Random(seed).sample(range(len(full.memory)), 20):
        full.memory[at] ^= 1
        assert full.wrong(hits) is not None, at
        full.memory[at] ^= 1
    assert full.wrong(hits) is None


def test_layers_are_the_right_part_of_a_block() -> None:
    chain = chain_of(ONE)
    layers = range(1, 3)
    for seed in range(4):
        lent = Lent(random.Random(seed), chain, 0, 1, layers).fill()
        # layers of 2 parts of 2,048 B each, by hand
        wanted = content(chain.key(0), 16384)[4096 : 3 * 4096]
        assert lent.width == 8192
        if isinstance(lent.argument, list):
            assert np.array_equal(np.concatenate([part[0] for part in lent.argument]), wanted)
        else:
            assert np.array_equal(lent.argument, wanted)


def _settled(seen: Seen, shots: list[Shot], discards: list[str], segments: Segments | None = None) -> Verdict:
    verdict, stats = Verdict(), StoreStats()
    for name, count in seen.counts.items():
        if hasattr(stats, name):
            setattr(stats, name, count)
    settle(seen, stats, shots, discards, segments or Segments(), verdict, at_rest=True)
    return verdict


def _flip(start: int, *must: str) -> Shot:
    return Shot("read-flip", "00000001.seg", start, start + 4096, list(must))


def test_a_fault_that_was_told_is_settled() -> None:
    seen = Seen()
    seen.get([CORRUPT], 0)
    assert _settled(seen, [_flip(4096, WHERE)], [WHERE]).count == 0


def test_a_fault_that_nobody_was_told_of_is_a_failure() -> None:
    assert _settled(Seen(), [_flip(4096, WHERE)], []).kinds == {"silent fault": 1}


@pytest.mark.parametrize("shots", [[], [_flip(1 << 30)], [Shot("read-slow", "00000001.seg", 4096, 8192)]])
def test_damage_without_a_fault_there_is_a_failure(shots: list[Shot]) -> None:
    seen = Seen()
    seen.get([CORRUPT], 0)
    assert _settled(seen, shots, []).kinds == {"unexplained": 1}
    assert _settled(Seen(), shots, [WHERE]).kinds == {"unexplained": 1}


def test_damage_where_a_write_was_lost_is_explained() -> None:
    segments = Segments()
    segments.damage("00000001.seg", 8192, 12288)
    seen = Seen()
    seen.get([CORRUPT], 0)
    assert _settled(seen, [], [], segments).count == 0
    segments.forget_missing(Path("/nowhere"))
    assert _settled(seen, [], [], segments).count == 1


def test_counts_that_differ_are_a_failure() -> None:
    verdict, seen = Verdict(), Seen()
    seen.get([Miss(), Hit(Tier.SSD)], 1)
    stats = StoreStats(get_miss_blocks=1, get_dram_blocks=1)
    settle(seen, stats, [], [], Segments(), verdict, at_rest=True)
    assert verdict.kinds == {"count": 2}  # one too few from the SSD, one too many from DRAM


@pytest.mark.parametrize(("failed", "failures"), [(0, 1), (1, 0), (2, 0), (3, 1)])
def test_failed_writes_are_counted_against_those_injected(failed: int, failures: int) -> None:
    verdict = Verdict()
    shots = [Shot("write-eio", "00000001.seg", 0, 1), Shot("sync-eio", "00000001.seg", 0, 1)]
    settle(Seen(), StoreStats(ssd_write_failures=failed), shots, [], Segments(), verdict, at_rest=True)
    assert verdict.count == failures


def test_graves_outlive_a_restart_if_durable_and_their_tombstone_is_whole() -> None:
    graves = Graves()
    some = [Grave(Conversation(0, slot, 0), 0, 1, durable=slot != 1) for slot in range(3)]
    for grave in some:
        graves.dig(grave)
    segments = Segments()
    segments.note_tombstones("00000007.seg", some[2].keys)
    segments.note_tombstones("00000008.seg", some[0].keys)
    segments.damage("00000007.seg", 0, 1)
    lost = segments.lost_tombstones()
    graves.end_of_life(lambda grave: bool(grave.keys & lost))
    assert graves.each() == [some[0]] and (graves.undurable, graves.exempted) == (1, 1)


def test_a_retired_conversation_is_not_met_again() -> None:
    pool, rng = Pool(1), random.Random(1)
    one = pool.take(rng)
    pool.retire(one)
    pool.give_back(one)
    again = pool.take(rng)
    while (again.kind, again.slot) != (one.kind, one.slot):
        again = pool.take(rng)
    assert again.generation == one.generation + 1


def test_slope_is_that_of_the_line_whatever_a_few_points_are() -> None:
    points = [(float(x), 3.0 * x + 1.0) for x in range(12)]
    points[4], points[9] = (4.0, 1e9), (9.0, -1e9)
    assert growth.slope(points) == 3.0
    assert growth.grown(points) == 33.0
    assert growth.grown(points[: growth.FEWEST - 1]) == 0.0
    assert growth.after_warm_up(points, 0.0, 12.0)[0][0] == 4.0


def test_the_watchdog_barks_at_what_is_late_and_at_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.soak.watch.SLACK_S", 0.1)
    monkeypatch.setattr("faulthandler.dump_traceback", lambda *_, **__: None)
    heard: list[str] = []
    bark = threading.Event()

    def on_hang(text: str) -> None:
        heard.append(text)
        bark.set()

    dog = Watchdog(on_hang)
    dog.start()
    with dog.op("quick", 3600.0):
        pass
    with dog.op("outer", 3600.0), dog.op("get", 0.0):
        assert bark.wait(60.0)
    dog.stop()
    assert len(heard) == 1 and heard[0].startswith("get has not ended")


def test_errors_in_the_log_are_failures_and_discards_are_kept() -> None:
    verdict = Verdict()
    tap = LogTap(verdict)
    log = logging.getLogger("soak-test")
    log.propagate = False
    log.addHandler(tap)
    log.warning("%s: %s; this copy is discarded", WHERE, "why")
    log.error("copying to a caller's buffer failed")
    assert tap.discards == [WHERE] and verdict.kinds == {"error logged": 1}
