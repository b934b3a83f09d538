"""DIR/partitions/<name>/budget: what of the write budget is left, so that a restart does not begin a new day."""

from __future__ import annotations

import contextlib
import os
import struct
from pathlib import Path

from kvterrace.format.checksum import crc32c

__all__ = ["BudgetFile"]

_MAGIC = b"KVTBUDGT"
_VERSION = 1
# magic, version, CRC32C (of all 40 bytes, itself as 0), bytes left, unix time (ns), bytes a day
_RECORD = struct.Struct("<8sIIqQQ")
assert _RECORD.size == 40


class BudgetFile:
    """The file of one partition on one drive: 40 bytes, written in place. Only the partition's writer uses it.

    It is bookkeeping and nobody's data: one that is missing, torn or of another version counts as none.
    """

    def __init__(self, partition: Path) -> None:
        """Make the file if it is not there, so that it is counted from the start. Blocks. Never raises OSError."""
        self.path = partition / "budget"
        with contextlib.suppress(OSError):
            self.write(0, 0, 0, only_new=True)

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

    def write(self, left_nbytes: int, unix_s: float, daily_nbytes: int, *, only_new: bool = False) -> None:
        """Write down what is left. Blocks; not synced: what a crash takes back is a little of the budget.

        Raises:
            OSError: it cannot be written.
        """
        fields = (left_nbytes, int(unix_s * 1e9), daily_nbytes)
        record = _RECORD.pack(_MAGIC, _VERSION, crc32c(_RECORD.pack(_MAGIC, _VERSION, 0, *fields)), *fields)
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_EXCL if only_new else 0)
        fd = os.open(self.path, flags, 0o600)
        try:
            os.pwrite(fd, record, 0)
        finally:
            os.close(fd)
