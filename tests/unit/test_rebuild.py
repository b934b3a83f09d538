"""From segments to an index: what a restart must not get wrong, beyond what the crash tests meet."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.crash.kit import LAYOUT, MiB, all_hits, chain_of, checked, opened, seal, segments, stored

from kvterrace import Miss, Namespace


def test_put_sequence_numbers_go_on_above_the_highest_seen(tmp_path: Path) -> None:
    seen = 0
    for number in range(4):
        with opened(tmp_path / "kv") as store:
            assert store._core.ledger.next_put_seq > seen
            stored(store, chain_of(number, 5))
            seen = store._core.ledger.next_put_seq - 1
            assert seen >= 5 * (number + 1)


def test_segments_are_numbered_on_and_never_again(tmp_path: Path) -> None:
    for number in range(4):
        with opened(tmp_path / "kv") as store:
            stored(store, chain_of(number, 5))
            seal(store)
    assert [file.name for file in segments(tmp_path / "kv")] == [f"{number:08x}.seg" for number in range(1, 5)]


def test_a_lost_segment_takes_what_hangs_on_it_and_no_more(tmp_path: Path) -> None:
    chain, other = chain_of(0, 12), chain_of(1, 4)
    for blocks in (4, 8, 12):
        with opened(tmp_path / "kv") as store:
            stored(store, chain[:blocks])
            stored(store, other)
            seal(store)
    segments(tmp_path / "kv")[1].unlink()
    with opened(tmp_path / "kv") as store:
        assert store.match(chain).blocks == 4
        all_hits(store, other)
        assert checked(store, chain)[4:] == [Miss()] * 8
        stored(store, chain)
    with opened(tmp_path / "kv") as store:
        all_hits(store, chain)


def test_the_newer_of_two_copies_counts_and_books_are_in_order(tmp_path: Path) -> None:
    from kvterrace.testing.invariants import check_invariants

    chain = chain_of(0, 6)
    for _ in range(3):
        with opened(tmp_path / "kv") as store:
            stored(store, chain)
            store.invalidate(chain, start=2)
            stored(store, chain)
    with opened(tmp_path / "kv") as store:
        check_invariants(store)
        all_hits(store, chain)
        check_invariants(store)
        assert store.stats().ssd_live_nbytes == 6 * 8192


@pytest.mark.parametrize("pinned", [False, True])
def test_an_invalidated_block_in_use_does_not_hold_up_close(tmp_path: Path, pinned: bool) -> None:
    store = opened(tmp_path / "kv", write_behind_s=60.0)
    chain = chain_of(0, 4)
    stored(store, chain)
    pin = store.pin(chain)
    store.invalidate(chain)
    if not pinned:
        pin.release()
    assert store.flush(20.0)
    assert store.close(20.0)
    with opened(tmp_path / "kv") as again:
        assert again.match(chain).blocks == 0


def test_namespaces_of_other_sizes_share_a_segment(tmp_path: Path) -> None:
    sizes = [Namespace(model="m", layout=LAYOUT.__class__(layers, 2, 16, "float16", 16)) for layers in (1, 3, 130)]
    for _ in range(2):
        with opened(tmp_path / "kv", ssd_bytes=64 * MiB) as store:
            for number, namespace in enumerate(sizes):
                stored(store, chain_of(number, 5, namespace))
    with opened(tmp_path / "kv", ssd_bytes=64 * MiB) as store:
        for number, namespace in enumerate(sizes):
            all_hits(store, chain_of(number, 5, namespace))
