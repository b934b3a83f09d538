"""The load that a plan is for."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvterrace.errors import ConfigError
from kvterrace.planner.trace import TraceProfile

__all__ = ["RETURN_S", "Workload"]

#: Until a prefix is asked for again, on average: 90 % of the reuse in Mooncake's conversation trace (FAST 2025) comes
#: within 519 s of the last use.
RETURN_S = 600.0
_MAX_TOKENS = 1 << 30
_MAX_SEQUENCES = 10**6


@dataclass(frozen=True, slots=True)
class Workload:
    """A load of sequences that are all alike.

    Attributes:
        context_tokens: of a sequence at its longest, prompt and answer.
        concurrency: sequences alive at the same time.
        output_tokens: of an answer; part of the context.
        reuse: share of a prompt's tokens that an endless cache would have.
        return_s: until a prefix is asked for again, on average.
        ttft_s, tpot_s: the latency target: time to first token, time per output token; None: there is none.
        trace: where reuse by capacity comes from, in place of `return_s`.
    """

    context_tokens: int
    concurrency: int = 16
    output_tokens: int = 512
    reuse: float = 0.0
    return_s: float = RETURN_S
    ttft_s: float | None = None
    tpot_s: float | None = None
    trace: TraceProfile | None = None

    def __post_init__(self) -> None:
        for option, value, most in (
            ("--context", self.context_tokens, _MAX_TOKENS),
            ("--concurrency", self.concurrency, _MAX_SEQUENCES),
            ("--output", self.output_tokens, _MAX_TOKENS),
        ):
            if not 1 <= value <= most:
                raise ConfigError(f"{option} {value}: give a whole number in 1..{most}")
        if self.output_tokens >= self.context_tokens:
            raise ConfigError(
                f"--output {self.output_tokens}: the answer is part of the context of {self.context_tokens} tokens: "
                "give less, or a longer --context"
            )
        if not 0 <= self.reuse <= 1:
            raise ConfigError(f"--reuse {self.reuse}: give a share in 0..1, e.g. 0.6 or 60%")
        for option, seconds in (("--return", self.return_s), ("--ttft", self.ttft_s), ("--tpot", self.tpot_s)):
            if seconds is not None and not 1e-6 <= seconds <= 1e9:
                raise ConfigError(f"{option} {seconds} s: give a time in 1us..1e9s, e.g. 500ms or 2s")

    @property
    def prompt_tokens(self) -> int:
        """The context without the answer."""
        return self.context_tokens - self.output_tokens

    def found_share(self, capacity_tokens: float, tokens_per_s: float) -> float:
        """Share of a prompt's tokens that a cache of `capacity_tokens` has, while `tokens_per_s` pass through it.

        From the trace where there is one (an LRU stack). Otherwise a prefix comes back after a time that is
        exponentially distributed around `return_s`, and is still there if fewer tokens than the capacity have passed
        in between (Che, Tung and Wang, 2002: the characteristic time of an LRU cache).
        """
        if capacity_tokens <= 0:
            return 0.0
        if self.trace is not None:
            return min(self.reuse, self.trace.hit_share(capacity_tokens))
        if tokens_per_s <= 0:
            return self.reuse
        return self.reuse * -math.expm1(-capacity_tokens / tokens_per_s / self.return_s)
