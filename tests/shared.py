"""A writer and its readers on one fake drive, and what the bytes on that drive say, by the rules of docs/design.md."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from tests.crash.kit import MiB, chain_of, opened, stored
from tests.harness import SMALL_NBYTES, Box, Get

from kvterrace.engine.space import SegmentState
from kvterrace.format.record import RecordKind
from kvterrace.format.recovery import SegmentContents, scan_segment
from kvterrace.io.fake import FakeDevice, FakeFile
from kvterrace.keys import KeyChain
from kvterrace.opening import open_store
from kvterrace.store import Store
from kvterrace.testing.invariants import check_invariants
from kvterrace.tiers.directory import StoreDirectory


class Library:
    """A `Box` and readers of its partition, on one medium and in one virtual time."""

    def __init__(self, root: Path, *, drives: int = 1, **options: object) -> None:
        self.box = Box(root, drives=drives, **options)  # type: ignore[arg-type]
        self.media = [device._medium for device in self.box.devices]
        self.readers: list[Store] = []

    def _device(self, number: int) -> FakeDevice:
        device = FakeDevice(self.box.clock)
        device._medium = self.media[number]
        return device

    def open_reader(self, *, dram_blocks: int = 12) -> Store:
        assert self.box.root is not None
        drives = len(self.media)
        roots = [self.box.root] if drives == 1 else [self.box.root / f"d{number}" for number in range(drives)]
        pairs = [(StoreDirectory.view(root, self.box.partition), self._device(at)) for at, root in enumerate(roots)]
        reader = Store(
            dram_nbytes=dram_blocks * SMALL_NBYTES,
            ssd_nbytes=0,
            directory=pairs[0][0],
            engine=pairs[0][1],
            more=pairs[1:],
            clock=self.box.clock,
            background=False,
            read_only=True,
        )
        self.readers.append(reader)
        return reader

    def close_reader(self, reader: Store) -> bool:
        self.readers.remove(reader)
        return reader.close(100.0)

    def restart_writer(self, *, kill: bool) -> None:
        """Close the writer, or let it die with what it has under way; then open it again."""
        if kill:
            for directory, _ in self.box.store._drives:
                directory.close()
            for content in {content for medium in self.media for content in medium._contents}:
                content.handles = 0  # the system closes what the dead had open; the readers' are counted again
            for reader in self.readers:
                for volume in reader._core.volumes:
                    for file in volume.files._files.values():
                        assert isinstance(file, FakeFile) and file.content is not None
                        file.content.handles += 1
        else:
            self.box.store.close(1000.0)
        self.box.devices = [self._device(number) for number in range(len(self.media))]
        self.box.store = self.box._open()

    def seal(self) -> None:
        """Have the writer seal the open segment of the first drive."""
        self.box.writer.seal_open()
        self.box.step()
        self.box.rest()
        states = {segment.state for segment in self.box.store._core.ledger.spaces[0].segments.values()}
        assert states == {SegmentState.SEALED}

    def settle(self, reader: Store, *, look: bool = True) -> None:
        """Have the reader look at the drives, if it is to, and enter all that it found."""
        follower = reader._mover.follower
        assert follower is not None
        if look:
            self.box.clock.advance(1.01)
            for one in follower._each:  # put off by a look that took long, on a busy machine
                one.next_s = min(one.next_s, self.box.clock.monotonic_s())
        for _ in range(500):
            reader.poll()
            if not follower._work and follower.idle and follower.timeout_s(self.box.clock.monotonic_s()) > 0.0:
                break
        else:
            raise AssertionError("the reader does not come to rest")
        check_invariants(reader)

    def get(
        self, reader: Store, chain: KeyChain, start: int = 0, stop: int | None = None, *, layers: range | None = None
    ) -> list[object]:
        """Read, and compare what arrived; the outcomes."""
        got = Get(reader, chain, start, stop, layers=layers)
        for _ in range(2000):
            if got.transfer.done:
                break
            reader.wait(got.transfer, 0.01)
        got.check()
        return list(got.transfer.outcomes)

    def on_drive(self) -> set[bytes]:
        """Keys of the blocks that count, from the bytes on the drives alone."""
        newest: dict[bytes, tuple[int, bool]] = {}
        for medium in self.media:
            for path, content in medium.names.items():
                if path.suffix != ".seg" or path.parent.name != self.box.partition:
                    continue
                data = content.current
                found = scan_segment(lambda at, count, data=data: data[at : at + count], data.nbytes)  # type: ignore[misc]
                if not isinstance(found, SegmentContents):
                    continue
                facts = [
                    (row["key"].tobytes(), int(row["put_seq"]), True)
                    for row in found.entries
                    if row["kind"] == RecordKind.BLOCK
                ]
                facts += [(row["key"].tobytes(), int(row["put_seq"]), False) for row in found.tombstones]
                for key, put_seq, alive in facts:
                    newest[key] = max(newest.get(key, (0, False)), (put_seq, alive))
        return {key for key, (_, alive) in newest.items() if alive}

    def close(self) -> None:
        for reader in list(self.readers):
            assert self.close_reader(reader)
        self.box.store.close(1000.0)


def prefix(chain: KeyChain, keys: set[bytes]) -> int:
    """How many of the first blocks of `chain` are among `keys`."""
    return next((index for index, key in enumerate(chain) if key not in keys), len(chain))


def below(reader: Store) -> set[bytes]:
    """Keys of the blocks of which a reader knows a copy on a drive."""
    table = reader._core.ledger.table
    return {bytes(table.key[block]) for block in range(table.capacity) if table.segment[block] >= 0}


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
