"""Figures that others published, predicted from their own set-up with the planner's formulas, not fitted.

The set-ups are quoted as they were published; docs/guide/sizing.md says what follows from them and what does not.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvterrace.planner.restore import restore_burst_s

__all__ = ["COLD_RESTORE", "ColdRestore", "predict"]

#: The bandwidths were published in a unit of 1.024 GB/s (1,000 MiB-per-KiB sums: 1,024,000,000 bytes a second).
PUBLISHED_UNIT = 1.024e9


@dataclass(frozen=True, slots=True)
class ColdRestore:
    """One run: `requests` at once restore `tokens` each from a cold drive, at the bandwidth it showed while busy."""

    device: str
    requests: int
    bytes_per_s: float
    ttft_p50_s: float
    tokens: int = 30_208


#: Qwen3-Coder-480B, prompts of 30,208 tokens: a local drive and a shared array.
COLD_RESTORE = tuple(
    ColdRestore(device, requests, rate * PUBLISHED_UNIT, ttft_s)
    for device, runs in {
        "local drive": ((8, 5.99, 10.17), (16, 6.17, 17.31), (32, 6.42, 35.73)),
        "array": ((8, 7.49, 7.53), (16, 8.12, 11.85), (32, 9.29, 26.35)),
    }.items()
    for requests, rate, ttft_s in runs
)


def predict(run: ColdRestore, nbytes_per_token: int) -> float:
    """Median time to first token: all bytes over the bandwidth. Neither computing nor a fixed part is in it."""
    return restore_burst_s(run.requests, run.tokens * nbytes_per_token, run.bytes_per_s)
