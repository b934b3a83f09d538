"""Readers: they change nothing, serve what the writer has written, follow what comes and goes, and let go of it."""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.crash.kit import LAYOUT, MiB, all_hits, chain_of, checked, hits, opened, put, segments, stored, until
from tests.harness import SMALL, kinds
from tests.harness import chain_of as chain_by_path
from tests.shared import Library, below

from kvterrace import (
    ConfigError,
    FormatVersionError,
    Hit,
    Miss,
    Namespace,
    NotAStoreError,
    Store,
    StoreUnusableError,
    open_store,
)
from kvterrace.engine import prefetching
from kvterrace.engine.following import LOOK_S
from kvterrace.format.checksum import crc32c
from kvterrace.io.descriptors import Descriptors


@pytest.fixture
def library(tmp_path: Path) -> Iterator[Library]:
    """A writer whose blocks are at once written, six segments of seven records each, and no reader yet."""
    library = Library(tmp_path / "kv", after_s=0.0)
    yield library
    library.close()


def reader_of(path: Path | list[Path], **options: Any) -> Store:
    return open_store(path, **{"dram_bytes": MiB, "read_only": True, **options})


def everything(path: Path) -> dict[str, tuple[int, ...]]:
    """Names, modes, sizes, inodes, times and owners of all below `path`."""
    found: dict[str, tuple[int, ...]] = {}
    for each in [path, *sorted(path.rglob("*"))]:
        info = each.lstat()
        found[str(each)] = (info.st_mode, info.st_size, info.st_ino, info.st_mtime_ns, info.st_ctime_ns, info.st_nlink)
    return found


def a_store(path: Path) -> None:
    """A closed store of two chains, and what a crash leaves of a third: a segment without a footer."""
    with opened(path) as store:
        stored(store, chain_of(1, 6))
        store.flush()
    with opened(path) as store:
        stored(store, chain_of(2, 6))
        store.flush()
        copy = path / "copy"
        shutil.copytree(path / "partitions", copy)  # its open segment, as it was before it was sealed
    shutil.rmtree(path / "partitions")
    copy.rename(path / "partitions")


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
    box.store.close(100.0)
    library.restart_writer(kill=False)
    (path,) = (path for path in library.media[0].names if path.suffix == ".seg")
    reader = library.open_reader()
    library.media[0].names[path].current[4096 + 3 * 4096 + 10] ^= 1
    assert kinds(library.get(reader, chain)) == ["Hit", "Corrupt", "Hit"]


# -- following ---------------------------------------------------------------------------------------------------------


