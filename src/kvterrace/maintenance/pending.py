"""`DIR/purge.pending`: which blocks an interrupted purge still has to remove.

By a sequence's label alone they could not be found again: what hung on a block of it, or is another record of the same
block, bears another label, and the record that linked the two may be gone by then. Text: a line with name and version,
for each block a line with namespace digest and key in hexadecimal, and a last line with the CRC32C of all before it.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from kvterrace.errors import StoreUnusableError
from kvterrace.format.checksum import crc32c
from kvterrace.format.record import pad_to_page
from kvterrace.maintenance.drive import Drive, aligned
from kvterrace.observe.folder import PENDING_NAME

__all__ = ["read_pending", "remove_pending", "write_pending"]

_HEAD = b"kvterrace purge 1\n"
#: No longer list is read: 16 million blocks.
_MOST_NBYTES = 2 << 30
_LINE = re.compile(rb"[0-9a-f]{128}")


def read_pending(root: Path) -> set[bytes]:
    """Namespace digest and key, 64 B, of each block; none where there is no such file.

    Raises:
        StoreUnusableError: the file is damaged, or a newer version's. OSError.
    """
    path = root / PENDING_NAME
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # without waiting for a pipe's other end
    except FileNotFoundError:
        return set()
    try:
        data = b""
        info = os.fstat(fd)
        if stat.S_ISREG(info.st_mode) and info.st_size <= _MOST_NBYTES:  # a file object cannot be had of a folder
            with os.fdopen(fd, "rb", closefd=False) as file:
                data = file.read()
    finally:
        os.close(fd)
    body, end = data[:-9], data[-9:]
    lines = body[len(_HEAD) :].split(b"\n")[:-1]
    right = body.startswith(_HEAD) and end == b"%08x\n" % crc32c(body) and all(map(_LINE.fullmatch, lines))
    if not right:
        raise StoreUnusableError(
            f"{path} is damaged, or of a newer kvterrace: it says what an interrupted purge by sequence left to do; "
            "remove it, and purge the namespace instead if that must be certain"
        )
    return {bytes.fromhex(line.decode()) for line in lines}


def write_pending(root: Path, drive: Drive, blocks: Iterable[bytes]) -> None:
    """Put the file there, durably, whole or not at all. Raises OSError."""
    path, part = root / PENDING_NAME, root / f".{PENDING_NAME}.part"
    body = _HEAD + b"".join(block.hex().encode() + b"\n" for block in sorted(blocks))
    body += b"%08x\n" % crc32c(body)
    memory = aligned(pad_to_page(len(body)))
    memory[: len(body)] = np.frombuffer(body, np.uint8)
    part.unlink(missing_ok=True)
    file = drive.engine.create(part, memory.nbytes)
    try:
        drive.write(file, 0, memory)
        drive.engine.truncate(file, len(body))
        drive.sync(file)
    except OSError:
        part.unlink()
        raise
    finally:
        drive.engine.close_file(file)
    drive.rename(part, path)


def remove_pending(root: Path, drive: Drive) -> None:
    """Overwrite and remove the file, and what a crash has left of one half-written. Raises OSError."""
    if (root / PENDING_NAME).is_file():
        drive.erase(drive.retire(root / PENDING_NAME))
    part = root / f".{PENDING_NAME}.part"
    if part.is_file():
        drive.erase(part)
