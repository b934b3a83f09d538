"""Damage on the drive: a store never returns wrong bytes, says what it found, and takes the block again."""

from __future__ import annotations

import shutil
import struct
from pathlib import Path

import pytest
from tests.crash.kit import (
    RECORD_NBYTES,
    MiB,
    all_hits,
    chain_of,
    checked,
    child,
    ended,
    opened,
    seal,
    segments,
    snapshot,
    stored,
)

from kvterrace import Corrupt, DeviceFailed, FormatVersionError, Hit, Miss, Stale
from kvterrace.format.record import PAGE_NBYTES

_BLOCKS = 6
_CHAIN = chain_of(0, _BLOCKS)
_OTHER = chain_of(1, 3)
#: Of the record that is damaged, the third of the chain.
_AT = PAGE_NBYTES + 2 * RECORD_NBYTES
_DATA_END = PAGE_NBYTES + (_BLOCKS + 3) * RECORD_NBYTES

_HEADER_FIELDS = {
    "magic": 0, "format_version": 8, "kind": 10, "header_nbytes": 12, "header_crc": 16, "codec": 20, "flags": 22,
    "segment_nonce": 24, "offset": 40, "put_seq": 48, "namespace": 56, "key": 88, "parent": 120, "depth": 152,
    "epoch": 156, "sequence": 160, "payload_nbytes": 176, "raw_nbytes": 184, "created_unix_ns": 192, "parts": 200,
    "part_entry_nbytes": 204, "part_0_offset": 208, "part_0_nbytes": 212, "part_0_crc": 216, "part_3_raw_nbytes": 268,
    "unused": 300, "unused_end": 4095,
}  # fmt: skip
_RECORD = {name: _AT + at for name, at in _HEADER_FIELDS.items()}
_RECORD |= {f"payload_part_{part}": _AT + PAGE_NBYTES + part * 1024 + 77 for part in range(4)}
_SEGMENT_HEADER = {
    "segment_magic": 0, "segment_version": 8, "segment_flags": 10, "segment_crc": 12, "store_uuid": 16, "nonce": 32,
    "segment_id": 48, "created": 56, "capacity": 64, "header_unused": 2000,
}  # fmt: skip
_FOOTER = {
    "namespace_table": 5,
    "entry_key": 32 + 3,
    "entry_put_seq": 32 + 80,
    "entry_offset": 32 + 88,
    "padding": 4000,
}
_TRAILER = {"magic": 0, "version": 8, "crc": 12, "nonce": 16, "id": 32, "data_end": 40, "footer_crc": 76, "unused": 99}
_PLACES = _RECORD | _SEGMENT_HEADER
_PLACES |= {f"footer_{name}": _DATA_END + at for name, at in _FOOTER.items()}
_PLACES |= {f"trailer_{name}": _DATA_END + PAGE_NBYTES + at for name, at in _TRAILER.items()}