def test_a_look_at_what_has_not_changed_reads_nothing(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    box = library.box
    box.put_now(chain_by_path(SMALL, [1] * 12))
    box.store.flush(100.0)
    library.seal()
    reader = library.open_reader()
    library.settle(reader)
    device: Any = reader._core.volumes[0].engine
    opens: list[Path] = []
    real = device.open

    def watched(path: Path) -> object:
        opens.append(path)
        return real(path)

    monkeypatch.setattr(device, "open", watched)
    for _ in range(5):
        library.settle(reader)
    assert opens == []
    box.put_now(chain_by_path(SMALL, [2] * 3))
    box.store.flush(100.0)
    library.settle(reader)
    assert len(opens) == 1


def test_a_folder_that_cannot_be_listed_costs_nothing_that_is_known(
    library: Library, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    chain = chain_by_path(SMALL, [1] * 3)
    library.box.put_now(chain)
    library.box.store.flush(100.0)
    reader = library.open_reader()
    device: Any = reader._core.volumes[0].engine

    def fails(_: Path) -> list[object]:
        raise OSError(errno.EIO, "it fails")

    with monkeypatch.context() as patch:
        patch.setattr(device, "list", fails)
        for _ in range(3):
            library.settle(reader)
    assert sum("cannot be looked at" in record.message for record in caplog.records) == 1
    assert kinds(library.get(reader, chain)) == ["Hit"] * 3
    library.box.put_now(chain_by_path(SMALL, [1] * 5))
    library.box.store.flush(100.0)
    library.settle(reader)
    assert reader.match(chain_by_path(SMALL, [1] * 5)).blocks == 5


def full_of(library: Library, first: int) -> None:
    """Push everything else off the drive."""
    for number in range(first, first + 12):
        library.box.put_now(chain_by_path(SMALL, [number] * 7))
        library.box.store.flush(100.0)
    library.box.rest()


def test_what_is_pinned_outlives_its_file_and_its_bytes_come_back_then(library: Library) -> None:
    box, chain = library.box, chain_by_path(SMALL, [1] * 4)
    box.put_now(chain)
    box.store.flush(100.0)
    reader = library.open_reader()
    pin = reader.pin(chain)
    full_of(library, 10)
    medium = library.media[0]
    assert not set(chain) & library.on_drive(), "the writer has not made room"
    for _ in range(3):
        library.settle(reader)
        assert len(medium._contents - set(medium.names.values())) == 1, "one file is held, and no other"
    assert kinds(library.get(reader, chain)) == ["Hit"] * 4
    reader._core.ledger.evict_idle()
    pin.release()
    assert kinds(library.get(reader, chain)) == ["Hit"] * 4
    reader._core.ledger.evict_idle()
    library.settle(reader)
    assert medium._contents == set(medium.names.values())
    assert len(reader._core.ledger.spaces[0].segments) == sum(path.suffix == ".seg" for path in medium.names)


def test_a_prefetch_that_waits_its_turn_is_read_from_the_removed_file(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefetching, "_AT_ONCE_NBYTES", 1)  # one record at a time
    chain = chain_by_path(SMALL, [1] * 11)
    library.box.put_now(chain)
    library.box.store.flush(100.0)
    reader, medium = library.open_reader(dram_blocks=16), library.media[0]
    transfer = reader.prefetch(chain)
    paths = list(medium.names)
    assert len(paths) == 2, "one that is being read, and one that is not yet"
    for path in paths:
        medium.unlink(path)
    library.box.clock.advance(1.01)
    follower = reader._mover.follower
    assert follower is not None
    for _ in range(4):
        reader.poll()
    assert len(follower._each[0].gone) == 2 and not transfer.done, "they were to be found gone while reads wait"
    reader.wait(transfer, 10.0)
    assert kinds(transfer.outcomes) == ["Hit"] * 11
    library.settle(reader)
    assert not reader._core.ledger.spaces[0].segments and not follower._each[0].gone
    assert kinds(library.get(reader, chain)) == ["Hit"] * 11, "what has arrived in DRAM is still there"


def test_a_name_that_is_used_again_is_another_segment(library: Library) -> None:
    box, old, new = library.box, chain_by_path(SMALL, [1] * 4), chain_by_path(SMALL, [2] * 4)
    box.put_now(old)
    box.store.flush(100.0)
    reader = library.open_reader()
    assert reader.match(old).blocks == 4
    box.store.close(100.0)
    for path in [path for path in library.media[0].names if path.suffix == ".seg"]:
        library.media[0].unlink(path)
    library.restart_writer(kill=True)
    box.put_now(new)
    box.store.flush(100.0)
    assert [path.name for path in library.media[0].names] == ["00000001.seg"]
    library.settle(reader)
    assert (reader.match(old).blocks, reader.match(new).blocks) == (0, 4)
    assert kinds(library.get(reader, new)) == ["Hit"] * 4
    assert len(library.media[0]._contents) == 1


def test_a_file_that_is_gone_is_a_miss_and_the_drive_is_fine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its descriptor was given up to others, and then it was removed."""
    path = tmp_path / "kv"
    with opened(path, ssd_bytes=4 * MiB) as writer:  # segments of 30 records
        for number in range(12):
            stored(writer, chain_of(number, 30))
    assert len(segments(path)) > 8
    monkeypatch.setattr(Descriptors, "__init__", few(Descriptors.__init__))
    with reader_of(path) as reader:
        # no look comes between: what a reader does not know yet is what this is about
        reader._mover.follower._each[0].next_s = 1e12  # type: ignore[union-attr]
        until(lambda: reader._mover.follower.idle)  # type: ignore[union-attr]
        for segment in segments(path):
            segment.unlink()
        outcomes = [outcome for number in range(12) for outcome in checked(reader, chain_of(number, 30))]
        assert sum(isinstance(one, Miss) for one in outcomes) > 30
        assert all(isinstance(one, Hit | Miss) for one in outcomes)
        gate = reader._core.volumes[0].gate
        assert gate.is_open and not [record for record in caplog.records if record.levelname == "WARNING"]
        assert reader.stats().drives[0].readable
        again = checked(reader, chain_of(0, 30))
        assert all(isinstance(one, Hit | Miss) for one in again)


def few(real: Any) -> Any:
    def init(self: Descriptors, most: int | None = None) -> None:
        del most
        real(self, 2)

    return init


def open_below(path: Path) -> list[str]:
    """What this process has open below `path`."""
    fds = [fd for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink()]
    return [link for link in (str(fd.readlink()) for fd in fds if fd.is_symlink()) if link.startswith(str(path))]


def test_descriptors_threads_and_removed_bytes_come_back(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    with opened(path, ssd_bytes=MiB) as writer:
        stored(writer, chain_of(1, 6))
        writer.flush()
        threads = len(list(Path("/proc/self/task").iterdir()))
        reader = reader_of(path)
        all_hits(reader, chain_of(1, 6))
        for number in range(2, 60):
            stored(writer, chain_of(number, 6))
            writer.flush()
        assert writer.stats().reclaimed_segments > 10
        until(lambda: reader.stats().ssd_segments == len(segments(path)) and reader.match(chain_of(59, 6)).blocks == 6)
        assert not [link for link in open_below(path) if "(deleted)" in link]
        assert reader.close()
        until(lambda: len(list(Path("/proc/self/task").iterdir())) <= threads)
        assert len(open_below(path)) == len(segments(path)) + 1, "besides the writer's segments and its lock"
    assert open_below(path) == []


# -- several drives ----------------------------------------------------------------------------------------------------


def test_exactly_the_drives_of_the_store_are_read(tmp_path: Path) -> None:
    roots = [tmp_path / name for name in "ab"]
    with opened(roots) as writer:
        stored(writer, chain_of(1, 40))
    before = everything(tmp_path)
    with reader_of(roots[::-1]) as reader:
        all_hits(reader, chain_of(1, 40))
        assert len(reader.stats().drives) == 2
    with pytest.raises(StoreUnusableError, match="1 more drive"):
        reader_of(roots[0])
    with pytest.raises(NotAStoreError, match="no store to read"):
        reader_of([*roots, tmp_path / "c"])
    assert everything(tmp_path) == before
    opened(roots[0]).close()  # the store goes on without b
    with pytest.raises(StoreUnusableError, match="b was away"):
        reader_of(roots)


def test_a_drive_that_the_store_goes_on_without_is_not_believed(tmp_path: Path) -> None:
    """What is invalidated from now on passes it by (I14)."""
    roots = [tmp_path / name for name in "ab"]
    with opened(roots) as writer:
        for number in range(20):
            stored(writer, chain_of(number, 4))
            writer.flush()
    with reader_of(roots) as reader:
        assert sum(reader.match(chain_of(number, 4)).blocks for number in range(20)) == 80
        with opened(roots[0]) as writer:
            until(lambda: reader.stats().drives[1].live_nbytes == 0)
            left = {number: writer.match(chain_of(number, 4)).blocks for number in range(20)}
            until(lambda: {number: reader.match(chain_of(number, 4)).blocks for number in range(20)} == left)
        assert reader.stats().drives[1].segments == 0 and 0 < sum(left.values()) < 80
        for number, blocks in left.items():
            assert hits(checked(reader, chain_of(number, 4))) == [index < blocks for index in range(4)]


# -- and the writer ----------------------------------------------------------------------------------------------------


def test_the_writer_is_not_disturbed(tmp_path: Path) -> None:
    """It may close, open and reclaim while readers come and go, and finds no lock, file or size that is not its own."""
    path = tmp_path / "kv"
    a_store(path)
    with reader_of(path) as reader:
        all_hits(reader, chain_of(2, 6))
        with opened(path) as writer:
            all_hits(writer, chain_of(2, 6))
            put(writer, chain_of(4, 6))
        with opened(path, ssd_bytes=2 * MiB) as writer:
            assert writer.match(chain_of(4, 6)).blocks == 6
        until(lambda: reader.match(chain_of(4, 6)).blocks == 6)
    assert sorted(each.name for each in (path / "partitions" / "main").iterdir()) == [
        *(segment.name for segment in segments(path)),
        "lock",
    ]
