"""Quarantine logs: lines that name a purged block are overwritten with zeros; places and other blocks stay."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from kvterrace.errors import StoreUnusableError
from kvterrace.format.record import PAGE_NBYTES, pad_to_page
from kvterrace.health.quarantine import ENTRY_NBYTES, BadBlock, decode, log_generation
from kvterrace.maintenance.drive import Drive, aligned

__all__ = ["FoundLog", "read_logs", "zero_lines"]

#: No log grows as long: entries are bounded, and an old log goes when a new one is begun.
_MOST_NBYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class FoundLog:
    """A log. `lines`: where in it purged blocks are named. `newer`: lines that only a newer version can read."""

    path: Path
    data: bytes
    lines: tuple[int, ...]
    newer: int


def read_logs(partition: Path, store_uuid: bytes, keys: Collection[bytes]) -> list[FoundLog]:
    """The logs in the folder of a partition that name one of `keys`, or could. Raises OSError, StoreUnusableError."""
    found = []
    for path in sorted(partition.iterdir()):
        if log_generation(path.name) is None or path.is_symlink() or not path.is_file():
            continue
        if (nbytes := path.stat().st_size) > _MOST_NBYTES:
            raise StoreUnusableError(f"{path}: no quarantine log is as long as {nbytes} B; remove it, then purge again")
        data = path.read_bytes()
        lines = [
            at
            for at in range(0, len(data) - ENTRY_NBYTES + 1, ENTRY_NBYTES)
            for entry in decode(data[at : at + ENTRY_NBYTES], store_uuid).entries
            if isinstance(entry, BadBlock) and entry.key in keys
        ]
        newer = decode(data, store_uuid).unknown
        if lines or newer:
            found.append(FoundLog(path, data, tuple(lines), newer))
    return found


def zero_lines(log: FoundLog, drive: Drive) -> None:
    """Overwrite the lines found, durably, page by page: zeros are no entry. A line beside them that a crash tears costs
    one more failed read. Raises OSError.
    """
    memory = aligned(pad_to_page(len(log.data)))
    memory[: len(log.data)] = memoryview(log.data)
    for at in log.lines:
        memory[at : at + ENTRY_NBYTES] = 0
    file = drive.engine.reopen(log.path)
    try:
        for page in sorted({at // PAGE_NBYTES * PAGE_NBYTES for at in log.lines}):
            drive.write(file, page, memory[page : page + PAGE_NBYTES])
        drive.sync(file)
    finally:
        drive.engine.close_file(file)
