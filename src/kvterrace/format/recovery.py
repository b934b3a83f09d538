"""What a segment holds, from its bytes alone; and which blocks are live over several segments.

`scan_segment` is a function of a `read`; it opens nothing. Whatever the bytes are, it answers with a value.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kvterrace.buffers import Bytes
from kvterrace.format.checksum import crc32c
from kvterrace.format.lineage import highest_above, parent_rows
from kvterrace.format.record import (
    PAGE_NBYTES,
    RECORD_MAGIC,
    BadRecord,
    RecordHeader,
    RecordKind,
    decode_header,
    peek_header_nbytes,
)
from kvterrace.format.segment import (
    ENTRY_DTYPE,
    MAX_SEGMENT_NBYTES,
    RECORDS_AT,
    TOMBSTONE_DTYPE,
    BadFooter,
    BadSegment,
    EntryTable,
    Footer,
    FooterBuilder,
    NewerFormat,
    SegmentHeader,
    TombstoneTable,
    parse_footer,
    parse_segment_header,
    parse_trailer,
)
from kvterrace.types import DeviceFailed

__all__ = [
    "BAD_PUT_SEQ",
    "LiveEntries",
    "ReadAt",
    "SegmentContents",
    "SegmentState",
    "last_choice",
    "live_entries",
    "read_sealed",
    "scan_segment",
]

#: In place of a bad record's own: those of a partition begin with 1.
BAD_PUT_SEQ = 0

#: `read(offset, nbytes)`: the bytes from `offset` on, perhaps fewer. Both arguments are multiples of a page. The result
#: is only used until the next call. An OSError counts as nothing read.
ReadAt = Callable[[int, int], Bytes]

_MAGIC_U64 = np.frombuffer(RECORD_MAGIC, dtype="<u8")[0]
_MAX_PROBLEMS = 100
_NOTHING: Bytes = np.zeros(0, dtype=np.uint8)


class SegmentState(enum.Enum):
    """How the contents of a segment are known."""

    #: Footer and trailer are right: the entries come from them, payloads were not read.
    SEALED = "sealed"
    #: No footer to believe: every entry's record was read in full and verified.
    SCANNED = "scanned"


@dataclass(frozen=True, slots=True, eq=False)
class SegmentContents:
    """One segment.

    Attributes:
        state: where the entries come from.
        entries: `ENTRY_DTYPE` in order of offset, tombstone records included.
        namespaces: digests; an entry's `namespace` counts in here.
        tombstones: `TOMBSTONE_DTYPE`, dropped keys.
        data_end: first byte after the last believed record.
        file_nbytes: size of the file as told to `scan_segment`.
        problems: one line each, for people; bounded.
        newest_put_seq: of a scan, the highest put_seq in any header that is valid and in its place, whether or not the
            rest of the record was there.
    """

    header: SegmentHeader
    state: SegmentState
    entries: EntryTable
    namespaces: tuple[bytes, ...]
    tombstones: TombstoneTable
    data_end: int
    file_nbytes: int
    problems: list[str] = field(default_factory=list)
    newest_put_seq: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class LiveEntries:
    """The live blocks of one partition: `entries[i]` lies in segment number `segments[i]` of the contents given.
    An entry's `namespace` counts in `namespaces`. In order of segment, then offset."""

    entries: EntryTable
    segments: npt.NDArray[np.uint32]
    namespaces: tuple[bytes, ...]


