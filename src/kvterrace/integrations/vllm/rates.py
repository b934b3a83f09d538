"""Load or recompute: which is faster for a hit, from what this engine has measured of itself."""

from __future__ import annotations

__all__ = ["Rates"]

#: Weight of the newest measurement: a change shows after a few steps, one odd step does not.
_WEIGHT = 0.25
#: Steps of fewer tokens say what decoding costs, not prefill.
_LEAST_TOKENS = 64
#: Loads of fewer bytes say what a request costs, not a byte; unless they took long.
_LEAST_NBYTES, _LONG_S = 1 << 20, 0.5
#: Seconds that a measurement of loads is good for: where loads are refused, nobody measures them any more.
_GOOD_S = 30.0
#: A load may take this long in any case, and never longer than that.
_SHORTEST_S, _LONGEST_S = 0.5, 30.0
#: Tokens a second that computing is taken to manage before it was measured: as slow as a small model on two cores.
_ASSUMED_TOKENS_S = 250.0


class Rates:
    """Moving averages of prefill speed and load bandwidth. Not thread-safe: the scheduler's."""

    def __init__(self) -> None:
        self._prefill_tokens_s: float | None = None
        self._load_nbytes_s: float | None = None
        self._loaded_s = 0.0  # when that was measured last

    def computed(self, tokens: int, elapsed_s: float) -> None:
        """A step computed `tokens`."""
        if tokens >= _LEAST_TOKENS and elapsed_s > 0:
            self._prefill_tokens_s = _mean(self._prefill_tokens_s, tokens / elapsed_s)

    def loaded(self, nbytes: int, elapsed_s: float, now_s: float) -> None:
        """`nbytes` of a load arrived in this time."""
        if elapsed_s > 0 and (nbytes >= _LEAST_NBYTES or elapsed_s >= _LONG_S):
            self._load_nbytes_s = _mean(self._load_nbytes_s, max(1, nbytes) / elapsed_s)
            self._loaded_s = now_s

    def worth_loading(self, tokens: int, nbytes: int, now_s: float) -> bool:
        """Whether loading is faster than computing; so where one of them was not measured, or not lately."""
        if self._prefill_tokens_s is None or self._load_nbytes_s is None or now_s - self._loaded_s > _GOOD_S:
            return True
        return nbytes / self._load_nbytes_s < tokens / self._prefill_tokens_s

    def deadline_s(self, tokens: int) -> float:
        """Seconds after which a load of `tokens` is given up: as long as computing them takes."""
        return min(_LONGEST_S, max(_SHORTEST_S, tokens / (self._prefill_tokens_s or _ASSUMED_TOKENS_S)))


def _mean(old: float | None, new: float) -> float:
    return new if old is None else old + _WEIGHT * (new - old)
