"""`DIR/purge.pending`: which blocks an interrupted purge still has to remove.

By a sequence's label alone they could not be found again: what hung on a block of it, or is another record of the same
block, bears another label, and the record that linked the two may be gone by then. Text: a line with name and version,
for each block a line with namespace digest and key in hexadecimal, and a last line with the CRC32C of all before it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from kvterrace.errors import StoreUnusableError
from kvterrace.format.checksum import crc32c
from kvterrace.maintenance.drive import Drive
from kvterrace.observe.folder import PENDING_NAME

__all__ = ["read_pending", "remove_pending", "write_pending"]

_HEAD = b"kvterrace purge 1\n"
_LINE = re.compile(rb"[0-9a-f]{128}")


def read_pending(root: Path) -> set[bytes]:
    """Namespace digest and key, 64 B, of each block; none where there is no such file.

    Raises:
        StoreUnusableError: the file is damaged, or a newer version's. OSError.
    """
    path = root / PENDING_NAME
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return set()
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
    path = root / PENDING_NAME
    part = path.with_name(f".{path.name}.part")
    body = _HEAD + b"".join(block.hex().encode() + b"\n" for block in sorted(blocks))
    try:
        fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(body + b"%08x\n" % crc32c(body))
            file.flush()
            os.fsync(fd)
        drive.rename(part, path)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def remove_pending(root: Path, drive: Drive) -> None:
    """Overwrite and remove the file, and what a crash has left of one. Raises OSError."""
    for path in (root / PENDING_NAME, root / f".{PENDING_NAME}.part"):
        if path.is_file():
            drive.erase(path)
