"""How much is asked for: as much as a figure needs, or as little as shows that it runs."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["FULL", "SMALL", "Sizes"]


@dataclass(frozen=True, slots=True)
class Sizes:
    """`same_prompts`: with one answer each. `pairs`: of engines without and with kvterrace. `requests`: at each
    concurrency.
    """

    prefix_tokens: int
    prefixes: int
    questions: int
    same_prompts: int
    pairs: int
    requests: int
    concurrency: tuple[int, ...]


FULL = Sizes(
    prefix_tokens=4000, prefixes=3, questions=4, same_prompts=20, pairs=16, requests=32, concurrency=(1, 4, 8, 16)
)  # fmt: skip
SMALL = Sizes(prefix_tokens=640, prefixes=1, questions=3, same_prompts=3, pairs=2, requests=4, concurrency=(1, 4))
