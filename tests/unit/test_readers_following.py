"""Readers follow what comes and goes, let go of it, and leave the writer alone."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
from tests.crash.kit import LAYOUT, MiB, all_hits, chain_of, checked, hits, opened, put, segments, stored, until
from tests.harness import SMALL, kinds
from tests.harness import chain_of as chain_by_path
from tests.shared import Library, a_store, everything, reader_of

from kvterrace import (
    Hit,
    Miss,
    NotAStoreError,
    StoreUnusableError,
)
from kvterrace.engine import prefetching
from kvterrace.io.descriptors import Descriptors
from kvterrace.io.probe import why_not_native
from kvterrace.tiers.marker import DriveRecord, propose_drives, write_drives

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


@pytest.mark.usefixtures("python_engine")  # its files can be told to let go of theirs
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
    if why_not_native() is None:
        monkeypatch.setattr("kvterrace.io.native.most_descriptors", lambda: 2)
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
        reader._core.ledger.evict_idle()
        again = checked(reader, chain_of(11, 30))
        assert all(isinstance(one, Hit | Miss) for one in again)
        with opened(tmp_path / "other", ssd_bytes=4 * MiB) as writer:
            for number in range(12):
                stored(writer, chain_of(number, 30))
    with reader_of(tmp_path / "other") as reader:
        reader._mover.follower._each[0].next_s = 1e12  # type: ignore[union-attr]
        for segment in segments(tmp_path / "other"):
            segment.unlink()
        for number in range(12):
            out = bytearray(30 * LAYOUT.block_nbytes // 2)
            layered = reader.wait(reader.get(chain_of(number, 30), out, layers=range(1)), 60.0)
            assert all(isinstance(one, Hit | Miss) for one in layered), layered
        assert reader.stats().get_miss_blocks > 30 and reader._core.volumes[0].gate.is_open
        assert reader.stats().blocks < 360, "what is gone is not asked for again"


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
        assert len(open_below(path)) == len(segments(path)) + 2, (
            "besides the writer's segments, its lock and its folder"
        )
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


def test_a_drive_is_believed_between_the_two_phases_of_a_change(tmp_path: Path) -> None:
    """All drives have the new record beside the old one before any has it in its place; the writer may die there."""
    library = Library(tmp_path / "kv", drives=2, after_s=0.0)
    roots = [tmp_path / "kv" / f"d{at}" for at in range(2)]
    old, new, other = (
        [DriveRecord("5" * 32, generation, change * 32, at, 2) for at in range(2)]
        for generation, change in ((1, "a"), (2, "b"), (2, "c"))
    )
    for root, record in zip(roots, old, strict=True):
        write_drives(root, record)
    chains = [chain_by_path(SMALL, [number] * 2) for number in range(1, 7)]
    for chain in chains:
        library.box.put_now(chain)
        library.box.store.flush(100.0)
    reader = library.open_reader()

    def held() -> list[bool]:
        library.settle(reader)
        return [drive.live_nbytes > 0 for drive in reader.stats().drives]

    assert held() == [True, True]
    for at in (0, 1):
        propose_drives(roots[at], new[at])
        assert held() == [True, True], "agreed on nowhere yet"
    for at in (1, 0):
        write_drives(roots[at], new[at])
        assert held() == [True, True], "in place on one drive, beside the old one on the other; then on both"
        assert [kinds(library.get(reader, chain)) for chain in chains] == [["Hit"] * 2] * 6
    # a drive that has agreed to another change than the one that came to be was away
    write_drives(roots[0], old[0])
    propose_drives(roots[0], other[0])
    assert held() == [False, True]
    propose_drives(roots[0], new[0])
    library.settle(reader)  # only store.json of a stale drive is looked at
    assert held() == [True, True]
    library.close()


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
        "budget",
        "lock",
    ]


def test_a_reader_that_closes_does_not_spin(library: Library) -> None:
    reader = library.open_reader()
    library.settle(reader)
    follower = reader._mover.follower
    assert follower is not None
    library.box.clock.advance(5.0)
    assert follower.timeout_s(library.box.clock.monotonic_s()) <= 0.0
    follower.close()
    assert follower.timeout_s(library.box.clock.monotonic_s()) > 0.0


@pytest.mark.parametrize("layers", [None, range(1)], ids=["whole", "layers"])
@pytest.mark.parametrize("missing", ["header", "payload", "end of the file"])
def test_a_half_written_record_is_read_again(library: Library, layers: range | None, missing: str) -> None:
    """It is no bad place, nor is its copy given up."""
    box, chain = library.box, chain_by_path(SMALL, [1, 2])
    box.put_now(chain)
    box.store.flush(100.0)
    reader = library.open_reader()
    library.settle(reader)
    content = next(content for path, content in library.media[0].names.items() if path.suffix == ".seg")
    whole = content.current
    if missing == "end of the file":
        content.current = whole[: 3 * 4096].copy()  # the file's header, and one record of a header and a payload
        outcomes = [Hit, Miss]
    else:
        at = {"header": 1, "payload": 2}[missing] * 4096
        content.current = whole.copy()
        content.current[at : at + 4096] = 0
        outcomes = [Miss, Hit]
    for _ in range(2):
        assert [type(one) for one in library.get(reader, chain, layers=layers)] == outcomes
    stats = reader.stats()
    assert (stats.get_corrupt_blocks, stats.ssd_quarantined) == (0, 0)
    content.current = whole
    assert [type(one) for one in library.get(reader, chain, layers=layers)] == [Hit, Hit]
