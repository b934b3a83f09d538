"""The SSD tier's files: segments by number, opened, recovered, headed and sealed. Bytes only; what to keep is the
ledger's word.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from kvterrace.buffers import Bytes
from kvterrace.errors import FormatVersionError, StoreUnusableError
from kvterrace.format.record import PAGE_NBYTES
from kvterrace.format.recovery import SegmentContents, scan_segment
from kvterrace.format.recovery import SegmentState as ScanState
from kvterrace.format.segment import (
    BadSegment,
    Footer,
    FooterBuilder,
    NewerFormat,
    SegmentHeader,
    build_footer,
    encode_segment_header,
    footer_nbytes_for,
)
from kvterrace.io.base import FileInfo, IoClass, IoEngine, IoFile, IoKind, IoRequest, IoResult
from kvterrace.tiers.answering import answer, answers
from kvterrace.types import DeviceFailed

__all__ = ["NewFile", "RecoveredSegment", "SegmentFiles", "aligned_pages", "footer_room_nbytes", "segment_number"]

_log = logging.getLogger(__name__)
_NAME = re.compile(r"([0-9a-f]{8})\.seg")
#: Segments are numbered below this: more than any drive lives to see.
_NUMBERS = 2**31 - 1
#: A file numbered this much above every segment whose header can be believed was not left by a crash: it is a stray.
_STRAY = 2**22


def segment_number(name: str) -> int | None:
    """What a segment's file is called by, if `name` is the name of one."""
    match = _NAME.fullmatch(name)
    number = int(match[1], 16) if match else _NUMBERS
    return number if 0 < number < _NUMBERS else None


def footer_room_nbytes(records: int, namespaces: int) -> int:
    """Bytes to keep free at the end of a segment for its footer and trailer. A tombstone record counts as 64
    records.
    """
    return footer_nbytes_for(records, namespaces, 0) + PAGE_NBYTES


@dataclass(frozen=True, slots=True)
class RecoveredSegment:
    """A segment found at open: its number, what it takes of the drive, and what it holds.

    A `BadSegment` holds nothing that can be believed and may be removed; None is not ours to touch, or could not be
    read. Where not all of it was `readable` there may be more: nothing is written into it.
    """

    number: int
    file_nbytes: int
    contents: SegmentContents | BadSegment | None
    readable: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class NewFile:
    """A segment's file just made: its nonce, and its header page, not yet written."""

    file: IoFile
    nonce: bytes
    page: Bytes


@dataclass(frozen=True, slots=True, eq=False)
class _Scan:
    """What a thread found in a segment's file, and the file, open."""

    file: IoFile | None
    contents: SegmentContents | BadSegment | NewerFormat | DeviceFailed
    readable: bool


