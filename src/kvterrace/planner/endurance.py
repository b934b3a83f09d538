"""How long a drive lives under a stream of KV.

Rated bytes = DWPD x capacity x days (JEDEC JESD218 defines the rating, the datasheet gives DWPD and years); life =
rated bytes over bytes written, with the writes' own amplification.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvterrace.errors import ConfigError
from kvterrace.planner.hardware import Storage

__all__ = ["DAY_S", "Endurance", "endurance", "life_days", "rated_nbytes", "what_would_help"]

DAY_S = 86_400.0
_YEAR_DAYS = 365.0
#: Bytes written for each byte put: measured on a full store that reclaims all the time (docs, write amplification).
_AMPLIFICATION = 1.02
#: Of a drive's life, what is written before a store stops writing to it (R35): then a new one is due.
_USED_LIFE = 0.8


@dataclass(frozen=True, slots=True)
class Endurance:
    """A drive (or several, evenly written) under a stream of writes.

    Attributes:
        written_bytes_per_s: KV that reaches it, amplification included.
        life_days: until the rated bytes are written; infinite where nothing is written.
        budget_bytes_per_s: what may be written all the time so that it lives for its rated years.
        needed_dwpd: rating with which drives of this size would live for their years.
        remedies: life in days with each of the usual remedies, by its name.
    """

    written_bytes_per_s: float
    rated_nbytes: float
    rated_days: float
    life_days: float
    budget_bytes_per_s: float
    needed_dwpd: float
    remedies: Mapping[str, float]

    @property
    def lasts(self) -> bool:
        """Whether it lives for its rated years."""
        return self.life_days >= self.rated_days

    @property
    def service_days(self) -> float:
        """Until a store stops writing to it."""
        return _USED_LIFE * self.life_days


def rated_nbytes(capacity_nbytes: float, dwpd: float, rated_years: float) -> float:
    """Bytes that a drive is rated for over its life."""
    return capacity_nbytes * dwpd * rated_years * _YEAR_DAYS


def life_days(capacity_nbytes: float, dwpd: float, rated_years: float, written_bytes_per_s: float) -> float:
    """Days until the rated bytes are written. Raises ConfigError for negative rates."""
    if written_bytes_per_s < 0 or min(capacity_nbytes, dwpd, rated_years) < 0:
        raise ConfigError("endurance: capacity, DWPD, years and bytes written must not be negative")
    if not written_bytes_per_s:
        return float("inf")
    return rated_nbytes(capacity_nbytes, dwpd, rated_years) / (written_bytes_per_s * DAY_S)


def what_would_help(days: float, *, kv_element_nbytes: int, query_heads: int, kv_heads: int) -> dict[str, float]:
    """Days of life with each of the usual remedies, where it applies: bytes fall, life grows by the same factor.

    GQA: 8 KV heads in place of one for each query head. 8 bit: half of 16-bit KV, a quarter of 32. Admission: only what
    is put a second time is written; half of the bytes as a cautious share (on the conversation trace of Mooncake, FAST
    2025, 76 % of the blocks are never asked for again). Write on evict: idle KV that is asked for again before DRAM
    needs its room is not written; the same half as a cautious share.
    """
    found = {}
    if kv_heads == query_heads and query_heads > 8 and query_heads % 8 == 0:
        found["GQA: 8 KV heads"] = days * query_heads / 8
    if kv_element_nbytes > 1:
        found["8-bit KV"] = days * kv_element_nbytes
    found["admission: second put"] = days * 2
    found["write on evict"] = days * 2
    return found


def endurance(drive: Storage, written_bytes_per_s: float, remedies: Mapping[str, float] | None = None) -> Endurance:
    """A drive of a machine under `written_bytes_per_s` of KV that is put. `remedies`: factors by which life grows."""
    written = written_bytes_per_s * _AMPLIFICATION
    days = life_days(drive.capacity_nbytes, drive.dwpd, drive.rated_years, written)
    rated = rated_nbytes(drive.capacity_nbytes, drive.dwpd, drive.rated_years)
    rated_days = drive.rated_years * _YEAR_DAYS
    return Endurance(
        written,
        rated,
        rated_days,
        days,
        rated / (rated_days * DAY_S),
        written * DAY_S / drive.capacity_nbytes,
        {name: days * factor for name, factor in (remedies or {}).items()},
    )
