"""What a store holds after it was closed and opened again."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.crash.kit import (
    LAYOUT,
    NAMESPACE,
    RECORD_NBYTES,
    MiB,
    all_hits,
    bytes_of,
    chain_of,
    checked,
    child,
    ended,
    hits,
    opened,
    put,
    seal,
    segments,
    stored,
    taken_nbytes,
    until,
)

from kvterrace import Hit, Miss, Namespace, Tier
from kvterrace.format.recovery import SegmentContents, SegmentState, scan_segment

# A LITTLE MORE THAN A RECORD EACH
_SEGMENT = 16


def _state(segment: Path) -> SegmentState:
    data = segment.read_bytes()
    import numpy as np

    contents = scan_segment(lambda at, n: np.frombuffer(data[at : at + n], np.uint8), len(data))
    assert isinstance(contents, SegmentContents), contents
    return contents.state


def test_all_that_was_flushed_is_found_by_another_process(tmp_path: Path) -> None:
    code, out, err = ended(child("store", tmp_path / "kv", 3, 40, "flush-and-die"))
    assert (code, out) == (-9, "flushed True\n"), err
    with opened(tmp_path / "kv") as store:
        for conversation in range(3):
            chain = chain_of(conversation, 40)
            assert store.match(chain).tiers == (Tier.SSD,) * 40
            all_hits(store, chain)


def test_what_was_not_flushed_is_lost_at_most(tmp_path: Path) -> None:
    with opened(tmp_path / "kv") as store:
        stored(store, chain_of(0, 8))
    code, out, err = ended(child("store", tmp_path / "kv", 3, 8, "die"))
    assert (code, out) == (-9, ""), err
    with opened(tmp_path / "kv") as store:
        all_hits(store, chain_of(0, 8))
        for conversation in range(1, 3):
            checked(store, chain_of(conversation, 8))


def test_namespaces_tenants_salts_epochs_and_layouts_never_match(tmp_path: Path) -> None:
    others = [
        chain_of(0, 12, Namespace(model="model", layout=LAYOUT, epoch=1)),
        chain_of(0, 12, Namespace(model="model 2", layout=LAYOUT)),
        chain_of(0, 12, Namespace(model="model", layout=LAYOUT, tenant="a")),
        chain_of(0, 12, NAMESPACE, salt=b"salt"),
        chain_of(0, 12, NAMESPACE, extra=b"lora"),
    ]
    mine = chain_of(0, 12)
    with opened(tmp_path / "kv") as store:
        stored(store, mine)
        assert store.flush()
    with opened(tmp_path / "kv") as store:
        all_hits(store, mine)
        for other in others:
            assert store.match(other).blocks == 0
            assert set(checked(store, other)) == {Miss()}
            stored(store, other)
    with opened(tmp_path / "kv") as store:
        for chain in (mine, *others):
            all_hits(store, chain)


def test_a_conversation_goes_on_and_branches_after_restarts(tmp_path: Path) -> None:
    grown = chain_of(0, 30)
    tokens = list(range(12 * 16)) + [7] * (10 * 16)
    from kvterrace import chain_keys

    branch = chain_keys(NAMESPACE, tokens)
    for blocks in (5, 12, 13, 30):
        with opened(tmp_path / "kv") as store:
            stored(store, grown[:blocks], sequence=b"a")
            if blocks > 12:
                stored(store, branch, sequence=b"b")
                all_hits(store, branch)
            all_hits(store, grown[:blocks])
    for _ in range(2):
        with opened(tmp_path / "kv") as store:
            assert store.match(grown).blocks == 30
            assert store.match(branch).blocks == 22
            all_hits(store, grown)
            all_hits(store, branch)
            shared = [grown.key(index) == branch.key(index) for index in range(22)]
            assert shared == [True] * 12 + [False] * 10


def test_a_block_put_twice_is_stored_once(tmp_path: Path) -> None:
    chain = chain_of(0, 10)
    with opened(tmp_path / "kv") as store:
        stored(store, chain)
    with opened(tmp_path / "kv") as store:
        stored(store, chain)
        assert store.stats().put_present_blocks == 10
        assert store.flush()
        assert store.stats().ssd_written_nbytes == 0


def test_what_was_invalidated_stays_so(tmp_path: Path) -> None:
    chain, other = chain_of(0, 20), chain_of(1, 20)
    with opened(tmp_path / "kv") as store:
        stored(store, chain)
        stored(store, other)
    with opened(tmp_path / "kv") as store:
        store.invalidate(chain, start=5)
        assert store.flush()
        assert store.match(chain).blocks == 5
    for _ in range(2):
        with opened(tmp_path / "kv") as store:
            assert store.match(chain).blocks == 5
            all_hits(store, other)
    with opened(tmp_path / "kv") as store:
        stored(store, chain)
    with opened(tmp_path / "kv") as store:
        all_hits(store, chain)


def test_a_namespace_of_which_all_was_invalidated_can_be_used_again(tmp_path: Path) -> None:
    chain = chain_of(0, 4)
    with opened(tmp_path / "kv") as store:
        stored(store, chain)
        assert store.flush()
        store.invalidate(chain)
    with opened(tmp_path / "kv") as store:
        assert set(checked(store, chain)) == {Miss()}
        stored(store, chain)
    with opened(tmp_path / "kv") as store:
        all_hits(store, chain)


def test_a_large_invalidation_fits_a_small_store(tmp_path: Path) -> None:
    chains = [chain_of(conversation, 30) for conversation in range(10)]
    # one trunk, so that one call invalidates all of it
    with opened(tmp_path / "kv", ssd_bytes=5 * MiB) as store:
        long = chain_of(99, 300)
        stored(store, long)
        for chain in chains:
            stored(store, chain)
        assert store.flush()
        store.invalidate(long)
        assert store.flush()
    with opened(tmp_path / "kv", ssd_bytes=5 * MiB) as store:
        assert store.match(long).blocks == 0
        assert set(checked(store, long)) == {Miss()}


@pytest.mark.parametrize("how", ["close", "die"])
def test_a_cap_holds_over_restarts_with_new_data(tmp_path: Path, how: str) -> None:
    cap = 4 * MiB
    most = 0
    for turn in range(5):
        process = child("fill", tmp_path / "kv", cap, turn, how)
        while process.poll() is None:
            if (tmp_path / "kv" / "partitions" / "main").exists():
                most = max(most, taken_nbytes(tmp_path / "kv"))
        code, _, err = ended(process)
        assert code == (0 if how == "close" else -9), err
        most = max(most, taken_nbytes(tmp_path / "kv"))
    assert cap // 2 < most <= cap
    with opened(tmp_path / "kv", ssd_bytes=cap) as store:
        held = [store.match(chain_of(turn * 1000 + n, 8)).blocks for turn in range(5) for n in range(100)]
        assert sum(held) * RECORD_NBYTES > cap // 4
        until(lambda: taken_nbytes(tmp_path / "kv") == store.stats().ssd_file_nbytes)


def test_other_files_in_the_partition_count_towards_the_cap(tmp_path: Path) -> None:
    cap = 4 * MiB
    with opened(tmp_path / "kv", ssd_bytes=cap) as store:
        stored(store, chain_of(0, 8))
    folder = tmp_path / "kv" / "partitions" / "main"
    (folder / "core.1234").write_bytes(b"x" * MiB)
    (folder / "ffffffff.seg").write_bytes(b"x" * MiB)
    with opened(tmp_path / "kv", ssd_bytes=cap) as store:
        for conversation in range(100):
            stored(store, chain_of(conversation, 8))
            assert taken_nbytes(tmp_path / "kv") <= cap
        assert store.flush()
    assert (folder / "core.1234").exists()
    assert taken_nbytes(tmp_path / "kv") <= cap


def test_a_store_opened_with_a_smaller_cap_shrinks_to_it(tmp_path: Path) -> None:
    with opened(tmp_path / "kv", ssd_bytes=16 * MiB) as store:
        for conversation in range(60):
            stored(store, chain_of(conversation, 24))
            assert store.flush()
    assert taken_nbytes(tmp_path / "kv") > 8 * MiB
    with opened(tmp_path / "kv", ssd_bytes=2 * MiB) as store:
        until(lambda: taken_nbytes(tmp_path / "kv") <= 2 * MiB)
        for conversation in range(60):
            checked(store, chain_of(conversation, 24))
        stored(store, chain_of(100, 24))
        assert store.flush()
        all_hits(store, chain_of(100, 24))
        assert taken_nbytes(tmp_path / "kv") <= 2 * MiB
    assert taken_nbytes(tmp_path / "kv") <= 2 * MiB


def test_blocks_too_large_for_a_smaller_cap_do_not_stop_it(tmp_path: Path) -> None:
    big = Namespace(model="big", layout=LAYOUT.__class__(32, 4, 16, "float16", 16))  # 128 KiB
    chains = [chain_of(number, 8, big) for number in range(4)]
    with opened(tmp_path / "kv", ssd_bytes=16 * MiB) as store:
        for chain in chains:
            stored(store, chain)
    with opened(tmp_path / "kv", ssd_bytes=1 * MiB) as store:
        until(lambda: taken_nbytes(tmp_path / "kv") <= MiB)
        stored(store, chain_of(1, 20))
        assert store.flush(20.0)
        all_hits(store, chain_of(1, 20))
    with opened(tmp_path / "kv", ssd_bytes=1 * MiB) as store:
        all_hits(store, chain_of(1, 20))


def test_segments_that_are_half_full_are_sealed_by_close_and_reopened_by_their_footer(tmp_path: Path) -> None:
    with opened(tmp_path / "kv", ssd_bytes=2 * MiB) as store:
        stored(store, chain_of(0, 8))
    (segment,) = segments(tmp_path / "kv")
    assert _state(segment) is SegmentState.SEALED
    before = segment.read_bytes()
    # payloads are not looked at: the footer is believed, and each read verifies
    with segment.open("r+b") as file:
        file.seek(4096 + 4096 + 100)
        file.write(b"\xff" * 8)
    with opened(tmp_path / "kv", ssd_bytes=2 * MiB) as store:
        assert store.match(chain_of(0, 8)).blocks == 8
        assert not isinstance(checked(store, chain_of(0, 8))[0], Hit)
    segment.write_bytes(before)
    with opened(tmp_path / "kv", ssd_bytes=2 * MiB) as store:  # the place is remembered as bad (R34)
        assert hits(checked(store, chain_of(0, 8))) == [False] + [True] * 7
        assert store.stats().ssd_written_nbytes == 0
        stored(store, chain_of(0, 8))
        all_hits(store, chain_of(0, 8))


def test_an_unsealed_segment_is_scanned_and_appended_to_over_its_torn_tail(tmp_path: Path) -> None:
    ended(child("store", tmp_path / "kv", 1, 12, "flush-and-die"))
    (segment,) = segments(tmp_path / "kv")
    assert _state(segment) is SegmentState.SCANNED
    assert segment.stat().st_size > 3 * MiB
    # a torn tail: half a record behind the last one
    with segment.open("r+b") as file:
        record = file.read()[4096 : 4096 + RECORD_NBYTES]
        file.seek(4096 + 12 * RECORD_NBYTES)
        file.write(record[: RECORD_NBYTES - 512])
    with opened(tmp_path / "kv") as store:
        all_hits(store, chain_of(0, 12))
        stored(store, chain_of(1, 5))
        seal(store)
        until(lambda: _state(segment) is SegmentState.SEALED)
        assert segment.stat().st_size == 4096 + 17 * RECORD_NBYTES + 2 * 4096
    with opened(tmp_path / "kv") as store:
        all_hits(store, chain_of(0, 12))
        all_hits(store, chain_of(1, 5))


def test_partitions_know_nothing_of_each_other(tmp_path: Path) -> None:
    with opened(tmp_path / "kv") as one, opened(tmp_path / "kv", partition="two") as two:
        stored(one, chain_of(0, 4))
        stored(two, chain_of(1, 4))
        assert one.match(chain_of(1, 4)).blocks == 0
    with opened(tmp_path / "kv", partition="two") as two:
        all_hits(two, chain_of(1, 4))
        assert set(checked(two, chain_of(0, 4))) == {Miss()}


def test_a_gap_in_a_chain_is_refused_not_invented(tmp_path: Path) -> None:
    chain = chain_of(0, 8)
    with opened(tmp_path / "kv") as store:
        stored(store, chain[:3])
        assert {type(one).__name__ for one in put(store, chain, 5, 8)} == {"Rejected"}
    with opened(tmp_path / "kv") as store:
        assert store.match(chain).blocks == 3
        stored(store, chain)
        assert bytes_of(chain[:3]) == bytes_of(chain)[: 3 * LAYOUT.block_nbytes]
