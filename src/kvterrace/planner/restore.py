"""Load a prefix or compute it again, and how long requests wait when many ask at once (R6, R27)."""

from __future__ import annotations

from dataclasses import dataclass

from kvterrace.errors import ConfigError
from kvterrace.planner.links import Path
from kvterrace.planner.timing import Engine

__all__ = ["BreakEven", "Choice", "break_even", "choose", "first_token_s"]


@dataclass(frozen=True, slots=True)
class Choice:
    """One prefix, from one tier: seconds to load it and to compute it."""

    tier: str
    tokens: int
    nbytes: int
    load_s: float
    compute_s: float

    @property
    def load(self) -> bool:
        """Whether loading is faster."""
        return self.load_s < self.compute_s

    @property
    def break_even_bytes_per_s(self) -> float:
        """Bandwidth at which both take the same time, the first byte's delay aside."""
        return self.nbytes / self.compute_s if self.compute_s else float("inf")


@dataclass(frozen=True, slots=True)
class BreakEven:
    """From which prefix length on loading from a tier is faster; None: not even at the longest that was tried."""

    tier: str
    tokens: int | None
    tried_tokens: int


def choose(engine: Engine, path: Path, tokens: int) -> Choice:
    """Compare for a prefix of `tokens`, each way with the path or the accelerators to itself."""
    nbytes = engine.model.sequence_nbytes(tokens)
    return Choice(path.tier, tokens, nbytes, path.load_s(nbytes), engine.prefill_s(0, tokens))


def break_even(engine: Engine, path: Path, longest: int) -> BreakEven:
    """The prefix length, in steps of 16 tokens, from which on loading is always faster, up to `longest`.

    Loading has a fixed part and grows in line with the length; computing takes at least as long as reading the weights,
    and then grows faster than in line. So loading may win for a few tokens, where both take milliseconds, lose behind
    that, and win for good in the end: the last length at which it loses is what counts. Lengths 3 % apart are tried
    from the longest down, then the step in between is halved.
    """
    if longest < 16:
        raise ConfigError(f"break-even: a longest prefix of {longest} tokens: give at least 16")

    def wins(blocks: int) -> bool:
        return choose(engine, path, 16 * blocks).load

    high = longest // 16
    if not wins(high):
        return BreakEven(path.tier, None, longest)
    low = high
    while low and wins(low):
        high, low = low, min(low - 1, int(low * 0.97))
    while high - low > 1:
        middle = (low + high) // 2
        if wins(middle):
            high = middle
        else:
            low = middle
    return BreakEven(path.tier, 16 * high, longest)


def first_token_s(
    requests: int, restore_s: float, compute_s: float, *, local: int, own_link_s: float = 0.0, first_byte_s: float = 0.0
) -> float:
    """Until the median of `requests` that ask at once has its first token.

    Each passes the links that all share, in `restore_s`, and those of its instance's accelerators, in `own_link_s`,
    both at a time; then the accelerators. The latter two are shared by the `local` requests of an instance. A stage is
    shared evenly, so the slowest one works all the time and all end together; the others are passed once (a flow shop
    of equal jobs: Johnson, 1954).
    """
    once_s = first_byte_s + max(restore_s, own_link_s) + compute_s
    return once_s + max((requests - 1) * restore_s, (local - 1) * max(own_link_s, compute_s))
