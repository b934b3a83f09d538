"""What `inspect_store` says, against the bytes that lie there."""

from __future__ import annotations

import os
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
from tests.unit.store_images import (
    LAYOUT,
    NAMESPACE,
    PAGE,
    RECORD,
    chain,
    crashed_store,
    flip,
    opened,
    page_sum,
    patch,
    put,
    records,
    sealed_store,
    segments,
    snapshot,
)

from kvterrace import FormatVersionError, Namespace, NotAStoreError, StoreUnusableError, chain_keys
from kvterrace.format.segment import ENTRY_DTYPE
from kvterrace.observe.chains import Chains
from kvterrace.observe.inspected import PartitionReport, SegmentCondition, SegmentReport
from kvterrace.observe.inspection import inspect_store


def only(root: Path) -> PartitionReport:
    (partition,) = inspect_store(root).partitions
    return partition


def condition(root: Path, path: Path) -> SegmentReport:
    (found,) = (one for one in only(root).segments if one.path == path)
    return found


def test_an_empty_store_has_a_partition_and_nothing_in_it(tmp_path: Path) -> None:
    opened(tmp_path / "kv").close()
    report = inspect_store(tmp_path / "kv")
    assert report.problems == []
    assert report.namespaces == {}
    (partition,) = report.partitions
    assert (partition.name, partition.segments, partition.shares) == ("main", [], [])
    assert partition.written_nbytes_at_most_about == 0


def test_counts_and_bytes_are_those_on_the_drive(tmp_path: Path) -> None:
    root = tmp_path / "kv"
    other = Namespace("weights-2", LAYOUT, epoch=3)
    with opened(root) as store:
        put(store, chain(16 * 9), sequence=b"conv-1")
        put(store, chain(16 * 4, first=5000), sequence=b"conv-2")
        put(store, chain(16 * 2, first=9000))
        put(store, chain(16 * 3, namespace=other), sequence=b"conv-1")
    report = inspect_store(root)
    (partition,) = report.partitions
    found = [record for path in segments(root) for record in records(path)]
    assert len(found) == 18
    shares = {share.digest: share for share in partition.shares}
    assert set(shares) == {NAMESPACE.digest, other.digest}
    for digest, blocks, sequences, unnamed, runs in ((NAMESPACE.digest, 15, 2, 2, 3), (other.digest, 3, 1, 0, 1)):
        share, mine = shares[digest], [record for record in found if record.namespace == digest]
        assert (share.blocks, share.orphan_blocks) == (blocks, 0)
        assert share.record_nbytes == sum(record.nbytes for record in mine) == blocks * RECORD
        assert share.payload_nbytes == blocks * LAYOUT.block_nbytes
        assert (share.sequences, share.unnamed_blocks, share.runs) == (sequences, unnamed, runs)
        assert share.oldest_unix_ns == min(record.created_unix_ns for record in mine)
        assert share.newest_unix_ns == max(record.created_unix_ns for record in mine)
    sizes = [path.stat().st_size for path in segments(root)]
    assert [one.file_nbytes for one in partition.segments] == sizes
    conditions = [one.condition for one in partition.segments]
    assert conditions == [SegmentCondition.SEALED] * (len(sizes) - 1) + [SegmentCondition.UNSEALED]  # to go on there
    assert [one.blocks for one in partition.segments] == [len(records(path)) for path in segments(root)]
    assert partition.live_nbytes == 18 * RECORD
    assert partition.dead_nbytes == 0
    assert partition.other_nbytes == sum(sizes) - 18 * RECORD
    assert partition.highest_put_seq == max(record.put_seq for record in found) == 18
    assert partition.highest_segment == int(segments(root)[-1].stem, 16)
    assert partition.written_nbytes_at_least == sum(sizes[:-1]) + PAGE + 2 * RECORD
    (capacity,) = {struct.unpack_from("<Q", path.read_bytes(), 64)[0] for path in segments(root)}
    assert partition.written_nbytes_at_most_about == partition.highest_segment * capacity
    assert report.namespace(NAMESPACE.digest) == NAMESPACE
    assert report.namespace(other.digest) == other


def test_invalidated_blocks_are_dead_and_their_keys_counted(tmp_path: Path) -> None:
    root = tmp_path / "kv"
    with opened(root) as store:
        put(store, chain(16 * 9))
        assert store.flush(20)
        store.invalidate(chain(16 * 9), start=6)
    partition = only(root)
    found = [record for path in segments(root) for record in records(path)]
    tombs = [record for record in found if record.kind == 2]
    assert [record.payload_nbytes for record in tombs] == [3 * 32]
    assert partition.tombstone_keys == 3
    assert partition.shares[0].blocks == 6
    assert partition.live_nbytes == 6 * RECORD
    assert partition.dead_nbytes == 3 * RECORD + tombs[0].nbytes
    assert sum(one.tombstones for one in partition.segments) == 1
    assert partition.highest_put_seq == tombs[0].put_seq


