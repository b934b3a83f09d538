"""The quarantine of a partition as its logs tell it. Read-only; nothing read is trusted."""

from __future__ import annotations

import contextlib
import os
import stat
from dataclasses import dataclass, field
from pathlib import Path

from kvterrace.health.quarantine import FILE_NBYTES, BadBlock, BadPlace, decode, log_generation

__all__ = ["Quarantined", "read_quarantine"]


@dataclass(slots=True)
class Quarantined:
    """Entries of all logs of a partition, each once.

    Attributes:
        places: by nonce of their segment. Some may be of segments that are gone.
        strikes: by key of the block, how often it has failed.
        log_nbytes: what the logs take of the drive.
    """

    places: dict[bytes, list[BadPlace]] = field(default_factory=dict)
    strikes: dict[bytes, int] = field(default_factory=dict)
    log_nbytes: int = 0
    problems: list[str] = field(default_factory=list)

    @property
    def place_count(self) -> int:
        """Bad places."""
        return sum(map(len, self.places.values()))

    def touches(self, nonce: bytes, offset: int, nbytes: int) -> bool:
        """Whether these bytes of the segment with this nonce touch a bad place."""
        return any(
            one.offset < offset + nbytes and offset < one.offset + one.nbytes for one in self.places.get(nonce, ())
        )


def read_quarantine(partition: Path, store_uuid: bytes | None) -> Quarantined:
    """Read the logs in the folder of a partition. Blocks; raises nothing."""
    found = Quarantined()
    if store_uuid is None:  # its checksums cannot be checked without
        return found
    names: list[str] = []
    with contextlib.suppress(OSError):
        names = sorted(one.name for one in partition.iterdir() if log_generation(one.name) is not None)
    for name in names:
        try:
            fd = os.open(partition / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
            with open(fd, "rb") as file:  # noqa: PTH123 - by descriptor: opened without waiting for a pipe's other end
                info = os.fstat(fd)
                if not stat.S_ISREG(info.st_mode):
                    continue
                data = file.read(FILE_NBYTES)
        except FileNotFoundError:  # replaced since
            continue
        except OSError as error:
            found.problems.append(f"{name} cannot be read: {error.strerror or error}")
            continue
        found.log_nbytes += info.st_blocks * 512
        for entry in decode(data, store_uuid).entries:
            match entry:
                case BadPlace(_, nonce, _, _):
                    if entry not in found.places.setdefault(nonce, []):
                        found.places[nonce].append(entry)
                case BadBlock(key, strikes):
                    found.strikes[key] = max(strikes, found.strikes.get(key, 0))
    return found
