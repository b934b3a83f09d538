"""`kvterrace verify` finds every byte that changed, and nothing where nothing did."""

from __future__ import annotations

import json
import os
import shutil
import struct
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from crc32c import crc32c
from tests.unit.store_images import (
    BLOCK,
    NAMESPACE,
    PAGE,
    RECORD,
    chain,
    crashed_store,
    flip,
    footer_sum,
    opened,
    page_sum,
    patch,
    put,
    records,
    sealed_store,
    segments,
    snapshot,
)

from kvterrace.cli import main
from kvterrace.observe import medium


def verify(capsys: pytest.CaptureFixture[str], root: Path) -> tuple[int, dict[str, Any]]:
    capsys.readouterr()
    status = main(["verify", str(root), "--json"])
    streams = capsys.readouterr()
    assert streams.err == ""
    return status, json.loads(streams.out)


def places(found: dict[str, Any]) -> list[str]:
    return [fault["where"] for fault in found["faults"]]


def test_a_whole_store_is_clean_and_stays_as_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tmp_path / "kv"
    with opened(root) as store:
        put(store, chain(16 * 9))
        assert store.flush(20)
        store.invalidate(chain(16 * 9), start=6)
    before = snapshot(root)
    status, found = verify(capsys, root)
    assert (status, found["clean"], found["faults"]) == (0, True, [])
    assert [note["where"] for note in found["notes"]] == ["partitions/main/00000003.seg"]  # little is in it: not sealed
    lie_there = [record for path in segments(root) for record in records(path)]
    assert found["blocks"] == sum(record.kind == 1 for record in lie_there) == 9
    assert found["tombstones"] == sum(record.kind == 2 for record in lie_there) == 1
    assert found["parts"] == 9 * 4 + 1
    assert found["segments"] == len(segments(root))
    assert found["read_nbytes"] >= sum(path.stat().st_size for path in segments(root))
    assert snapshot(root) == before
    assert main(["verify", str(root)]) == 0
    assert "\nclean: 9 blocks, 1 tombstone and 37 parts sound" in capsys.readouterr().out


def test_no_changed_byte_of_a_sealed_segment_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = sealed_store(tmp_path / "kv", blocks=3)
    (path,) = segments(root)
    size = path.stat().st_size
    whole = path.read_bytes()
    found_records = records(path)
    marks = {0, 8, 12, 70, size - PAGE, size - PAGE + 16, size - PAGE + 60, size - 1}
    for at in sorted(marks | set(range(0, size, 997))):
        flip(path, at, bit=at % 8)
        status, found = verify(capsys, root)
        assert status == 1, f"byte {at} of {size}"
        name = "partitions/main/00000001.seg"
        hit = [record for record in found_records if record.offset <= at < record.offset + record.nbytes]
        if hit:
            assert places(found) == [f"{name}@{hit[0].offset}"]
            assert found["faults"][0]["key"] == hit[0].key.hex()
            assert found["blocks"] == 2
        elif at < PAGE:
            assert places(found) == [f"{name}@0"]
        else:
            assert places(found) == [name]
            assert found["blocks"] == 3  # the records are sound, and found without the footer
        path.write_bytes(whole)
    assert verify(capsys, root)[0] == 0


def test_the_part_that_is_wrong_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = sealed_store(tmp_path / "kv", blocks=3)
    (path,) = segments(root)
    third = records(path)[2]
    flip(path, third.offset + PAGE + 2 * 2048 + 7)
    _, found = verify(capsys, root)
    assert found["faults"][0]["what"].startswith("part 2: CRC32C is ")
    assert main(["verify", str(root)]) == 1
    line = capsys.readouterr().out.splitlines()[0]
    assert line.startswith(f"fault: partitions/main/00000001.seg@{third.offset} key {third.key.hex()}: part 2")


