"""Places and blocks that went wrong on a drive, remembered across restarts (R34). The format: docs/design.md.

`encode` and `decode` are pure. `Quarantine` is the memory: sans-I/O, it hands out one `LogWrite` at a time and is told
how it ended. `LogFile` carries such a write out through an I/O engine, step by step, without a thread of its own.

Entries are facts that only accumulate (this place is bad; this block has failed at least n times), so reading several
log files is their union, in any order, and an entry that is there twice does no harm. That makes rewriting safe without
a rename: a new file with everything is made durable first, then the old ones are unlinked; a crash in between leaves
both. For the same reason a lost entry costs one more failed read, never a wrong block.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from kvterrace.buffers import Bytes
from kvterrace.format.checksum import crc32c
from kvterrace.io.base import PAGE_NBYTES

__all__ = [
    "ENTRY_NBYTES",
    "FILE_NBYTES",
    "MAX_ENTRIES",
    "BadBlock",
    "BadPlace",
    "Decoded",
    "LogWrite",
    "Quarantine",
    "aligned_zeros",
    "decode",
    "encode",
    "log_generation",
    "log_name",
    "log_nbytes_for",
]

ENTRY_NBYTES = 64
_PER_PAGE = PAGE_NBYTES // ENTRY_NBYTES
#: Size of a log file, reserved when it is made, so that a drive that fills up later does not refuse an entry.
FILE_NBYTES = 64 * PAGE_NBYTES
#: A log takes at most this part of the capacity, but two pages.
_CAP_PARTS = 64
#: What is remembered at most: half a file, so that a rewritten one has room for 32 appends. A drive with 2,048 bad
#: places is a bad drive (`Quarantine.full`).
MAX_ENTRIES = FILE_NBYTES // ENTRY_NBYTES // 2

_MAGIC = b"KVTQ"
_VERSION = 1
_PLACE, _BLOCK = 1, 2
# magic, version, kind, crc, count, segment, offset, identity
_ENTRY = struct.Struct("<4sHHIIQQ32s")
assert _ENTRY.size == ENTRY_NBYTES
_CRC = struct.Struct("<I")
_CRC_AT = 8
_NAME = re.compile(r"quarantine\.([0-9a-f]{8})\.log")


@dataclass(frozen=True, slots=True)
class BadPlace:
    """Bytes `[offset, offset + nbytes)`, whole pages, of the segment with this number and nonce (16 B)."""

    segment: int
    nonce: bytes
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class BadBlock:
    """The block of this key (32 B) has failed `strikes` times on this drive."""

    key: bytes
    strikes: int


@dataclass(frozen=True, slots=True)
class Decoded:
    """What log bytes hold. `unknown`: entries with a right CRC that a newer version wrote."""

    entries: tuple[BadPlace | BadBlock, ...]
    unknown: int


def log_nbytes_for(cap_nbytes: int) -> int:
    """Size of a log file in a partition of this capacity."""
    return max(2 * PAGE_NBYTES, min(FILE_NBYTES, cap_nbytes // _CAP_PARTS // PAGE_NBYTES * PAGE_NBYTES))


def log_name(generation: int) -> str:
    """File name of a log in the partition's folder."""
    return f"quarantine.{generation:08x}.log"


def log_generation(name: str) -> int | None:
    """The generation that a file name stands for; None if it is no log's."""
    match = _NAME.fullmatch(name)
    return None if match is None else int(match[1], 16)