class SegmentFiles:
    """Open segment files of one volume. The tables are changed only by the mover; `engine` does the I/O.

    Segments go by the numbers of `SegmentSpace`. On the drive, in names and headers, they count from 1 in each volume.
    """

    def __init__(self, engine: IoEngine, folder: Path, store_uuid: bytes, *, base: int = 0, count: int = _NUMBERS):
        """
        Args:
            base: the number before the volume's first. `recover` moves it so that the first segment found is the first.
            count: how many numbers the volume has.
        """
        self.engine = engine
        self._base = base
        self._count = count
        self.folder = folder
        self.store_uuid = store_uuid
        self._files: dict[int, IoFile] = {}
        self._nonces: dict[int, bytes] = {}
        self.footers: dict[int, FooterBuilder] = {}
        self._recovered: dict[int, Footer] = {}
        #: Segments that are another store's, or were renamed: never used, and never removed.
        self.foreign: set[int] = set()
        #: What the partition's files that are no segments take of the drive, as `recover` found them.
        self.other_nbytes = 0

    def on_drive(self, number: int) -> int:
        """By which number segment `number` goes on the drive."""
        return number - self._base

    def path(self, number: int) -> Path:
        """Path of segment `number`."""
        return self.folder / f"{self.on_drive(number):08x}.seg"

    def file(self, number: int) -> IoFile:
        """The open file of segment `number`."""
        return self._files[number]

    def nonce(self, number: int) -> bytes:
        """What every record of segment `number` carries."""
        return self._nonces[number]

    def is_open(self, number: int) -> bool:
        """Whether segment `number` is in the tables."""
        return number in self._files

    @property
    def direct(self) -> bool:
        """Whether I/O on every open segment bypasses the page cache; False if none is open."""
        return bool(self._files) and all(file.direct for file in self._files.values())

    def where(self, number: int, offset: int) -> str:
        """A place, for messages."""
        return f"{self.path(number)}@{offset}"

    def create(self, number: int, nbytes: int, created_unix_ns: int) -> NewFile:
        """Make the file of a new segment, with `nbytes` reserved. Blocks; runs on an engine's thread, touches no table.

        The header page is still to be written at offset 0. Raises OSError.
        """
        nonce = os.urandom(16)
        page = aligned_pages()
        encode_segment_header(SegmentHeader(self.store_uuid, nonce, number - self._base, created_unix_ns, nbytes), page)
        file = self.engine.create(self.path(number), nbytes)
        try:
            self.engine.sync_folder(self.folder)
        except OSError:  # nobody would know of it, nor count it
            self.engine.close_file(file)
            self.engine.unlink(self.path(number))
            raise
        return NewFile(file, nonce, page)

    def created(self, number: int, file: IoFile, nonce: bytes) -> None:
        """Enter a file from `create` into the tables."""
        self._files[number] = file
        self._nonces[number] = nonce
        self.footers[number] = FooterBuilder()

    def footer(self, number: int, data_end: int) -> Bytes:
        """Footer and trailer of segment `number`, to be written at `data_end`."""
        footer = self._recovered.get(number) or self.footers[number].build()
        return build_footer(footer, nonce=self._nonces[number], segment_id=number - self._base, data_end=data_end)

    def resume(self, number: int) -> None:
        """Segment `number`, recovered without a footer, is appended to again: `footers` knows what it holds."""
        self.footers[number] = FooterBuilder.of(self._recovered.pop(number))

    @property
    def scanned(self) -> set[int]:
        """Segments that were recovered without a footer to believe, and have none yet."""
        return set(self._recovered)

    def sealed(self, number: int) -> None:
        """Segment `number` has its footer on the drive: what it was made of is not needed any more."""
        self.footers.pop(number, None)
        self._recovered.pop(number, None)

    def remove(self, number: int) -> None:
        """Unlink the file, for good; it may be gone already. Blocks; runs on an engine's thread, touches no table.

        Raises OSError.
        """
        with contextlib.suppress(FileNotFoundError):
            self.engine.unlink(self.path(number))
        self.engine.sync_folder(self.folder)  # or it could come back after the tombstones that kill what is in it

    def forget(self, number: int) -> None:
        """Close the file of a segment and take it out of the tables."""
        file = self._files.pop(number, None)
        if file is not None:
            self.engine.close_file(file)
        self._nonces.pop(number, None)
        self.sealed(number)

    def close(self) -> None:
        """Close every file."""
        for number in list(self._files):
            self.forget(number)

    def recover(self) -> list[RecoveredSegment]:
        """Read what the partition holds, in order of number, and open it for reading. Blocks; changes nothing on the
        drive.

        Raises:
            FormatVersionError: a segment was written by a newer version.
            StoreUnusableError: the drive does not answer, or the segments' numbers are too far apart for one of several
                volumes.
        """
        files: list[tuple[int, FileInfo]] = []
        for info in answer(self.engine, self.folder, lambda: self.engine.list(self.folder)):
            number = segment_number(info.name)
            if number is not None:
                files.append((number, info))
            else:  # none of ours, yet it takes room
                self.other_nbytes += _taken_nbytes(info)
        base = self._base
        if files and self._count < _NUMBERS:
            self._base -= files[0][0] - 1
        # on the engine's threads: a drive has many reads in flight, and a segment takes three, one after the other
        scans: list[IoRequest] = []
        for number, info in files:
            finish = partial(self._scan, self._base + number, info.nbytes)
            where = self._base + number, _taken_nbytes(info)
            scans.append(IoRequest(IoKind.CALL, IoClass.DEMOTION, finish=finish, tag=where))
        self.engine.submit(scans)
        found: dict[int, RecoveredSegment] = {}
        fault: BaseException | None = None
        for result in answers(self.engine, self.folder, len(scans)):
            tag: Any = result.request.tag
            fault = fault or result.crash
            if isinstance(result.value, _Scan):
                found[tag[0]] = self._enter(tag[0], tag[1], result.value)
        if fault is not None:
            raise fault
        kept = self._without_strays(found)
        if not kept:
            self._base = base
        elif self._count < _NUMBERS:
            first, last = self.on_drive(kept[0].number), self.on_drive(kept[-1].number)
            if last - files[0][0] + 1 >= self._count:
                raise StoreUnusableError(
                    f"{self.folder} has segments {first:08x} to {last:08x}, too far apart for one of several drives; "
                    "open the store with this path alone, or remove the segments"
                )
        return kept

    def _without_strays(self, found: dict[int, RecoveredSegment]) -> list[RecoveredSegment]:
        """Those found, in order; but a file far off that is no segment of ours only takes room: were its number taken
        for one that was given, none might be left.
        """
        believed = (number for number, one in found.items() if isinstance(one.contents, SegmentContents))
        end = max(believed, default=self._base) + _STRAY
        for number, one in found.items():
            if number > end:
                _log.warning("%s is no segment of this store; it only takes room", self.path(number))
                self.other_nbytes += one.file_nbytes
        return [found[number] for number in sorted(found) if number <= end]

    def _scan(self, number: int, nbytes: int, _: IoResult) -> _Scan:
        """Open and read one segment. On an engine's thread: touches no table."""
        path = self.path(number)
        try:
            file = self.engine.reopen(path)
        except OSError as error:
            return _Scan(None, DeviceFailed(str(path), f"it cannot be opened ({error})"), readable=False)
        buffer = aligned_pages()
        readable = True

        def read(offset: int, want: int) -> Bytes:
            nonlocal buffer, readable
            if want > buffer.nbytes:
                buffer = aligned_pages(want // PAGE_NBYTES)
            got = 0
            try:
                got = self.engine.read_now(file, offset, buffer[:want])
            finally:
                readable &= got == want
            return buffer[:got]

        contents = scan_segment(read, nbytes)
        return _Scan(file, contents, readable)

    def _enter(self, number: int, taken: int, scan: _Scan) -> RecoveredSegment:
        path, contents, file = self.path(number), scan.contents, scan.file
        match contents:
            case SegmentContents():
                if contents.header.store_uuid != self.store_uuid or contents.header.segment_id != number - self._base:
                    _log.warning("segment %s belongs to another store or has been renamed; it is not used", path)
                    self.foreign.add(number)
                else:
                    for problem in contents.problems:
                        _log.info("segment %s: %s", path, problem)
                    assert file is not None, "contents without a file"
                    self._files[number] = file
                    self._nonces[number] = contents.header.nonce
                    if contents.state is ScanState.SCANNED:
                        self._recovered[number] = Footer(contents.entries, contents.namespaces, contents.tombstones)
                    return RecoveredSegment(number, taken, contents, scan.readable)
            case NewerFormat(version):
                self._close(file)
                raise FormatVersionError(
                    f"{path} was written in segment format {version}; upgrade kvterrace to read it"
                )
            case BadSegment(reason):
                _log.info("segment %s holds nothing that can be used: %s", path, reason)
                self._close(file)
                return RecoveredSegment(number, taken, contents, scan.readable)
            case DeviceFailed(_, reason):
                _log.warning("segment %s cannot be read: %s; its blocks are lost to this process", path, reason)
        self._close(file)
        return RecoveredSegment(number, taken, None, readable=False)

    def _close(self, file: IoFile | None) -> None:
        if file is not None:
            self.engine.close_file(file)


def _taken_nbytes(info: FileInfo) -> int:
    return max(info.nbytes, info.allocated_nbytes)


def aligned_pages(pages: int = 1) -> Bytes:
    """Memory fit for O_DIRECT."""
    memory = np.zeros((pages + 1) * PAGE_NBYTES, np.uint8)
    start = -memory.ctypes.data % PAGE_NBYTES
    return memory[start : start + pages * PAGE_NBYTES]