def test_blocks_without_their_prefix_are_no_live_ones(tmp_path: Path) -> None:
    root = sealed_store(tmp_path / "kv", blocks=12)
    first = segments(root)[0]
    lost = len(records(first))
    assert {record.depth for record in records(first)} == set(range(lost))
    first.unlink()
    (share,) = only(root).shares
    assert (share.blocks, share.orphan_blocks) == (0, 12 - lost)
    assert (share.oldest_unix_ns, share.record_nbytes) == (0, 0)


def test_runs_end_at_a_branch_and_the_largest_come_first(tmp_path: Path) -> None:
    root = tmp_path / "kv"
    tokens = np.arange(16 * 10)
    branched = np.r_[tokens[: 16 * 4], np.arange(70_000, 70_000 + 16 * 2)]
    with opened(root) as store:
        put(store, chain(16 * 10), sequence=b"a")
        store.wait(store.put(chain_keys(NAMESPACE, branched), np.zeros(6 * 8192, np.uint8), sequence=b"b"), 20)
    runs = [(run.first_depth, run.blocks, run.sequence.rstrip(b"\0")) for run in only(root).largest_runs]
    assert runs == [(4, 6, b"a"), (0, 4, b"a"), (4, 2, b"b")]


def test_a_store_in_use_is_read_and_left_alone(tmp_path: Path) -> None:
    root = tmp_path / "kv"
    with opened(root, ssd="16MiB") as store:
        put(store, chain(16 * 5))
        assert store.flush(20)
        before = snapshot(root)
        partition = only(root)
        assert snapshot(root) == before
        assert partition.writer_pid == os.getpid()
        (segment,) = partition.segments
        assert segment.condition is SegmentCondition.UNSEALED
        assert (segment.live_blocks, segment.used_nbytes) == (5, PAGE + 5 * RECORD)
        assert segment.file_nbytes == segments(root)[0].stat().st_size > PAGE + 5 * RECORD
        put(store, chain(16 * 5, first=1000))  # still works: nobody took its lock
    assert only(root).writer_pid is None
    assert only(root).shares[0].blocks == 10


def test_a_crash_leaves_an_unsealed_segment(tmp_path: Path) -> None:
    root = crashed_store(tmp_path / "kv")
    (segment,) = only(root).segments
    assert segment.condition is SegmentCondition.UNSEALED
    assert segment.problems == []
    assert only(root).shares[0].blocks == 6


@pytest.mark.parametrize("field_at", [0, 8, 16, 40, 76, 3000])
def test_a_damaged_trailer_is_not_taken_for_a_crash(tmp_path: Path, field_at: int) -> None:
    root = sealed_store(tmp_path / "kv", blocks=3)
    (path,) = segments(root)
    flip(path, path.stat().st_size - PAGE + field_at)
    segment = condition(root, path)
    assert segment.condition is SegmentCondition.DAMAGED
    assert segment.live_blocks == 3  # found by reading the records


def test_a_file_cut_after_sealing_is_damaged(tmp_path: Path) -> None:
    root = sealed_store(tmp_path / "kv", blocks=3)
    (path,) = segments(root)
    os.truncate(path, PAGE + RECORD + 5000)
    segment = condition(root, path)
    assert segment.condition is SegmentCondition.DAMAGED
    assert segment.live_blocks == 1


@pytest.mark.parametrize("at", [0, 9, 13, 17, 33, 49, 65, 2000])
def test_nothing_is_believed_behind_a_damaged_header(tmp_path: Path, at: int) -> None:
    root = sealed_store(tmp_path / "kv", blocks=3)
    (path,) = segments(root)
    flip(path, at)
    segment = condition(root, path)
    assert segment.condition is SegmentCondition.DAMAGED
    assert segment.blocks == 0
    assert only(root).shares == []


def test_a_newer_segment_is_named_and_left_alone(tmp_path: Path) -> None:
    root = sealed_store(tmp_path / "kv", blocks=3)
    (path,) = segments(root)
    patch(path, 8, struct.pack("<H", 2))
    page_sum(path, 0, PAGE, 12)
    assert condition(root, path).condition is SegmentCondition.NEWER


def test_a_renamed_or_foreign_segment_does_not_count(tmp_path: Path) -> None:
    root = sealed_store(tmp_path / "kv", blocks=3)
    (path,) = segments(root)
    other = sealed_store(tmp_path / "other", blocks=2)
    copied = path.with_name("00000007.seg")
    shutil.copy(path, copied)
    foreign = path.with_name("00000002.seg")
    shutil.copy(segments(other)[0], foreign)
    assert condition(root, copied).condition is SegmentCondition.DAMAGED
    assert condition(root, foreign).condition is SegmentCondition.DAMAGED
    assert only(root).shares[0].blocks == 3


def test_what_is_no_segment_is_passed_over(tmp_path: Path) -> None:
    root = sealed_store(tmp_path / "kv", blocks=3)
    (path,) = segments(root)
    path.with_name("00000002.seg").touch()
    os.mkfifo(path.with_name("00000003.seg"))
    path.with_name("00000004.seg").symlink_to(path)
    (root / "namespaces" / ("00" * 32 + ".json")).symlink_to("/dev/zero")
    os.mkfifo(root / "namespaces" / ("11" * 32 + ".json"))
    report = inspect_store(root)
    (partition,) = report.partitions
    assert [(one.number, one.condition.value) for one in partition.segments] == [(1, "sealed"), (2, "damaged")]
    assert len(report.problems) == 2