def encode(entries: Iterable[BadPlace | BadBlock], store_uuid: bytes) -> Bytes:
    """Entries as whole pages, the rest zeros. Page-aligned memory.

    Raises:
        ValueError: a field does not fit.
    """
    images = [_encode_one(entry, store_uuid) for entry in entries]
    out = aligned_zeros(-(-len(images) // _PER_PAGE) * PAGE_NBYTES)
    out[: len(images) * ENTRY_NBYTES] = np.frombuffer(b"".join(images), dtype=np.uint8)
    return out


def decode(data: Bytes | bytes, store_uuid: bytes) -> Decoded:
    """The entries in `data`, in order. Never raises: what is torn, flipped, or another store's is passed over."""
    raw = bytes(data)
    entries: list[BadPlace | BadBlock] = []
    unknown = 0
    for at in range(0, len(raw) - ENTRY_NBYTES + 1, ENTRY_NBYTES):
        image = raw[at : at + ENTRY_NBYTES]
        magic, version, kind, crc, count, segment, offset, identity = _ENTRY.unpack(image)
        if magic != _MAGIC or crc != _crc_of(image, store_uuid):
            continue
        if version != _VERSION or kind not in (_PLACE, _BLOCK):
            unknown += 1
        elif kind == _PLACE and count and not offset % PAGE_NBYTES:
            entries.append(BadPlace(segment, identity[:16], offset, count * PAGE_NBYTES))
        elif kind == _BLOCK and count:
            entries.append(BadBlock(identity, count))
    return Decoded(tuple(entries), unknown)


def _encode_one(entry: BadPlace | BadBlock, store_uuid: bytes) -> bytes:
    match entry:
        case BadPlace(segment, nonce, offset, nbytes):
            if len(nonce) != 16 or offset % PAGE_NBYTES or nbytes % PAGE_NBYTES or nbytes <= 0:
                raise ValueError(f"not a place in whole pages of a segment: {entry}")
            fields = (_PLACE, 0, nbytes // PAGE_NBYTES, segment, offset, nonce)
        case BadBlock(key, strikes):
            if len(key) != 32 or strikes <= 0:
                raise ValueError(f"not a failed block: {entry}")
            fields = (_BLOCK, 0, strikes, 0, 0, key)
    try:
        image = bytearray(_ENTRY.pack(_MAGIC, _VERSION, *fields))
    except struct.error as error:
        raise ValueError(f"a field of {entry} is out of range: {error}") from error
    _CRC.pack_into(image, _CRC_AT, _crc_of(bytes(image), store_uuid))
    return bytes(image)


def _crc_of(image: bytes, store_uuid: bytes) -> int:
    # The uuid goes first, unwritten: drive space that once held another store's log does not speak for this one.
    return crc32c(image[_CRC_AT + 4 :], crc32c(bytes(4), crc32c(image[:_CRC_AT], crc32c(store_uuid))))


@dataclass(frozen=True, slots=True, eq=False)
class LogWrite:
    """Something to be written, in this order: make the file if `create`, write `pages` at `offset`, make it durable
    (data, then the folder if `create`), unlink `unlink`.

    `pages` is page-aligned memory and belongs to whoever carries the write out until `Quarantine.ended`.
    """

    name: str
    create: bool
    offset: int
    pages: Bytes
    unlink: tuple[str, ...] = ()


class Quarantine:
    """What must not go to, or be read from, one drive again. Not thread-safe: used under the store's lock."""

    def __init__(
        self,
        store_uuid: bytes,
        writer: Callable[[LogWrite], None],
        *,
        max_strikes: int = 1,
        file_nbytes: int = FILE_NBYTES,
    ) -> None:
        """An empty one; `recover` fills it.

        Args:
            writer: begins a `LogWrite` and returns; somebody calls `ended` later. Called by `pump` alone.
            max_strikes: failures after which a block is not written to this drive any more. 1 is R34 to the letter.
                More makes sense where there is no other drive to put it on.
            file_nbytes: size of a log file, whole pages, two at least; half of it is what is remembered at most.
        """
        if max_strikes < 1:
            raise ValueError(f"max_strikes must be at least 1, not {max_strikes}")
        if file_nbytes < 2 * PAGE_NBYTES or file_nbytes % PAGE_NBYTES:
            raise ValueError(f"a log file has at least two whole pages, not {file_nbytes} B")
        self._file_nbytes = file_nbytes
        self._max_entries = file_nbytes // ENTRY_NBYTES // 2
        self._store_uuid = store_uuid
        self._writer = writer
        self._max_strikes = max_strikes
        self._places: dict[bytes, list[BadPlace]] = {}
        self._strikes: dict[bytes, int] = {}  # oldest first
        self._fresh: list[BadPlace | BadBlock] = []  # not in the log yet
        self._writing: tuple[LogWrite, list[BadPlace | BadBlock]] | None = None
        self._generation = 0  # of the log that is appended to; 0: none
        self._end = file_nbytes  # where the next page goes in it
        self._old: tuple[str, ...] = ()  # logs whose entries are here and that a rewrite replaces

    # -- asking --------------------------------------------------------------------------------------------------------

    def may_store(self, key: bytes) -> bool:
        """Whether the block may be written to this drive."""
        return self._strikes.get(key, 0) < self._max_strikes

    def is_bad(self, nonce: bytes, offset: int, nbytes: int) -> bool:
        """Whether bytes `[offset, offset + nbytes)` of the segment with this nonce touch a bad place."""
        places = self._places.get(nonce, ())
        return any(one.offset < offset + nbytes and offset < one.offset + one.nbytes for one in places)

    def places(self, nonce: bytes) -> tuple[BadPlace, ...]:
        """The bad places of the segment with this nonce."""
        return tuple(self._places.get(nonce, ()))

    def strikes(self, key: bytes) -> int:
        """How often the block has failed on this drive."""
        return self._strikes.get(key, 0)

    def __len__(self) -> int:
        """Entries remembered."""
        return len(self._strikes) + sum(map(len, self._places.values()))

    @property
    def full(self) -> bool:
        """Whether the memory's bound is reached: from now on the oldest failed blocks are forgotten. Replace the
        drive.
        """
        return len(self) >= self._max_entries

    @property
    def pending(self) -> bool:
        """Whether `pump` has something to write, now or when the write under way has ended."""
        return bool(self._fresh)

    @property
    def writing(self) -> bool:
        """Whether a write is under way."""
        return self._writing is not None

    @property
    def makes_file(self) -> bool:
        """Whether the next write makes a file, beside those that are there."""
        return self._end + self._fresh_nbytes > self._file_nbytes

    @property
    def _fresh_nbytes(self) -> int:
        return -(-len(self._fresh) // _PER_PAGE) * PAGE_NBYTES

    # -- telling -------------------------------------------------------------------------------------------------------

    def add(self, key: bytes, *, segment: int, nonce: bytes, offset: int, nbytes: int) -> None:
        """A record of block `key`, at this place (whole pages), could not be read or came back wrong.

        A place counts once: telling it again (a second reader of the same bad record) is no second strike.
        """
        if self.is_bad(nonce, offset, nbytes):
            return
        self._enter(BadPlace(segment, nonce, offset, nbytes), fresh=True)
        self._enter(BadBlock(key, self._strikes.get(key, 0) + 1), fresh=True)

    def add_place(self, *, segment: int, nonce: bytes, offset: int, nbytes: int) -> None:
        """This place failed while it held no block (a write that did not arrive)."""
        if not self.is_bad(nonce, offset, nbytes):
            self._enter(BadPlace(segment, nonce, offset, nbytes), fresh=True)

    def forget_segment(self, nonce: bytes) -> None:
        """The segment was unlinked: its places mean nothing any more. The log learns of it when it is rewritten."""
        self._places.pop(nonce, None)

    def recover(self, files: Sequence[tuple[str, Bytes | bytes]], nonces: Collection[bytes]) -> None:
        """Take in what log files (name, content) hold. Places in segments with other nonces than `nonces` are dropped.

        To be called once, before anything else. The next write makes a new log and removes these, except one that holds
        entries of a newer version.
        """
        old = []
        for name, data in files:
            generation = log_generation(name)
            if generation is None:
                continue
            self._generation = max(self._generation, generation)
            decoded = self.learn(data, nonces)
            if not decoded.unknown:
                old.append(name)
        self._old = tuple(sorted(old))

    def learn(self, data: Bytes | bytes, nonces: Collection[bytes]) -> Decoded:
        """Take in what a log holds, as `recover` does; what it holds. Where another process writes the log, as often as
        it has changed.
        """
        decoded = decode(data, self._store_uuid)
        for entry in decoded.entries:
            if isinstance(entry, BadBlock) or entry.nonce in nonces:
                self._enter(entry, fresh=False)
        return decoded

    # -- writing -------------------------------------------------------------------------------------------------------

    def pump(self) -> None:
        """Begin a write if there is something new and none is under way. Whoever stops writes to a drive stops this."""
        if self._writing is not None or not self._fresh:
            return
        makes_file = self.makes_file
        entries, self._fresh = self._fresh, []
        if not makes_file:
            pages = encode(entries, self._store_uuid)
            write = LogWrite(log_name(self._generation), create=False, offset=self._end, pages=pages)
        else:
            self._generation += 1
            pages = encode(self._all(), self._store_uuid)
            write = LogWrite(log_name(self._generation), create=True, offset=0, pages=pages, unlink=self._old)
        self._end = write.offset + write.pages.nbytes  # a place is written once, whatever comes of it
        self._writing = (write, entries)
        self._writer(write)

    def ended(self, write: LogWrite, *, durable: bool) -> None:
        """The write under way has ended. If it is not durable, all goes into a new log at the next `pump`."""
        assert self._writing is not None and self._writing[0] is write, "no such write is under way"
        _, entries = self._writing
        self._writing = None
        if write.create:
            # The new file may be there, whole or in part, also after a failure: it is replaced by the next, too.
            self._old = (write.name,) if durable else (*self._old, write.name)
        if not durable:
            self._fresh = entries + self._fresh
            self._end = self._file_nbytes

    def _all(self) -> list[BadPlace | BadBlock]:
        places: list[BadPlace | BadBlock] = [one for places in self._places.values() for one in places]
        return places + [BadBlock(key, strikes) for key, strikes in self._strikes.items()]

    def _enter(self, entry: BadPlace | BadBlock, *, fresh: bool) -> None:
        match entry:
            case BadPlace(_, nonce, _, _):
                places = self._places.setdefault(nonce, [])
                if entry not in places:
                    places.append(entry)
            case BadBlock(key, strikes):
                self._strikes[key] = max(strikes, self._strikes.pop(key, 0))
        while len(self) > self._max_entries:
            self._forget_oldest()
        if fresh:
            self._fresh.append(entry)
        if len(self._fresh) > self._max_entries:  # the drive takes no writes: let a rewrite tell it all
            del self._fresh[0]
            self._end = self._file_nbytes

    def _forget_oldest(self) -> None:
        """Forget a failed block rather than a bad place: it may fail once more elsewhere, a bad place fails for
        sure.
        """
        if self._strikes:
            del self._strikes[next(iter(self._strikes))]
            return
        nonce = next(iter(self._places))
        del self._places[nonce][0]
        if not self._places[nonce]:
            del self._places[nonce]


def aligned_zeros(nbytes: int) -> Bytes:
    """Page-aligned memory."""
    memory = np.zeros(nbytes + PAGE_NBYTES, dtype=np.uint8)
    start = -memory.ctypes.data % PAGE_NBYTES
    return memory[start : start + nbytes]
