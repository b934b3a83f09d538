"""DIR/partitions/<name>/budget: what of the write budget is left, so that a restart does not begin a new day."""

from __future__ import annotations

import os
import struct
from pathlib import Path

from kvterrace.format.checksum import crc32c
from kvterrace.format.record import PAGE_NBYTES

__all__ = ["BudgetFile"]

_MAGIC = b"KVTBUDGT"
_VERSION = 1
_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
# magic, version, CRC32C (of all 40 bytes, itself as 0), bytes left, unix time (ns), bytes a day
_RECORD = struct.Struct("<8sIIqQQ")
assert _RECORD.size == 40


class BudgetFile:
    """The file of one partition on one drive: a page, written in place. Only the partition's writer uses it.

    It is bookkeeping and nobody's data: one that is missing, torn or of another version counts as none.
    """

    def __init__(self, partition: Path) -> None:
        """Nothing is made or read yet."""
        self.path = partition / "budget"

    def make(self) -> int:
        """Make the file, saying nothing, if it is not there; returns what it takes of the capacity: 0 if it was there,
        or cannot be made. Blocks.
        """
        try:
            fd = os.open(self.path, _FLAGS | os.O_EXCL, 0o600)
        except OSError:
            return 0
        try:
            os.pwrite(fd, bytes(PAGE_NBYTES), 0)
        except OSError:
            return 0  # a full drive: what it takes is a part of a page at most
        finally:
            os.close(fd)
        return PAGE_NBYTES

    def read(self) -> tuple[int, float, int] | None:
        """Bytes left, at which time (unix seconds), of how many a day; None: it says nothing. Blocks."""
        try:
            data = self.path.read_bytes()[: _RECORD.size]
        except OSError:
            return None
        if len(data) < _RECORD.size:
            return None
        magic, version, crc, left, unix_ns, daily = _RECORD.unpack(data)
        if magic != _MAGIC or version != _VERSION or not daily:
            return None
        if crc != crc32c(_RECORD.pack(magic, version, 0, left, unix_ns, daily)):
            return None
        return left, unix_ns / 1e9, daily

    def write(self, left_nbytes: int, unix_s: float, daily_nbytes: int) -> None:
        """Write down what is left. Blocks; not synced: what a crash takes back is a little of the budget.

        Raises:
            OSError: it cannot be written.
        """
        fields = (left_nbytes, int(unix_s * 1e9), daily_nbytes)
        record = _RECORD.pack(_MAGIC, _VERSION, crc32c(_RECORD.pack(_MAGIC, _VERSION, 0, *fields)), *fields)
        fd = os.open(self.path, _FLAGS, 0o600)
        try:
            os.pwrite(fd, record, 0)
        finally:
            os.close(fd)