def test_a_torn_tail_is_a_note(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = crashed_store(tmp_path / "kv", blocks=4)
    (path,) = segments(root)
    last = records(path)[-1]
    patch(path, last.offset + PAGE + BLOCK // 2, bytes(BLOCK // 2))
    status, found = verify(capsys, root)
    assert (status, found["faults"], found["blocks"]) == (0, [], 3)
    assert found["notes"][0]["where"] == f"partitions/main/00000001.seg@{last.offset}"
    assert found["notes"][0]["key"] == last.key.hex()
    assert "torn tail" in found["notes"][0]["what"]


def test_damage_in_front_of_a_sound_record_is_no_torn_tail(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = crashed_store(tmp_path / "kv", blocks=4)
    (path,) = segments(root)
    second = records(path)[1]
    flip(path, second.offset + PAGE + 1)
    status, found = verify(capsys, root)
    assert (status, places(found)) == (1, [f"partitions/main/00000001.seg@{second.offset}"])
    assert found["blocks"] == 3


@pytest.mark.parametrize("left", [5000, RECORD + 1, 2 * RECORD + 8192, 3 * RECORD + PAGE + 1])
def test_a_sealed_file_that_was_cut_is_a_fault(tmp_path: Path, capsys: pytest.CaptureFixture[str], left: int) -> None:
    root = sealed_store(tmp_path / "kv", blocks=3)
    (path,) = segments(root)
    os.truncate(path, PAGE + left)
    status, found = verify(capsys, root)
    assert status == 1
    assert places(found)[0] == "partitions/main/00000001.seg"
    assert found["blocks"] == min(left // RECORD, 3)


def test_what_a_crash_may_leave_is_no_fault(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = sealed_store(tmp_path / "kv", blocks=3)
    folder = segments(root)[0].parent
    (folder / "00000002.seg").touch()
    (folder / "00000003.seg").write_bytes(bytes(65536))
    (root / ".store.json.123").touch()
    (folder / "quarantine.00000001.log").write_bytes(bytes(4096))  # the store's own, no stranger
    status, found = verify(capsys, root)
    assert (status, len(found["notes"])) == (0, 3)


def test_a_lost_header_in_front_of_records_is_a_fault(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = sealed_store(tmp_path / "kv", blocks=3)
    (path,) = segments(root)
    patch(path, 0, bytes(PAGE))
    status, found = verify(capsys, root)
    assert (status, places(found)) == (1, ["partitions/main/00000001.seg@0"])
    assert "3 sound records behind it" in found["faults"][0]["what"]


#: Offset in a footer's entry, and its name, by docs/design.md.
ENTRY_FIELDS = [
    (0, "key"),
    (32, "parent"),
    (64, "sequence"),
    (80, "put_seq"),
    (96, "created_unix_ns"),
    (120, "depth"),
    (124, "epoch"),
    (142, "codec"),
]


@pytest.mark.parametrize(("at", "name"), ENTRY_FIELDS)
def test_footer_and_record_must_agree(tmp_path: Path, capsys: pytest.CaptureFixture[str], at: int, name: str) -> None:
    root = sealed_store(tmp_path / "kv", blocks=3)
    (path,) = segments(root)
    _, entries = footer_sum(path)
    flip(path, entries + 144 + at)
    footer_sum(path)
    status, found = verify(capsys, root)
    assert (status, places(found)) == (1, [f"partitions/main/00000001.seg@{records(path)[1].offset}"])
    assert found["faults"][0]["what"] == f"footer and record disagree on {name}"


def test_dropped_keys_of_footer_and_tombstone_must_agree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tmp_path / "kv"
    with opened(root, ssd="16MiB") as store:
        put(store, chain(16 * 4))
        assert store.flush(20)
        store.invalidate(chain(16 * 4), start=2)
    (path,) = segments(root)
    footer, entries = footer_sum(path)
    flip(path, entries + 144 * len(records(path)))  # first byte of the first dropped key
    footer_sum(path)
    status, found = verify(capsys, root)
    assert (status, places(found)) == (1, [f"partitions/main/00000001.seg@{footer}"])


def test_names_and_owners_of_segments_are_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = sealed_store(tmp_path / "kv", blocks=3)
    (path,) = segments(root)
    other = sealed_store(tmp_path / "other", blocks=2)
    shutil.copy(segments(other)[0], path.with_name("00000002.seg"))
    path.rename(path.with_name("00000005.seg"))
    status, found = verify(capsys, root)
    assert status == 1
    assert [(fault["where"][-14:], fault["what"].split(",")[0]) for fault in found["faults"]] == [
        ("00000002.seg@0", "belongs to another store"),
        ("00000002.seg@0", "is segment 00000001 under another name"),
        ("00000005.seg@0", "is segment 00000001 under another name"),
    ]


def test_two_copies_of_one_put_must_have_the_same_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = sealed_store(tmp_path / "kv", blocks=3)
    (path,) = segments(root)
    twin = path.with_name("00000002.seg")
    shutil.copy(path, twin)
    patch(twin, 48, struct.pack("<Q", 2))
    page_sum(twin, 0, PAGE, 12)
    patch(twin, twin.stat().st_size - PAGE + 32, struct.pack("<Q", 2))
    footer_sum(twin)
    status, found = verify(capsys, root)
    assert (status, found["blocks"]) == (0, 6)  # carried forward and not yet unlinked
    record = records(twin)[1]
    flip(twin, record.offset + PAGE)
    patch(twin, record.offset + 208 + 8, struct.pack("<I", crc32c(twin.read_bytes()[record.offset + PAGE :][:2048])))
    page_sum(twin, record.offset, PAGE, 16)
    status, found = verify(capsys, root)
    assert (status, places(found)) == (1, [f"partitions/main/00000002.seg@{record.offset}"])
    assert found["faults"][0]["key"] == record.key.hex()
    assert "differ from its other copy, partitions/main/00000001.seg@" in found["faults"][0]["what"]


def test_records_must_fit_their_namespace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = sealed_store(tmp_path / "kv", blocks=3)
    (path,) = segments(root)
    first, second, _ = records(path)
    patch(path, first.offset + 156, struct.pack("<I", 7))  # epoch, in record and footer
    page_sum(path, first.offset, PAGE, 16)
    _, entries = footer_sum(path)
    patch(path, entries + 124, struct.pack("<I", 7))
    footer_sum(path)
    patch(path, second.offset + 208 + 12, struct.pack("<I", 2047))  # decoded sizes of two parts, the same in sum
    patch(path, second.offset + 208 + 16 + 12, struct.pack("<I", 2049))
    page_sum(path, second.offset, PAGE, 16)
    status, found = verify(capsys, root)
    assert status == 1
    assert [(fault["key"], fault["what"]) for fault in found["faults"]] == [
        (first.key.hex(), "epoch 7, its namespace has 0"),
        (second.key.hex(), "parts are not those of its namespace's layout"),
    ]


def test_descriptions_are_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = sealed_store(tmp_path / "kv", blocks=1)
    path = root / "namespaces" / f"{NAMESPACE.digest.hex()}.json"
    path.write_text(path.read_text().replace("float16", "int8"))
    status, found = verify(capsys, root)
    assert (status, places(found)) == (1, [f"namespaces/{path.name}"])
    path.unlink()
    status, found = verify(capsys, root)
    assert (status, found["notes"][0]["where"]) == (0, f"namespaces/{path.name}")


def test_a_damaged_marker_is_a_fault(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = sealed_store(tmp_path / "kv", blocks=1)
    (root / "store.json").write_text("{")
    status, found = verify(capsys, root)
    assert (status, places(found), found["blocks"]) == (1, ["store.json"], 1)


def test_a_store_that_is_being_written_is_verified(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tmp_path / "kv"
    with opened(root) as store:
        ended = threading.Event()

        def write() -> None:
            first = 0
            while not ended.is_set():
                put(store, chain(16 * 8, first=first))
                first += 1000
                store.flush(20)

        thread = threading.Thread(target=write)
        thread.start()
        try:
            for _ in range(8):
                status, found = verify(capsys, root)
                assert (status, found["faults"]) == (0, [])
        finally:
            ended.set()
            thread.join()
    assert verify(capsys, root)[0] == 0


@pytest.mark.parametrize("seed", range(4))
def test_random_damage_is_answered_and_never_a_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    root = sealed_store(tmp_path / "kv", blocks=9)
    whole = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    for _ in range(25):
        for path in rng.permutation(sorted(map(str, whole)))[: rng.integers(1, 3)]:
            data = bytearray(whole[Path(path)])
            at, size = int(rng.integers(len(data) + 1)), int(rng.integers(1, 9000))
            how = int(rng.integers(5))
            if how == 0:
                del data[at:]
            elif how == 1:
                data[at:at] = rng.bytes(size)
            elif how == 2:
                data[at : at + size] = bytes(len(data[at : at + size]))
            elif how == 3:
                data[at : at + size] = rng.bytes(len(data[at : at + size]))
            else:
                data += bytes(size)
            Path(path).write_bytes(data)
        assert main(["verify", str(root)]) in (0, 1)
        assert main(["inspect", str(root)]) == 0
        assert capsys.readouterr().err == ""
        for path, data_whole in whole.items():
            path.write_bytes(data_whole)
    assert main(["verify", str(root)]) == 0


def test_a_file_system_without_o_direct_is_read_with_its_pages_dropped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = sealed_store(tmp_path / "kv", blocks=3)
    dropped: list[tuple[int, int]] = []

    def advise(_fd: int, offset: int, nbytes: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_DONTNEED
        dropped.append((offset, nbytes))

    monkeypatch.setattr(medium, "_set_direct", lambda _fd: False)
    monkeypatch.setattr(os, "posix_fadvise", advise)
    status, found = verify(capsys, root)
    assert (status, found["direct_io"], found["blocks"]) == (0, False, 3)
    assert dropped
    flip(segments(root)[0], PAGE + PAGE + 5)
    assert verify(capsys, root)[0] == 1


def newer_marker(root: Path) -> None:
    marker = root / "store.json"
    marker.write_text(marker.read_text().replace('"format_version": 1', '"format_version": 2'))


def newer_segment(root: Path) -> None:
    patch(segments(root)[0], 8, struct.pack("<H", 2))
    page_sum(segments(root)[0], 0, PAGE, 12)


def no_store(root: Path) -> None:
    shutil.rmtree(root)
    root.mkdir()


@pytest.mark.parametrize("spoil", [newer_marker, newer_segment, no_store, shutil.rmtree])
def test_what_cannot_be_verified_is_one_line_and_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], spoil: Any
) -> None:
    root = sealed_store(tmp_path / "kv", blocks=1)
    spoil(root)
    capsys.readouterr()
    assert main(["verify", str(root)]) == 2
    streams = capsys.readouterr()
    assert streams.out == ""
    assert streams.err.startswith("kvterrace: ")
    assert streams.err.count("\n") == 1
