"""Sizes of a ladder in words: `dram=5%,ssd=30%`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from kvterrace.config import parse_nbytes
from kvterrace.errors import ConfigError

__all__ = ["LadderSize", "TierSize", "parse_ladder"]

_SHARE = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)%", re.ASCII)
_BLOCKS = re.compile(r"\d{1,18}", re.ASCII)


@dataclass(frozen=True, slots=True)
class TierSize:
    """Room of a tier: a share of a trace's different blocks, or a number of blocks, or bytes. One is not None."""

    share: Fraction | None = None
    blocks: int | None = None
    nbytes: int | None = None

    def blocks_of(self, distinct: int, block_nbytes: int) -> int:
        """In whole blocks, rounded down."""
        if self.share is not None:
            return int(self.share * distinct)
        if self.blocks is not None:
            return self.blocks
        assert self.nbytes is not None
        return self.nbytes // block_nbytes


@dataclass(frozen=True, slots=True)
class LadderSize:
    """What `parse_ladder` was given, and what it means."""

    text: str
    dram: TierSize
    ssd: TierSize | None

    def blocks_of(self, distinct: int, block_nbytes: int) -> tuple[int, int]:
        """Blocks of DRAM and of SSD, 0 without one. Raises ConfigError: no room for a block."""
        dram = self.dram.blocks_of(distinct, block_nbytes)
        ssd = 0 if self.ssd is None else self.ssd.blocks_of(distinct, block_nbytes)
        if dram < 1 or (self.ssd is not None and ssd < 1):
            raise ConfigError(
                f"--tiers {self.text}: {'ssd' if dram else 'dram'} has no room for a block of {block_nbytes} bytes, of "
                f"{distinct} different ones: give it more"
            )
        return dram, ssd


def parse_ladder(text: str) -> LadderSize:
    """`dram=SIZE` or `dram=SIZE,ssd=SIZE`; a size is `5%` of a trace's different blocks, `1000` blocks, or `20GiB`.

    Raises:
        ConfigError: something else.
    """
    found: dict[str, TierSize] = {}
    for piece in text.split(","):
        name, equals, size = (part.strip() for part in piece.partition("="))
        if not equals or name not in ("dram", "ssd"):
            raise ConfigError(f"--tiers {text}: {piece.strip()!r} is no tier: write dram=5%,ssd=30%, or dram=5% alone")
        if name in found:
            raise ConfigError(f"--tiers {text}: {name} is given twice; repeat --tiers for another ladder")
        found[name] = _size(size, f"--tiers {text}: {name}")
    if "dram" not in found:
        raise ConfigError(f"--tiers {text}: a ladder has DRAM: write dram=5%,{text.strip()}")
    return LadderSize(text.strip(), found["dram"], found.get("ssd"))


def _size(text: str, name: str) -> TierSize:
    share = _SHARE.fullmatch(text)
    if share is not None:
        return TierSize(share=Fraction(share[1]) / 100)
    if _BLOCKS.fullmatch(text):
        return TierSize(blocks=int(text))
    if not text:
        raise ConfigError(f"{name}: no size; write e.g. 5%, 1000 (blocks) or 20GiB")
    return TierSize(nbytes=parse_nbytes(text, name))