def test_a_description_is_believed_only_if_it_hashes_to_its_name(tmp_path: Path) -> None:
    root = sealed_store(tmp_path / "kv", blocks=3)
    (path,) = (root / "namespaces").iterdir()
    path.write_text(path.read_text().replace("acme", "evil"))
    report = inspect_store(root)
    assert report.namespace(NAMESPACE.digest) is None
    assert "describes another namespace" in report.problems[0]
    assert report.partitions[0].shares[0].blocks == 3
    path.unlink()
    report = inspect_store(root)
    assert report.namespace(NAMESPACE.digest) is None
    assert report.problems == []


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "7", '{"uuid": 3}', '{"format_version": "x", "uuid": "y"}', "[" * 9000]
)
def test_a_damaged_marker_does_not_hide_the_blocks(tmp_path: Path, text: str) -> None:
    root = sealed_store(tmp_path / "kv", blocks=3)
    (root / "store.json").write_text(text)
    report = inspect_store(root)
    assert "damaged" in report.problems[0]
    assert report.partitions[0].shares[0].blocks == 3


def test_no_store_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotAStoreError):
        inspect_store(tmp_path / "missing")
    with pytest.raises(NotAStoreError):
        inspect_store(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(NotAStoreError):
        inspect_store(tmp_path / "file")


def test_a_newer_store_is_refused(tmp_path: Path) -> None:
    root = sealed_store(tmp_path / "kv", blocks=1)
    (root / "store.json").write_text('{"format_version": 2, "identity": "said in another way"}')
    with pytest.raises(FormatVersionError):
        inspect_store(root)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_no_access_is_an_error_and_not_an_empty_store(tmp_path: Path) -> None:
    root = sealed_store(tmp_path / "kv", blocks=1)
    root.chmod(0)
    try:
        with pytest.raises(StoreUnusableError):
            inspect_store(root)
    finally:
        root.chmod(0o700)


@pytest.mark.parametrize("seed", range(8))
def test_chains_are_those_of_a_walk_block_by_block(seed: int) -> None:
    rng = np.random.default_rng(seed)
    count = 120
    rows = np.zeros(count, ENTRY_DTYPE)
    keys = [b"SAME" * 2 * (index % 3 == 0) + rng.bytes(32) for index in range(count)]  # shared first words too
    keys = [key[:32] for key in keys]
    parent_of: list[int] = []
    for index in range(count):
        parent = int(rng.integers(-1, index)) if index and rng.random() < 0.9 else -1
        parent_of.append(parent)
        rows["key"][index] = np.void(keys[index])
        rows["parent"][index] = np.void(keys[parent] if parent >= 0 else rng.bytes(32))
        rows["depth"][index] = rows["depth"][parent] + 1 if parent >= 0 else 0
        rows["sequence"][index] = np.void(bytes(15) + bytes([int(rng.integers(2))]))
    kept = np.flatnonzero(rng.random(count) < 0.8)
    order = rng.permutation(kept)
    at = {int(index): place for place, index in enumerate(order)}
    chains = Chains(rows[order])
    children = {index: [one for one in kept.tolist() if parent_of[one] == index] for index in kept.tolist()}
    for index in kept.tolist():
        up = index
        while parent_of[up] in at:
            up = parent_of[up]
        assert bool(chains.rooted[at[index]]) == (parent_of[up] == -1)
        head = index
        while (above := parent_of[head]) in at and len(children[above]) == 1:
            if rows["sequence"][above] != rows["sequence"][head]:
                break
            head = above
        assert int(chains.head[at[index]]) == at[head]


def test_tenants_are_summed_over_namespaces_and_partitions(tmp_path: Path) -> None:
    one = Namespace("w", LAYOUT, tenant="acme")
    two = Namespace("w2", LAYOUT, tenant="acme")
    nobody = Namespace("w", LAYOUT)
    with opened(tmp_path) as store, opened(tmp_path, partition="late") as late:
        put(store, chain(16 * 3, namespace=one))
        put(store, chain(16 * 2, namespace=nobody))
        put(late, chain(16 * 4, namespace=one))
        put(late, chain(16 * 1, namespace=two))
        put(late, chain(16 * 6, namespace=Namespace("w", LAYOUT, tenant="gone")))
    (tmp_path / "namespaces" / f"{Namespace('w', LAYOUT, tenant='gone').digest.hex()}.json").unlink()
    found = [
        (each.tenant, each.namespaces, each.blocks, each.record_nbytes) for each in inspect_store(tmp_path).tenants()
    ]
    assert found == [
        ("acme", 2, 8, 8 * RECORD),
        (None, 1, 6, 6 * RECORD),
        ("", 1, 2, 2 * RECORD),
    ]