@pytest.fixture(scope="module", params=["sealed", "unsealed"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A store whose only segment holds the two chains."""
    path = tmp_path_factory.mktemp("made") / "kv"
    how = str(request.param)
    if how == "sealed":
        with opened(path) as store:
            stored(store, _CHAIN)
            assert store.flush()
            stored(store, _OTHER)
            seal(store)
    else:
        ended(child("corrupt_me", path))
    assert len(segments(path)) == 1
    return path, how


@pytest.fixture
def copy(made: tuple[Path, str], tmp_path: Path) -> tuple[Path, Path, str]:
    path, how = made
    shutil.copytree(path, tmp_path / "kv")
    return tmp_path / "kv", segments(tmp_path / "kv")[0], how


def _write(file: Path, at: int, data: bytes) -> None:
    with file.open("r+b") as out:
        out.seek(at)
        out.write(data)


def _flip(file: Path, at: int, bit: int) -> None:
    with file.open("r+b") as out:
        out.seek(at)
        byte = out.read(1)[0]
        out.seek(at)
        out.write(bytes([byte ^ (1 << bit)]))


def _survives(path: Path) -> list[str]:
    """Open, read everything, put everything again, read it back, also after a restart; how the chain's blocks ended."""
    with opened(path) as store:
        outcomes = checked(store, _CHAIN)
        others = checked(store, _OTHER)
        stats = store.stats()
        both = [*outcomes, *others]
        assert all(isinstance(one, (Hit, Miss, Corrupt, Stale, DeviceFailed)) for one in both)
        for kind, count in (
            (Miss, stats.get_miss_blocks),
            (Corrupt, stats.get_corrupt_blocks),
            (Stale, stats.get_stale_blocks),
            (DeviceFailed, stats.get_failed_blocks),
        ):
            assert count == sum(isinstance(one, kind) for one in both)
        # what was found to be wrong is not looked at again, nor promised
        read = stats.ssd_read_requests
        again = checked(store, _CHAIN)
        assert all(isinstance(one, (Hit, Miss)) for one in again)
        assert store.stats().ssd_read_requests == read
        stored(store, _CHAIN)
        stored(store, _OTHER)
        all_hits(store, _CHAIN)
        all_hits(store, _OTHER)
        assert store.flush()
    with opened(path) as store:
        all_hits(store, _CHAIN)
        all_hits(store, _OTHER)
    return [type(one).__name__ for one in outcomes]


@pytest.mark.parametrize("place", _PLACES)
@pytest.mark.parametrize("bit", [0, 7])
def test_a_flipped_bit(copy: tuple[Path, Path, str], place: str, bit: int) -> None:
    path, file, how = copy
    _flip(file, _PLACES[place], bit)
    found = _survives(path)
    hit = ["Hit"] * _BLOCKS
    if place in _RECORD:
        if how == "sealed":  # the footer says where to look: the damage is seen, and hides nothing else
            assert found == [*hit[:2], "Corrupt", *hit[3:]]
        else:  # the scan does not find the record, and what hangs on it cannot be matched
            assert found == [*hit[:2], *["Miss"] * (_BLOCKS - 2)]
    elif place in _SEGMENT_HEADER:
        assert found == ["Miss"] * _BLOCKS
    else:
        assert found == hit  # without a footer, the records are found by a scan


def test_cut_at_every_boundary(copy: tuple[Path, Path, str]) -> None:
    path, file, _ = copy
    whole = file.read_bytes()
    ends = [0, 1, 100, 4095, 4096]
    for number in range(_BLOCKS + 3):
        at = PAGE_NBYTES + number * RECORD_NBYTES
        ends += [at + 100, at + PAGE_NBYTES, at + PAGE_NBYTES + 1024, at + RECORD_NBYTES - 1, at + RECORD_NBYTES]
    ends += [_DATA_END + PAGE_NBYTES, _DATA_END + 2 * PAGE_NBYTES - 1]
    for turn, end in enumerate(ends):
        target = path.with_name(f"cut{turn}")
        shutil.copytree(path, target)
        segments(target)[0].write_bytes(whole[:end])
        whole_records = max(0, (end - PAGE_NBYTES)) // RECORD_NBYTES
        kept = min(_BLOCKS, whole_records)
        assert _survives(target) == ["Hit"] * kept + ["Miss"] * (_BLOCKS - kept), f"cut at {end}"
        shutil.rmtree(target)


@pytest.mark.parametrize("offset", [0, PAGE_NBYTES])
def test_a_page_of_zeros_in_the_middle(copy: tuple[Path, Path, str], offset: int) -> None:
    path, file, how = copy
    _write(file, _AT + offset, bytes(PAGE_NBYTES))
    rest = ["Hit"] * (_BLOCKS - 3) if how == "sealed" else ["Miss"] * (_BLOCKS - 3)
    assert _survives(path) == ["Hit", "Hit", "Corrupt" if how == "sealed" else "Miss", *rest]


def test_a_misdirected_write(copy: tuple[Path, Path, str]) -> None:
    path, file, how = copy
    data = file.read_bytes()
    _write(file, _AT, data[_AT + RECORD_NBYTES : _AT + 2 * RECORD_NBYTES])
    found = _survives(path)
    assert found[:2] == ["Hit", "Hit"]
    assert found[2] == ("Corrupt" if how == "sealed" else "Miss")


def test_a_record_of_another_time_in_its_place(copy: tuple[Path, Path, str], tmp_path: Path) -> None:
    path, file, how = copy
    with opened(tmp_path / "other") as store:  # the same keys, other puts, another segment
        stored(store, _OTHER)
        assert store.flush()
        stored(store, _CHAIN)
    data = segments(tmp_path / "other")[0].read_bytes()
    _write(file, _AT, data[_AT : _AT + RECORD_NBYTES])
    found = _survives(path)
    assert found[2] == ("Stale" if how == "sealed" else "Miss")


def test_the_segment_of_another_store(copy: tuple[Path, Path, str], tmp_path: Path) -> None:
    path, file, _ = copy
    with opened(tmp_path / "other") as store:
        stored(store, _CHAIN)
    shutil.copy(segments(tmp_path / "other")[0], file)
    before = file.read_bytes()
    assert _survives(path) == ["Miss"] * _BLOCKS
    assert file.read_bytes() == before  # not ours: left alone


def test_a_segment_under_another_name(copy: tuple[Path, Path, str]) -> None:
    path, file, _ = copy
    file.rename(file.with_name("00000009.seg"))
    assert _survives(path) == ["Miss"] * _BLOCKS


def test_a_segment_that_is_there_twice(copy: tuple[Path, Path, str]) -> None:
    path, file, _ = copy
    shutil.copy(file, file.with_name("00000009.seg"))
    assert _survives(path) == ["Hit"] * _BLOCKS


@pytest.mark.parametrize("what", ["empty", "folder", "garbage", "link", "dangling", "half", "socket-like"])
def test_things_that_look_like_segments(tmp_path: Path, what: str) -> None:
    path = tmp_path / "kv"
    with opened(path, ssd_bytes=MiB) as store:
        stored(store, _CHAIN)
    folder = path / "partitions" / "main"
    for number in (2, 3, 5):
        place = folder / f"{number:08x}.seg"
        match what:
            case "empty":
                place.touch()
            case "folder":
                place.mkdir()
            case "garbage":
                place.write_bytes(b"garbage" * 5000)
            case "link":
                place.symlink_to(segments(path)[0])
            case "dangling":
                place.symlink_to(tmp_path / "nothing")
            case "half":
                place.write_bytes(segments(path)[0].read_bytes()[:2048])
            case _:
                place.write_bytes(bytes(MiB // 8))
    for turn in range(3):
        with opened(path, ssd_bytes=MiB) as store:
            if not turn:
                all_hits(store, _CHAIN)
            for number in range(60):  # fills the cap: what is of no use makes room
                stored(store, chain_of(100 * turn + number, 4))
            assert store.flush(30.0)
            checked(store, _CHAIN)
            last = chain_of(100 * turn + 59, 4)
            all_hits(store, last)
        with opened(path, ssd_bytes=MiB) as store:
            all_hits(store, last)
            assert store.stats().ssd_file_nbytes <= MiB


def test_a_segment_of_a_newer_version_is_refused_and_left_alone(copy: tuple[Path, Path, str]) -> None:
    path, file, _ = copy
    from kvterrace.format.checksum import crc32c

    page = bytearray(file.read_bytes()[:PAGE_NBYTES])
    struct.pack_into("<H", page, 8, 2)
    struct.pack_into("<I", page, 12, 0)
    struct.pack_into("<I", page, 12, crc32c(bytes(page)))
    _write(file, 0, bytes(page))
    before = snapshot(path / "partitions" / "main" / "..")
    before.pop("main/lock")
    with pytest.raises(FormatVersionError, match="format 2") as caught:
        opened(path)
    assert "\n" not in str(caught.value)
    after = snapshot(path / "partitions" / "main" / "..")
    after.pop("main/lock")
    assert after == before


def test_layers_of_a_damaged_block_are_not_served(copy: tuple[Path, Path, str]) -> None:
    path, file, how = copy
    if how == "unsealed":
        pytest.skip("a scan verifies whole records")
    _flip(file, _AT + PAGE_NBYTES + 3 * 1024, 0)  # in layer 1
    with opened(path) as store:
        nbytes = 2 * 1024
        out = bytearray(nbytes)
        first = store.wait(store.get(_CHAIN, out, start=2, stop=3, layers=range(1)))
        assert isinstance(first[0], Hit)
        second = store.wait(store.get(_CHAIN, out, start=2, stop=3, layers=range(1, 2)))
        assert isinstance(second[0], Corrupt)
        assert store.stats().get_corrupt_blocks == 1