def scan_segment(
    read: ReadAt, nbytes: int, *, piece_nbytes: int = 1 << 20
) -> SegmentContents | BadSegment | NewerFormat | DeviceFailed:
    """What a segment file of `nbytes` bytes holds. Blocks on `read`; holds one piece in memory besides the result.

    A sealed segment takes three reads: header page, trailer page, footer. Otherwise every page from `RECORDS_AT` on is
    read, about once, in pieces of `piece_nbytes` (whole pages), and a record counts only if its header is valid, has
    the segment's nonce and its own offset, lies wholly in the file, and every part verifies. After a place that is not
    a record the scan goes on with the next page: a hole hides nothing behind it.

    Returns:
        BadSegment: no usable header page (an empty or half-made file, or damage): nothing in it can be believed.
        NewerFormat: a newer kvterrace wrote it; leave it alone.
        DeviceFailed: the header page could not be read, though the file is long enough. Nothing is known about it.
    """
    source = _Source(read, nbytes // PAGE_NBYTES * PAGE_NBYTES, max(piece_nbytes // PAGE_NBYTES, 1) * PAGE_NBYTES)
    found = _read_index(source, nbytes)
    return _scan_records(source, found, nbytes) if isinstance(found, SegmentHeader) else found


def read_sealed(read: ReadAt, nbytes: int) -> SegmentContents | SegmentHeader | BadSegment | NewerFormat | DeviceFailed:
    """As `scan_segment`, but of a segment without a footer to believe its header only: no record is looked for."""
    return _read_index(_Source(read, nbytes // PAGE_NBYTES * PAGE_NBYTES, PAGE_NBYTES), nbytes)


def _read_index(
    source: _Source, nbytes: int
) -> SegmentContents | SegmentHeader | BadSegment | NewerFormat | DeviceFailed:
    if nbytes < PAGE_NBYTES:
        return BadSegment(f"a file of {nbytes} B is shorter than a segment header")
    page = source.fetch(0, PAGE_NBYTES)
    if page.nbytes < PAGE_NBYTES:
        return DeviceFailed("segment@0", source.problems[-1] if source.problems else "short read")
    header = parse_segment_header(page)
    if not isinstance(header, SegmentHeader):
        return header
    if nbytes > MAX_SEGMENT_NBYTES:
        return BadSegment(f"a file of {nbytes} B is larger than any segment may be ({MAX_SEGMENT_NBYTES} B)")
    sealed = _read_footer(source, header, nbytes)
    if isinstance(sealed, BadFooter):
        source.note(sealed.reason)
        return header
    return sealed


def live_entries(contents: Sequence[SegmentContents]) -> LiveEntries:
    """The blocks that count, over all segments of ONE partition (put_seq is a partition's counter).

    Of several records with one key the highest put_seq wins, of equal ones (a copy carried forward) the later in
    `contents`; a block is dead if a tombstone of its key, or of one that it hangs on, has a higher put_seq. So what an
    invalidation did not know of stays dead, too, when what it hangs on was put again. About 1 s for a million entries.
    """
    namespaces: dict[bytes, int] = {}
    if not contents:
        return LiveEntries(np.zeros(0, dtype=ENTRY_DTYPE), np.zeros(0, dtype=np.uint32), ())
    entries = _joined([one.entries for one in contents], ENTRY_DTYPE)
    segments = np.repeat(np.arange(len(contents), dtype=np.uint32), [len(one.entries) for one in contents])
    end = 0
    for one in contents:
        start, end = end, end + len(one.entries)
        remap = [namespaces.setdefault(digest, len(namespaces)) for digest in one.namespaces]
        if remap != list(range(len(remap))):
            names = entries["namespace"][start:end]
            names[:] = np.array(remap, dtype=np.uint32)[names]
    is_block = entries["kind"] == RecordKind.BLOCK
    if not is_block.all():
        entries, segments = entries[is_block], segments[is_block]
    blocks = len(entries)
    dead = _joined([one.tombstones for one in contents], TOMBSTONE_DTYPE)
    keys = np.concatenate([_key_words(entries["key"]), _key_words(dead["key"])])
    put_seq = np.concatenate([entries["put_seq"], dead["put_seq"]])

    # Keys are hashes: nearly all differ in their first word, and only the rows that share one need a full sort.
    order = np.argsort(keys[:, 0], kind="stable")
    words = keys[order, 0]
    twin = np.zeros(len(words), dtype=bool)
    twin[1:] = words[1:] == words[:-1]
    twin[:-1] |= twin[1:]
    alive = np.zeros(len(words), dtype=bool)
    alive[order[~twin]] = True
    rows = order[twin]
    is_block = rows < blocks
    rows = rows[np.lexsort((rows, is_block, put_seq[rows], *keys[rows].T))]
    if len(rows):
        last = np.ones(len(rows), dtype=bool)  # the last row of each key decides: a block is live, a tombstone is not
        last[:-1] = (keys[rows[1:]] != keys[rows[:-1]]).any(axis=1)
        alive[rows[last]] = True
    chosen = np.flatnonzero(alive[:blocks])
    if len(dead):
        chosen = chosen[~_is_below_a_tombstone(entries[chosen], dead)]
    if len(chosen) < len(entries):
        entries, segments = entries[chosen], segments[chosen]
    return LiveEntries(entries, segments, tuple(namespaces))


def last_choice(contents: SegmentContents, bad: Iterable[tuple[int, int]]) -> SegmentContents:
    """The same contents, with block records that touch `bad` extents (offset, bytes) older than any other of their
    blocks: their put_seq is `BAD_PUT_SEQ`.
    """
    places = list(bad)
    if not places:
        return contents
    entries = contents.entries.copy()
    start, end = entries["offset"], entries["offset"] + entries["record_nbytes"]
    for offset, nbytes in places:
        touched = (start < np.uint64(offset + nbytes)) & (end > np.uint64(offset))
        entries["put_seq"][touched & (entries["kind"] == RecordKind.BLOCK)] = BAD_PUT_SEQ
    return replace(contents, entries=entries)


def _joined(tables: Sequence[npt.NDArray[Any]], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """One table, a copy. As plain bytes: NumPy compares the fields of structured tables for each of them anew."""
    whole: npt.NDArray[Any] = np.concatenate([np.ascontiguousarray(one).view(np.uint8) for one in tables]).view(dtype)
    return whole


def _is_below_a_tombstone(entries: EntryTable, dead: TombstoneTable) -> npt.NDArray[np.bool_]:
    """Which of `entries` (one for each key) are older than a tombstone of a block that they hang on."""
    buried: dict[bytes, int] = {}
    firsts = _key_words(entries["key"])[:, 0]
    for row in dead[np.isin(_key_words(dead["key"])[:, 0], firsts)]:
        key, put_seq = row["key"].tobytes(), int(row["put_seq"])
        buried[key] = max(put_seq, buried.get(key, 0))
    if not buried:
        return np.zeros(len(entries), dtype=bool)
    limits = np.zeros(len(entries), dtype=np.uint64)
    for at in np.flatnonzero(np.isin(firsts, _key_words(np.array(list(buried), "V32"))[:, 0])).tolist():
        limits[at] = buried.get(entries["key"][at].tobytes(), 0)
    below: npt.NDArray[np.bool_] = entries["put_seq"] < highest_above(parent_rows(entries), limits)
    return below


def _key_words(keys: npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
    return np.ascontiguousarray(keys).view(np.uint64).reshape(-1, 4)


class _Source:
    """Reads through a window of one piece; faults become problems and short views."""

    def __init__(self, read: ReadAt, limit: int, piece: int) -> None:
        self._read, self.limit, self.piece = read, limit, piece
        self._start, self._window = 0, _NOTHING
        self.problems: list[str] = []
        self.newest_put_seq = 0

    def note(self, problem: str) -> None:
        if len(self.problems) < _MAX_PROBLEMS:
            self.problems.append(problem)
        elif len(self.problems) == _MAX_PROBLEMS:
            self.problems.append("... and more")

    def fetch(self, offset: int, nbytes: int) -> Bytes:
        """One read of whole pages; what came, cut to whole pages. Earlier views are void: `read` may reuse memory."""
        self._window = _NOTHING
        try:
            data = self._read(offset, nbytes)
        except OSError as error:
            self.note(f"read of {nbytes} B at {offset} failed: {error}")
            return _NOTHING
        if data.nbytes < nbytes:
            self.note(f"read of {nbytes} B at {offset} gave {data.nbytes} B")
        return data[: min(data.nbytes, nbytes) // PAGE_NBYTES * PAGE_NBYTES]

    def some(self, offset: int, nbytes: int) -> Bytes:
        """From 1 to `nbytes` bytes at `offset`, or none if they cannot be read. Valid until the next call."""
        if offset >= self.limit:
            return _NOTHING
        at = offset - self._start
        if not 0 <= at < self._window.nbytes:
            self._start = offset // PAGE_NBYTES * PAGE_NBYTES
            self._window = self.fetch(self._start, min(self.piece, self.limit - self._start))
            at = offset - self._start
        return self._window[at : at + nbytes]

    def whole(self, offset: int, nbytes: int) -> Bytes:
        """All `nbytes` bytes at `offset`, joined if they span pieces; fewer if they cannot be read."""
        first = self.some(offset, nbytes)
        if first.nbytes == nbytes or not first.nbytes:
            return first
        joined = [first.copy()]
        have = first.nbytes
        while have < nbytes and (more := self.some(offset + have, nbytes - have)).nbytes:
            joined.append(more.copy())
            have += more.nbytes
        return np.concatenate(joined)

    def stream(self, offset: int, nbytes: int) -> Iterator[Bytes]:
        """The bytes at `offset` bit by bit; ends early if they cannot be read."""
        end = offset + nbytes
        while offset < end and (view := self.some(offset, end - offset)).nbytes:
            yield view
            offset += view.nbytes


def _read_footer(source: _Source, header: SegmentHeader, nbytes: int) -> SegmentContents | BadFooter:
    if nbytes % PAGE_NBYTES or nbytes < RECORDS_AT + PAGE_NBYTES:
        return BadFooter(f"not sealed: a file of {nbytes} B has no trailer")
    trailer = parse_trailer(source.fetch(nbytes - PAGE_NBYTES, PAGE_NBYTES))
    if isinstance(trailer, NewerFormat):
        return BadFooter(f"trailer of format version {trailer.version} in an older segment")
    if isinstance(trailer, BadFooter):
        return trailer
    if trailer.nonce != header.nonce or trailer.segment_id != header.segment_id or trailer.file_nbytes != nbytes:
        return BadFooter("trailer: of another segment, or in another place")
    footer = parse_footer(trailer, source.fetch(trailer.footer_offset, trailer.footer_nbytes))
    if isinstance(footer, BadFooter):
        return footer
    return _contents(header, SegmentState.SEALED, footer, trailer.data_end, nbytes, source.problems)


def _contents(
    header: SegmentHeader,
    state: SegmentState,
    footer: Footer,
    data_end: int,
    nbytes: int,
    problems: list[str],
    newest_put_seq: int = 0,
) -> SegmentContents:
    return SegmentContents(
        header, state, footer.entries, footer.namespaces, footer.tombstones, data_end, nbytes, problems, newest_put_seq
    )


def _scan_records(source: _Source, header: SegmentHeader, nbytes: int) -> SegmentContents:
    found = FooterBuilder()
    data_end = offset = RECORDS_AT
    while offset < source.limit:
        window = source.some(offset, source.piece)
        if not window.nbytes:
            offset += source.piece - offset % source.piece  # unreadable: go on with the next piece
            continue
        words = window.reshape(-1, PAGE_NBYTES)[:, :8].copy().view("<u8")[:, 0]
        hits = np.flatnonzero(words == _MAGIC_U64)
        if not len(hits):
            offset += window.nbytes
            continue
        offset += int(hits[0]) * PAGE_NBYTES
        record = _read_record(source, header.nonce, offset)
        if isinstance(record, _Foreign):
            offset += PAGE_NBYTES
        elif isinstance(record, BadRecord):
            source.note(f"record at {offset}: {record.reason}")
            offset += PAGE_NBYTES
        else:
            found.add(record[0], tombstone_keys=record[1])
            offset = data_end = offset + record[0].record_nbytes
    footer, newest = found.build(), source.newest_put_seq
    return _contents(header, SegmentState.SCANNED, footer, data_end, nbytes, source.problems, newest)


class _Foreign:
    """A valid header that is none of this segment's business: an older segment's, or a copy inside a payload."""


def _read_record(source: _Source, nonce: bytes, offset: int) -> tuple[RecordHeader, bytes] | BadRecord | _Foreign:
    """The record at `offset`, verified in full, with the keys of a tombstone."""
    nbytes = peek_header_nbytes(source.some(offset, PAGE_NBYTES))
    if isinstance(nbytes, BadRecord):
        return nbytes
    header = decode_header(source.whole(offset, nbytes))
    if isinstance(header, BadRecord):
        return header
    if header.nonce != nonce:
        return _Foreign()
    if header.offset != offset:
        return BadRecord(f"belongs at {header.offset}")
    source.newest_put_seq = max(source.newest_put_seq, header.put_seq)
    if offset + header.record_nbytes > source.limit:
        return BadRecord(f"{header.record_nbytes} B are cut by the end of the file")
    start = offset + header.header_nbytes
    keys = b""
    for number, (at, part_nbytes, expected, _) in enumerate(header.parts.tolist()):
        crc = have = 0
        for view in source.stream(start + at, part_nbytes):
            crc = crc32c(view, crc)
            have += view.nbytes
            if header.kind is RecordKind.TOMBSTONE:
                keys += view.tobytes()
        if have != part_nbytes or crc != expected:
            return BadRecord(f"part {number}: CRC {crc:08x} of {have} B, expected {expected:08x} of {part_nbytes} B")
    return header, keys
