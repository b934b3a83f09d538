"""What a replay has seen, and what it saves under a model of costs."""

from __future__ import annotations

from dataclasses import dataclass

from kvterrace.errors import ConfigError

__all__ = ["CostModel", "Outcome", "Saving"]

#: Llama 3.1 8B: 2 (K and V) x 32 layers x 8 KV heads x 128 x 2 bytes.
_NBYTES_PER_TOKEN = 131_072


@dataclass(frozen=True, slots=True)
class CostModel:
    """What reloading and recomputing cost. The defaults are an 8B model (Llama 3.1 8B in bfloat16) on one accelerator
    (H100 SXM); `docs/reference/replay.md` has the arithmetic and the source of each figure.

    Attributes:
        block_nbytes: of a block; None: 131,072 for each of its tokens.
        dram_gb_per_s, ssd_gb_per_s: 10^9 bytes a second, from each tier to the accelerator.
        token_us: to recompute one token, without attention.
        attention_us: what attention adds to a token for each 1,000 tokens before it.
    """

    block_nbytes: int | None = None
    dram_gb_per_s: float = 48.0
    ssd_gb_per_s: float = 7.0
    token_us: float = 32.5
    attention_us: float = 1.06

    def __post_init__(self) -> None:
        if self.block_nbytes is not None and self.block_nbytes < 1:
            raise ConfigError(f"a block of {self.block_nbytes} bytes: give more than 0")
        for name in ("dram_gb_per_s", "ssd_gb_per_s", "token_us"):
            if not 0 < getattr(self, name) < 1e9:
                raise ConfigError(f"--{name.replace('_', '-')}: give a number above 0, not {getattr(self, name)}")
        if not 0 <= self.attention_us < 1e9:
            raise ConfigError(f"--attention-us: give 0 or more, not {self.attention_us}")

    def nbytes(self, block_tokens: int) -> int:
        """Of a block."""
        return self.block_nbytes or _NBYTES_PER_TOKEN * block_tokens

    def recompute_s(self, tokens: float, tokens_squared: float) -> float:
        """To compute prompts from nothing: the sum over them of their tokens, and of the squares of those."""
        return 1e-6 * (self.token_us * tokens + self.attention_us / 1e3 * tokens_squared / 2)


@dataclass(frozen=True, slots=True)
class Saving:
    """Accelerator time of a whole trace, in seconds.

    Attributes:
        without_s: to compute every prompt from nothing.
        avoided_s: the part of it that hits make unnecessary.
        dram_reload_s, ssd_reload_s: what reading the hits takes.
    """

    without_s: float
    avoided_s: float
    dram_reload_s: float
    ssd_reload_s: float

    @property
    def saved_s(self) -> float:
        """What is gained; less than 0 if reloading takes longer than recomputing."""
        return self.avoided_s - self.dram_reload_s - self.ssd_reload_s

    @property
    def saved_share(self) -> float:
        """Of the time without any cache."""
        return self.saved_s / self.without_s if self.without_s else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Counts of one replay: one trace, one policy, one ladder. Blocks, except where a name says otherwise; None where
    they are not counted.

    Attributes:
        tokens: of all prompts. `tokens_squared`: the sum over requests of the square of their tokens; so is
            `hit_tokens_squared`, of the tokens hit in any tier.
        missed_new, missed_dropped, missed_behind: blocks not hit: never seen before; seen, and in no tier now; in a
            tier, but behind one that is in none. They and the hits add up to `blocks`.
        moved_up: read from the SSD and kept in DRAM.
        moved_down: left DRAM, and lie on the SSD.
        ssd_written: records written to the SSD, copies that reclaim carries over included.
        dropped: left the ladder. A block that comes in and leaves again counts each time.
    """

    policy: str
    dram_blocks: int
    ssd_blocks: int
    block_tokens: int
    requests: int
    blocks: int
    tokens: int
    tokens_squared: float
    dram_hits: int
    ssd_hits: int
    dram_hit_tokens: int
    ssd_hit_tokens: int
    hit_tokens_squared: float
    missed_new: int
    missed_dropped: int
    missed_behind: int
    ssd_written: int
    moved_up: int | None
    moved_down: int | None
    dropped: int | None

    @property
    def hits(self) -> int:
        """In any tier."""
        return self.dram_hits + self.ssd_hits

    @property
    def hit_ratio(self) -> float:
        """Of blocks."""
        return self.hits / self.blocks if self.blocks else 0.0

    @property
    def token_hit_ratio(self) -> float:
        """Of tokens; those that are in no whole block cannot be hit."""
        return (self.dram_hit_tokens + self.ssd_hit_tokens) / self.tokens if self.tokens else 0.0

    @property
    def written_per_read(self) -> float | None:
        """SSD bytes written for each byte read from it; None if nothing was read."""
        return self.ssd_written / self.ssd_hits if self.ssd_hits else None

    def saving(self, costs: CostModel) -> Saving:
        """Time saved. All hits are reloaded, also where recomputing them would be faster."""
        gb_a_block = costs.nbytes(self.block_tokens) / 1e9
        hit_tokens = self.dram_hit_tokens + self.ssd_hit_tokens
        return Saving(
            costs.recompute_s(self.tokens, self.tokens_squared),
            costs.recompute_s(hit_tokens, self.hit_tokens_squared),
            self.dram_hits * gb_a_block / costs.dram_gb_per_s,
            self.ssd_hits * gb_a_block / costs.ssd_gb_per_s,
        )
