"""Outcomes, as values. Never a bare bool: a caller can always tell a miss from a fault, and a fault from a bug."""

from __future__ import annotations

import enum
from dataclasses import dataclass

__all__ = [
    "Busy",
    "Corrupt",
    "DeviceFailed",
    "Expired",
    "GetOutcome",
    "Hint",
    "Hit",
    "Miss",
    "Pending",
    "Present",
    "PutOutcome",
    "Rejected",
    "Stale",
    "Stored",
    "Tier",
]


class Tier(enum.IntEnum):
    """The ladder, fastest first. DEVICE (accelerator memory) belongs to the engine; the store holds the rest."""

    DEVICE = 0
    DRAM = 1
    CXL = 2
    SSD = 3
    REMOTE = 4


class Hint(enum.Enum):
    """What a client knows of a sequence's future, and a store does not; for `Store.hint`."""

    #: The conversation is over.
    CLOSED = "closed"
    #: It comes back in about so many seconds: a tool runs, or a person reads.
    RETURNS = "returns"
    #: Asked once and never again: a batch job.
    ONE_OFF = "one_off"
    #: Others will use it, too: a system prompt, a document.
    SHARED = "shared"
    #: It matters more than others.
    PRIORITY = "priority"


@dataclass(frozen=True, slots=True)
class Hit:
    """The block's bytes were found in `tier` and, where that tier is not trusted, verified."""

    tier: Tier


@dataclass(frozen=True, slots=True)
class Pending:
    """Not decided yet: the transfer is still running."""


@dataclass(frozen=True, slots=True)
class Miss:
    """No tier holds the block."""


@dataclass(frozen=True, slots=True)
class Corrupt:
    """A copy was read, failed verification and was discarded. `where` is `file@offset`, `reason` what did not match."""

    where: str
    reason: str


@dataclass(frozen=True, slots=True)
class Stale:
    """A well-formed record was read, but not the one that the index means: the place was used again. Discarded."""

    where: str
    reason: str


@dataclass(frozen=True, slots=True)
class DeviceFailed:
    """The device answered with an error, or not in full. `where` is `file@offset`."""

    where: str
    reason: str


@dataclass(frozen=True, slots=True)
class Expired:
    """The deadline passed first. The caller's buffer will not be touched, and was not, if there was a deadline."""


@dataclass(frozen=True, slots=True)
class Busy:
    """No room in time: every slot is pinned, or is being read or written. Try again, or skip it."""


@dataclass(frozen=True, slots=True)
class Stored:
    """The block was taken into `tier` and is now found by `match`."""

    tier: Tier


@dataclass(frozen=True, slots=True)
class Present:
    """The block was there already: same key, same content. Nothing was copied."""

    tier: Tier


@dataclass(frozen=True, slots=True)
class Rejected:
    """The block cannot be taken as things stand, and trying again at once will not help."""

    reason: str


#: How the read of one block can end (or `Pending`).
GetOutcome = Hit | Miss | Corrupt | Stale | DeviceFailed | Expired | Busy | Pending
#: How the store of one block can end (or `Pending`).
PutOutcome = Stored | Present | Busy | Rejected | Pending
