"""The bytes of trace files: rows of JSON, packed into members of gzip that are appended whole.

A member is what a crash may cut off and what a checksum covers: only whole members with a right CRC are read.
"""

from __future__ import annotations

import json
import logging
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvterrace.errors import ConfigError

__all__ = ["MAGIC", "SUFFIX", "TRACE_VERSION", "header", "is_trace", "line", "pack", "read_rows", "trace_files"]

_log = logging.getLogger(__name__)

#: Version of the format of trace files.
TRACE_VERSION = 1
#: First key of a file's first row; its value is the version.
MAGIC = "kvterrace_trace"
#: What the files of a recording end in.
SUFFIX = ".kvtrace.gz"

_GZIP = b"\x1f\x8b"
_CHUNK_NBYTES = 1 << 18
#: A member that says it is larger than this is none of ours: the recorder's hold 256 KiB, and one long row at most.
_MAX_MEMBER_NBYTES = 1 << 30


def line(row: dict[str, Any]) -> bytes:
    """One row as it lies in a file, unpacked."""
    return json.dumps(row, separators=(",", ":")).encode("ascii") + b"\n"


def header(
    *, recording: str, number: int, began_unix_s: float, sample: float = 1.0, origin: str = "store"
) -> dict[str, Any]:
    """The first row of a file."""
    return {
        MAGIC: TRACE_VERSION,
        "recording": recording,
        "file": number,
        "began_unix_s": began_unix_s,
        "sample": sample,
        "origin": origin,
    }


def pack(lines: bytes) -> bytes:
    """One gzip member."""
    packer = zlib.compressobj(6, zlib.DEFLATED, 31)
    return packer.compress(lines) + packer.flush()


def trace_files(path: Path) -> list[Path]:
    """The files of a trace, oldest first: those of a recorder's folder, or the one file.

    Raises:
        ConfigError: the folder holds no trace.
    """
    if not path.is_dir():
        return [path]
    files = sorted(path.glob(f"*{SUFFIX}"))
    if not files:
        raise ConfigError(f"{path} holds no trace (*{SUFFIX}); give a trace file, or the folder that was recorded to")
    return files


def is_trace(path: Path) -> bool:
    """Whether this is a recorder's folder or a file in this format. Raises OSError."""
    if path.is_dir():
        return True
    with path.open("rb") as file:
        start = file.read(4096)
    if start.startswith(_GZIP):
        try:
            start = zlib.decompressobj(31).decompress(start, 256)
        except zlib.error:
            return False
    return start.startswith(b'{"' + MAGIC.encode() + b'"')


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Rows of one file, the header first. What a crash has torn off at its end is left out.

    Raises:
        ConfigError: a newer format, or a row that is none; the message names the line. OSError.
    """
    number = 0
    for lines in _members(path):
        for text in lines.splitlines():
            number += 1
            try:
                row = json.loads(text)
            except ValueError as error:
                raise ConfigError(f"{path}, line {number}: not JSON: {error}") from error
            if not isinstance(row, dict):
                raise ConfigError(f"{path}, line {number}: not a row of a trace, which is a JSON object")
            if number == 1:
                _require_version(path, row)
            yield row


def _require_version(path: Path, row: dict[str, Any]) -> None:
    version = row.get(MAGIC)
    if not isinstance(version, int):
        raise ConfigError(f"{path}, line 1: no header of a trace; a trace file begins with {MAGIC!r}")
    if version > TRACE_VERSION:
        raise ConfigError(
            f"{path} is in trace format {version}, written by a newer kvterrace; this one reads up to format "
            f"{TRACE_VERSION}: upgrade it"
        )


def _members(path: Path) -> Iterator[bytes]:
    """Lines of each whole member; of a file that somebody has unpacked, its whole lines."""
    with path.open("rb") as file:
        data = file.read(_CHUNK_NBYTES)
        if not data.startswith(_GZIP):
            while data:
                whole, newline, rest = data.rpartition(b"\n")
                yield whole + newline
                more = file.read(_CHUNK_NBYTES)
                if not more:
                    break
                data = rest + more
            return
        try:
            while data:
                unpacker = zlib.decompressobj(31)
                lines = unpacker.decompress(data, _MAX_MEMBER_NBYTES)
                pieces = [lines]
                nbytes = len(lines)
                while not unpacker.eof and (data := file.read(_CHUNK_NBYTES)):
                    if nbytes >= _MAX_MEMBER_NBYTES:
                        raise zlib.error("a member of more than 1 GiB")
                    pieces.append(unpacker.decompress(data, _MAX_MEMBER_NBYTES - nbytes))
                    nbytes += len(pieces[-1])
                if not unpacker.eof:
                    raise zlib.error("it ends in the middle of a member")
                yield b"".join(pieces)
                data = unpacker.unused_data or file.read(_CHUNK_NBYTES)
        except zlib.error as error:
            _log.warning("%s is damaged or was cut off (%s); what lies before that is used", path, error)
