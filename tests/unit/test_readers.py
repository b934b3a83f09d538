"""Readers: they change nothing, and serve what the writer has written."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.crash.kit import (
    LAYOUT,
    RECORD_NBYTES,
    all_hits,
    chain_of,
    checked,
    hits,
    opened,
    seal,
    segments,
    stored,
    until,
)
from tests.harness import SMALL, kinds
from tests.harness import chain_of as chain_by_path
from tests.shared import Library, a_store, below, everything, reader_of

from kvterrace import (
    ConfigError,
    FormatVersionError,
    Namespace,
    NotAStoreError,
    StoreUnusableError,
    open_store,
)
from kvterrace.engine import prefetching
from kvterrace.engine.following import LOOK_S
from kvterrace.format.checksum import crc32c
from kvterrace.io.base import IoKind
from kvterrace.io.faults import Hang

# -- the drive is left as it is ----------------------------------------------------------------------------------------


def test_nothing_on_the_drive_is_changed_or_opened_for_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "kv"
    a_store(path)
    before = everything(path)
    bodies = {each: each.read_bytes() for each in path.rglob("*") if each.is_file()}
    real, flags = os.open, []

    def watched(name: Any, how: int, *rest: Any, **more: Any) -> int:
        flags.append(how)
        return real(name, how, *rest, **more)

    monkeypatch.setattr(os, "open", watched)
    store = reader_of(path)
    for number in (1, 2):
        all_hits(store, chain_of(number, 6))
    stored(store, chain_of(3, 6))
    stored(store, chain_of(3, 6, Namespace(model="one that the store does not know", layout=LAYOUT)))
    store.invalidate(chain_of(1, 6), start=3)
    with store.pin(chain_of(2, 6)):
        time.sleep(LOOK_S + 0.3)
    assert store.flush() and store.close()
    assert everything(path) == before
    assert {each: each.read_bytes() for each in path.rglob("*") if each.is_file()} == bodies
    assert flags and not any(how & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC) for how in flags)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs to become another user")
def test_a_user_without_write_permission_reads() -> None:
    folder = Path(tempfile.mkdtemp(prefix="kvterrace-reader-"))  # pytest's own folders let no other user in
    try:
        path = folder / "kv"
        a_store(path)
        folder.chmod(0o755)
        for each in [path, *path.rglob("*")]:
            each.chmod(0o555 if each.is_dir() else 0o444)
        with reader_of(path) as warm:  # what is imported late is imported now: another user may not find it
            all_hits(warm, chain_of(1, 6))
        child = os.fork()
        if not child:
            code = 1
            try:
                os.setresuid(65534, 65534, 65534)
                with reader_of(path) as store:
                    all_hits(store, chain_of(1, 6))
                    all_hits(store, chain_of(2, 6))
                code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        (path / "partitions" / "main").chmod(0o700)
        child = os.fork()
        if not child:
            code = 1
            try:
                os.setresuid(65534, 65534, 65534)
                reader_of(path)
            except StoreUnusableError as error:
                code = 0 if "permission" in str(error) else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        shutil.rmtree(folder)


def test_where_there_is_no_store_none_is_made(tmp_path: Path) -> None:
    for path, make in ((tmp_path / "missing", False), (tmp_path / "empty", True)):
        if make:
            path.mkdir()
        with pytest.raises(NotAStoreError, match="no store to read"):
            reader_of(path)
        assert path.exists() is make and not (make and list(path.iterdir()))
    a_store(tmp_path / "kv")
    before = everything(tmp_path / "kv")
    with pytest.raises(NotAStoreError, match="no partition 'other'"):
        reader_of(tmp_path / "kv", partition="other")
    with pytest.raises(ConfigError, match="partition name"):
        reader_of(tmp_path / "kv", partition="../x")
    with pytest.raises(ConfigError, match="read_only"):
        open_store(None, read_only=True)
    assert everything(tmp_path / "kv") == before


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    a_store(path)
    marker = path / "store.json"
    said = json.loads(marker.read_text())
    marker.write_text(json.dumps({**said, "format_version": 2}))
    with pytest.raises(FormatVersionError, match="format 2"):
        reader_of(path)
    marker.write_text(json.dumps(said))
    newer(segments(path)[0])
    with pytest.raises(FormatVersionError, match="segment format 2"):
        reader_of(path)


def newer(segment: Path) -> None:
    """Make a segment one of format 2, its header right by the rules that hold in every version."""
    data = bytearray(segment.read_bytes())
    data[8:10] = (2).to_bytes(2, "little")
    data[12:16] = bytes(4)
    data[12:16] = crc32c(np.frombuffer(bytes(data[:4096]), np.uint8)).to_bytes(4, "little")
    segment.write_bytes(data)


def replace(path: Path, text: str) -> None:
    temporary = path.with_suffix(".new")
    temporary.write_text(text)
    temporary.rename(path)


def test_a_store_that_becomes_newer_is_let_go_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "kv"
    a_store(path)
    marker = path / "store.json"
    said = marker.read_text()
    with reader_of(path) as store:
        replace(marker, json.dumps({**json.loads(said), "format_version": 2}))
        until(lambda: store.match(chain_of(1, 6)).blocks == 0)
        assert [record.message for record in caplog.records if "format 2" in record.message]
        replace(marker, said)
        until(lambda: store.match(chain_of(1, 6)).blocks == 6)
        all_hits(store, chain_of(1, 6))


# -- what is served, and what is not -----------------------------------------------------------------------------------


def test_many_read_beside_the_writer_and_after_it(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    writer = opened(path)
    stored(writer, chain_of(1, 6))
    assert writer.flush()
    readers = [reader_of(path) for _ in range(3)]
    stored(writer, chain_of(1, 9))
    assert writer.flush()
    for reader in readers:
        until(lambda reader=reader: reader.match(chain_of(1, 9)).blocks == 9)  # type: ignore[misc]
        all_hits(reader, chain_of(1, 9))
    assert writer.close()
    for reader in readers:
        all_hits(reader, chain_of(1, 9))
        assert reader.close()


def test_puts_stay_in_dram_and_owe_nothing(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    a_store(path)
    with reader_of(path, dram_bytes=20 * 8192) as store:
        stored(store, chain_of(1, 8))  # two blocks more than the drive has
        assert store.flush(0.0) and store.flush()
        all_hits(store, chain_of(1, 8))
        stats = store.stats()
        assert (stats.put_stored_blocks, stats.put_present_blocks) == (2, 6)
        assert stats.ssd_written_nbytes == stats.ssd_write_requests == 0 and not stats.ssd_writable
        for number in range(10, 15):  # 40 blocks: more than there is room for
            stored(store, chain_of(number, 8))
        assert store.stats().dropped_blocks >= 20
        all_hits(store, chain_of(14, 8))
    with reader_of(path) as store:
        assert store.match(chain_of(1, 8)).blocks == 6


def test_an_own_invalidation_holds_here_until_the_block_is_written_anew(library: Library) -> None:
    box, chain = library.box, chain_by_path(SMALL, [1] * 6)
    box.put_now(chain)
    box.store.flush(100.0)
    one, other = library.open_reader(), library.open_reader()
    one.invalidate(chain, start=2)
    for _ in range(2):
        library.settle(one)
        library.settle(other)
        assert (one.match(chain).blocks, other.match(chain).blocks, box.store.match(chain).blocks) == (2, 6, 6)
    library.seal()
    library.settle(one)  # the footer names them again
    assert one.match(chain).blocks == 2
    box.store.invalidate(chain, start=4)
    box.put_now(chain)
    box.store.flush(100.0)
    library.settle(one)
    assert one.match(chain).blocks == 2  # blocks 4 and 5 are new; 2 and 3, on which they hang, are not
    box.store.invalidate(chain)
    box.put_now(chain)
    box.store.flush(100.0)
    library.settle(one)
    assert kinds(library.get(one, chain)) == ["Hit"] * 6


def test_an_invalidation_comes_with_the_next_look(library: Library) -> None:
    box, chain = library.box, chain_by_path(SMALL, [1] * 6)
    box.put_now(chain)
    box.store.flush(100.0)
    reader = library.open_reader()
    library.get(reader, chain)  # in its DRAM, too
    pin = reader.pin(chain_by_path(SMALL, [1] * 4))
    box.store.invalidate(chain, start=3)
    box.store.flush(100.0)
    library.settle(reader)
    assert reader.match(chain).blocks == 3
    assert kinds(library.get(reader, chain)) == ["Hit"] * 3 + ["Miss"] * 3
    pin.release()
    library.settle(reader)
    assert len(below(reader)) == 3


def test_a_record_that_is_not_there_yet_is_a_miss_and_comes_later(library: Library) -> None:
    box, chain = library.box, chain_by_path(SMALL, [1] * 3)
    box.put_now(chain)
    box.store.flush(100.0)
    (segment,) = (content for path, content in library.media[0].names.items() if path.suffix == ".seg")
    payload = segment.current[4096 + 5 * 4096 : 4096 + 6 * 4096].copy()  # of the third record: header, then payload
    segment.current[4096 + 5 * 4096 : 4096 + 6 * 4096] = 0
    reader = library.open_reader()  # reads records in full: finds two
    assert reader.match(chain).blocks == 2
    library.settle(reader)  # goes by headers: finds three
    assert reader.match(chain).blocks == 3
    assert kinds(library.get(reader, chain)) == ["Hit", "Hit", "Miss"]
    stats = reader.stats()
    assert (stats.get_corrupt_blocks, stats.get_miss_blocks) == (0, 1)
    segment.current[4096 + 5 * 4096 : 4096 + 6 * 4096] = payload
    library.seal()
    library.settle(reader)
    assert kinds(library.get(reader, chain)) == ["Hit", "Hit", "Hit"]


def test_what_lies_behind_a_hole_comes_with_the_footer(library: Library) -> None:
    box, chain = library.box, chain_by_path(SMALL, [1] * 3)
    reader = library.open_reader()
    box.put_now(chain)
    box.store.flush(100.0)
    (segment,) = (content for path, content in library.media[0].names.items() if path.suffix == ".seg")
    segment.current[4096 + 2 * 4096] ^= 1  # the second record's magic
    library.settle(reader)
    assert reader.match(chain).blocks == 1
    segment.current[4096 + 2 * 4096] ^= 1
    library.seal()
    library.settle(reader)
    assert kinds(library.get(reader, chain)) == ["Hit", "Hit", "Hit"]


def test_wrong_bytes_in_a_sealed_segment_are_still_damage(library: Library) -> None:
    box, chain = library.box, chain_by_path(SMALL, [1] * 3)
    box.put_now(chain)
    assert box.store.flush(10.0)
    library.seal()
    box.store.close(100.0)
    library.restart_writer(kill=False)
    (path,) = (path for path in library.media[0].names if path.suffix == ".seg")
    reader = library.open_reader()
    library.media[0].names[path].current[4096 + 3 * 4096 + 10] ^= 1
    assert kinds(library.get(reader, chain)) == ["Hit", "Corrupt", "Hit"]


def test_a_record_in_a_quarantined_place_is_no_copy_for_a_reader(tmp_path: Path) -> None:
    path, chain = tmp_path / "kv", chain_of(1, 2)
    with opened(path) as store:
        stored(store, chain)
        seal(store)
    with segments(path)[0].open("r+b") as file:
        file.seek(4096 + RECORD_NBYTES + 4096)  # the payload of the second record
        file.write(bytes(16))
    with opened(path) as store:
        assert hits(checked(store, chain)) == [True, False]
    with reader_of(path) as reader:
        assert reader.match(chain).blocks == 1


def test_what_the_writer_puts_into_quarantine_later_is_refused_with_the_next_look(library: Library) -> None:
    """Of a segment that the reader knows, and of one that it learns of with the same look."""
    box, known, new = library.box, chain_by_path(SMALL, [1] * 3), chain_by_path(SMALL, [2] * 3)
    box.put_now(known)
    box.store.flush(100.0)
    library.seal()
    reader = library.open_reader()
    library.settle(reader)
    pin = reader.pin(known)
    for chain, left in ((known, 1), (new, 2)):
        box.put_now(chain)
        box.store.flush(100.0)
        core = box.store._core
        (block,) = core.ledger.find(chain).tolist()[left : left + 1]
        number, page = int(core.ledger.table.segment[block]), int(core.ledger.table.page[block])
        volume = core.volumes[0]
        volume.bad.went_wrong(
            chain.key(left), volume.space.segments[number], volume.files.nonce(number), page * 4096, 8192
        )
        box.step()
        box.rest()
        assert any(path.suffix == ".log" for path in library.media[0].names), "it was written down"
        if chain is known:
            assert reader.match(known).blocks == 3, "not before the next look"
        library.settle(reader)
        assert reader.match(chain).blocks == left
        assert kinds(library.get(reader, chain)) == ["Hit" if index != left else "Miss" for index in range(3)]
        assert reader.stats().get_corrupt_blocks == 0
    pin.release()
    library.settle(reader)


def test_a_reader_remembers_as_many_bad_places_as_its_writer(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    with opened(path) as store:
        stored(store, chain_of(1, 2))
        seal(store)
        bad = store._core.volumes[0].bad
        with store._driver.lock:
            nonce = store._core.volumes[0].files.nonce(1)
            for number in range(500):
                bad._quarantine.add_place(segment=1, nonce=nonce, offset=(number + 100) * 4096, nbytes=4096)
    with reader_of(path) as reader:
        assert reader.stats().ssd_quarantined == 500
        all_hits(reader, chain_of(1, 2))


def test_a_quarantine_log_that_has_not_changed_is_not_read_again(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    box, chain = library.box, chain_by_path(SMALL, [1] * 3)
    box.put_now(chain)
    box.store.flush(100.0)
    reader = library.open_reader()
    device: Any = reader._core.volumes[0].engine
    opens: list[str] = []
    real = device.open

    def watched(path: Path) -> object:
        opens.append(path.suffix)
        return real(path)

    monkeypatch.setattr(device, "open", watched)
    bad = box.store._core.volumes[0].bad
    for strike in range(3):
        bad._quarantine.add_place(segment=1, nonce=bytes(16), offset=strike * 4096, nbytes=4096)
        box.step()
        box.rest()
        opens.clear()
        for _ in range(6):
            library.settle(reader)
        # once more than it has changed: two changes in one tick of the clock look as one
        assert opens.count(".log") == 2


def test_prefetches_in_line_keep_the_file_of_their_segment_though_its_places_went_bad(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line moves on when a read has ended, and must find the file."""
    monkeypatch.setattr(prefetching, "_AT_ONCE_NBYTES", 1)
    box, chain = library.box, chain_by_path(SMALL, [1] * 11)
    box.put_now(chain)
    assert box.store.flush(100.0)
    reader, medium = library.open_reader(dram_blocks=16), library.media[0]
    device: Any = reader._core.volumes[0].engine
    device.faults.add(Hang(), IoKind.READ)
    prefetch = reader.prefetch(chain)
    device.faults.clear()
    core, volume = box.store._core, box.store._core.volumes[0]
    table, blocks = core.ledger.table, core.ledger.find(chain).tolist()
    last = int(table.segment[blocks[-1]])
    for block in blocks:
        if table.segment[block] == last:
            place = int(table.page[block]) * 4096
            volume.bad.went_wrong(
                bytes(table.key[block]), volume.space.segments[last], volume.files.nonce(last), place, 8192
            )
    box.step()
    box.rest()
    library.settle(reader)
    medium.unlink(volume.files.path(last))
    library.settle(reader)
    library.settle(reader)
    assert device.release() == 1
    for _ in range(20):
        reader.wait(prefetch, 0.1)
    assert reader._mover.fault is None
    assert set(kinds(prefetch.outcomes)) <= {"Hit", "Miss"}
