"""Segments that another process writes, as a reader of its partition finds them. Nothing of theirs is changed."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kvterrace.buffers import Bytes
from kvterrace.errors import FormatVersionError, KVTerraceError
from kvterrace.format.growing import scan_onward
from kvterrace.format.record import PAGE_NBYTES
from kvterrace.format.recovery import ReadAt, SegmentContents, read_sealed, scan_segment
from kvterrace.format.recovery import SegmentState as ScanState
from kvterrace.format.segment import BadSegment, NewerFormat, SegmentHeader
from kvterrace.io.base import FileInfo, IoEngine, IoFile
from kvterrace.tiers.marker import Marker, read_marker
from kvterrace.tiers.segments import SegmentFiles, aligned_pages, segment_number
from kvterrace.types import DeviceFailed

__all__ = ["Known", "Learnt", "Look", "SharedFiles"]

_log = logging.getLogger(__name__)

#: Records that one look takes from the end of one segment that is still written; the next look takes more.
_MOST_RECORDS = 4096


@dataclass(frozen=True, slots=True)
class Known:
    """A segment that the reader has entered. `mark`: of its file, as listed. `data_end`: up to where it was read."""

    number: int
    file: IoFile
    header: SegmentHeader
    mark: int
    data_end: int
    sealed: bool


@dataclass(frozen=True, slots=True, eq=False)
class Learnt:
    """What a look has found in one file that was not known. `was`: what was; None for a new one.

    `contents`: rows of what is new; of a segment just sealed, or just found, all. None: nothing but `mark` is new.
    """

    name: str
    was: Known | None
    file: IoFile
    mark: int
    file_nbytes: int
    header: SegmentHeader
    contents: SegmentContents | None
    data_end: int
    sealed: bool


@dataclass(slots=True, eq=False)
class Look:
    """What a look at the folder found. Where it `failed`, nothing is known: `gone` is empty then.

    `gone`: names known before that stand for no file any more, or for another. `marker`: what `store.json` says now.
    `others`: what lies in the folder beside segments.
    """

    marker: Marker | None = None
    learnt: list[Learnt] = field(default_factory=list)
    gone: list[str] = field(default_factory=list)
    others: list[FileInfo] = field(default_factory=list)
    failed: Exception | None = None
    took_s: float = 0.0


class SharedFiles(SegmentFiles):
    """Files of one volume that another process writes. `look` may run on an engine's thread, all else under the lock.

    Numbers of segments are the reader's own, in the order of finding: a name that stands for another file by now has
    another number.
    """

    def __init__(self, engine: IoEngine, folder: Path, store_uuid: bytes) -> None:
        super().__init__(engine, folder, store_uuid)
        self._root = folder.parent.parent
        self._names: dict[int, str] = {}
        self._told: set[str] = set()  # problems that were logged

    def path(self, number: int) -> Path:
        return self.folder / self._names.get(number, f"segment {number}")

    def enter(self, number: int, one: Learnt) -> None:
        """Give a new file its number."""
        self._names[number] = one.name
        self._files[number] = one.file
        self._nonces[number] = one.header.nonce

    def forget(self, number: int) -> None:
        super().forget(number)
        self._names.pop(number, None)

    def look(self, known: Mapping[str, Known], *, first: bool = False, marker_only: bool = False) -> Look:
        """Look at the folder: list it, then read what is new. Blocks; touches no table, never raises but `first`.

        The order matters: what a segment that is gone had to hand on was durable elsewhere before it went.

        Args:
            known: what the reader has entered, by file name.
            first: read segments without a footer in full, as a writer does at open, and raise what stands in the way:
                OSError, FormatVersionError, NotAStoreError.
            marker_only: leave the segments alone.
        """
        look, begun_s = Look(), time.monotonic()
        try:
            look.marker = read_marker(self._root)
            if marker_only:
                return look
            everything = self.engine.list(self.folder)
            listed = [info for info in everything if segment_number(info.name) is not None]
            look.others = [info for info in everything if segment_number(info.name) is None]
            for info in listed:
                was = known.get(info.name)
                if was is None or not was.sealed or was.mark != info.mark or not info.mark:
                    self._read(look, info, was, first=first)
            look.gone += sorted(known.keys() - {info.name for info in listed})
        except (OSError, KVTerraceError) as error:
            self.drop(look)
            if first:
                raise
            look = Look(failed=error)
        look.took_s = time.monotonic() - begun_s
        return look

    def drop(self, look: Look) -> None:
        """Close the files that a look has opened, for nobody wants them."""
        for one in look.learnt:
            if one.was is None:
                self.engine.close_file(one.file)

    def _read(self, look: Look, info: FileInfo, was: Known | None, *, first: bool) -> None:
        try:
            file = self.engine.open(self.folder / info.name)
        except FileNotFoundError:  # gone since it was listed; if it was known, the next look says so
            return
        except OSError as error:
            if first and isinstance(error, PermissionError):
                raise
            self._tell(info.name, DeviceFailed(info.name, str(error)))
            return
        kept = False
        try:
            read = self._reading(file)
            found = scan_segment(read, info.nbytes) if first else read_sealed(read, info.nbytes)
            header = found.header if isinstance(found, SegmentContents) else found
            if not isinstance(header, SegmentHeader):
                if isinstance(header, NewerFormat) and first:
                    raise FormatVersionError(
                        f"{file.path} was written in segment format {header.version}; upgrade kvterrace to read it"
                    )
                self._tell(info.name, header)
                return
            if header.store_uuid != self.store_uuid or header.segment_id != segment_number(info.name):
                self._tell(info.name, BadSegment("it belongs to another store or has been renamed"))
                return
            if was is not None and was.header.nonce != header.nonce:
                look.gone.append(info.name)
                was = None
            one = _learnt(read, info, was, file, header, found if isinstance(found, SegmentContents) else None)
            kept = was is None
            if kept or one.contents is not None or one.mark != (was.mark if was else 0):
                look.learnt.append(one)
        finally:
            if not kept:
                self.engine.close_file(file)

    def _reading(self, file: IoFile) -> ReadAt:
        buffer = aligned_pages(256)

        def read(offset: int, want: int) -> Bytes:
            nonlocal buffer
            if want > buffer.nbytes:
                buffer = aligned_pages(want // PAGE_NBYTES)
            return buffer[: self.engine.read_now(file, offset, buffer[:want])]

        return read

    def _tell(self, name: str, why: BadSegment | NewerFormat | DeviceFailed) -> None:
        """Log once that a segment is passed over. It is looked at again each time: it may be half-made."""
        if isinstance(why, BadSegment):
            return
        if name not in self._told:
            self._told.add(name)
            reason = f"format {why.version}, newer than this kvterrace" if isinstance(why, NewerFormat) else why.reason
            _log.warning("segment %s is not read: %s", self.folder / name, reason)


def _learnt(
    read: ReadAt, info: FileInfo, was: Known | None, file: IoFile, header: SegmentHeader, found: SegmentContents | None
) -> Learnt:
    """What is new in a file, of which `found` is the footer, or what the first scan found."""
    file = file if was is None else was.file
    taken_nbytes = max(info.nbytes, info.allocated_nbytes)
    if found is not None:
        sealed = found.state is ScanState.SEALED
        news = None if was is not None and was.sealed else found
        return Learnt(info.name, was, file, info.mark, taken_nbytes, header, news, found.data_end, sealed)
    start = PAGE_NBYTES if was is None else was.data_end
    more, end = scan_onward(read, header.nonce, start, info.nbytes, most=_MOST_RECORDS)
    contents = None
    if was is None or end > start:
        contents = SegmentContents(
            header, ScanState.SCANNED, more.entries, more.namespaces, more.tombstones, end, info.nbytes
        )
    return Learnt(info.name, was, file, info.mark, taken_nbytes, header, contents, end, sealed=False)
