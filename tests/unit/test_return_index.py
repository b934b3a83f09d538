"""The return-index policy against a slow model of it, decision by decision."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import numpy as np
import pytest
from tests.unit.return_index_model import IndexModel

native = pytest.importorskip("kvterrace._native", reason="the extension module is not built: make native")


def keys_of(*keys: int) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    return np.array(keys, dtype=np.uint64)


class Pair:
    """Both, told the same."""

    def __init__(self, capacity: int, seed: int, depth_worth: float = 0.0) -> None:
        self.model = IndexModel(capacity, seed, depth_worth)
        self.native = native.IndexDirectory(capacity, seed, depth_worth)

    def request(self, keys: list[int], now_s: float, output_tokens: int = -1, extend: bool = False) -> None:
        self.model.request(keys, now_s, output_tokens, extend)
        self.native.request(keys_of(*keys), now_s, output_tokens=output_tokens, extend=extend)
        self.compare()

    def hint(self, key: int, kind: str, seconds: float, now_s: float) -> None:
        self.model.hint(key, kind, seconds, now_s)
        self.native.hint(key, kind, seconds, now_s)

    def compare(self) -> None:
        gone, self.model.evicted = self.model.evicted, []
        assert self.native.take_evicted().tolist() == gone
        assert len(self.native) == len(self.model.inside())


class Traffic:
    """Sessions that share some prefixes, grow, pause, are cut back, and end."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.fresh = itertools.count(1000)
        self.prefixes = [[next(self.fresh) for _ in range(n)] for n in (1, 4, 9)]
        self.sessions: list[list[int]] = []
        self.now_s = 100.0

    def __iter__(self) -> Iterator[tuple[list[int], float, int]]:
        while True:
            draw = self.random.random()
            if not self.sessions or draw < 0.25:
                self.sessions.append(list(self.random.choice(self.prefixes)) if self.random.random() < 0.7 else [])
            chain = self.sessions[-1 if draw < 0.3 else self.random.randrange(len(self.sessions))]
            del chain[len(chain) - (len(chain) // 3 if draw > 0.95 else min(1, len(chain) // 2)) :]
            chain.extend(next(self.fresh) for _ in range(self.random.randrange(1, 12)))
            self.now_s += self.random.choice((0.0, 0.3, 2.0, 40.0)) * self.random.random()
            if self.random.random() < 0.01:
                self.now_s += 3000.0
            yield list(chain), self.now_s, self.random.choice((-1, 0, 3, 200, 5000))
            if len(self.sessions) > 12:
                del self.sessions[self.random.randrange(12)]


@pytest.mark.parametrize(
    ("capacity", "seed", "depth_worth"),
    [(0, 1, 0.0), (1, 1, 0.0), (7, 2, 0.0), (40, 3, 0.0), (150, 4, 0.0), (600, 5, 0.0), (150, 6, 0.05)],
)
def test_it_decides_as_the_model_does(capacity: int, seed: int, depth_worth: float) -> None:
    both = Pair(capacity, seed, depth_worth)
    for keys, now_s, output_tokens in itertools.islice(Traffic(seed), 160):
        both.request(keys, now_s, output_tokens)
    inside = both.model.inside()
    seen = sorted(both.model.blocks)
    assert both.native.inside(keys_of(*seen)).tolist() == [key in inside for key in seen]


@pytest.mark.parametrize("seed", range(4))
def test_it_takes_hints_extensions_and_losses_as_the_model_does(seed: int) -> None:
    both, more = Pair(90, seed), random.Random(seed)
    for keys, now_s, output_tokens in itertools.islice(Traffic(seed), 160):
        split = more.randrange(1, len(keys) + 1)
        both.request(keys[:split], now_s)
        for upto in sorted(
            more.sample(range(split, len(keys) + 1), more.randrange(0, min(3, len(keys) + 1 - split + 1)))
        ):
            both.request(keys[:upto], now_s + 0.5, output_tokens, extend=True)
        kind = more.choice(["closed", "one_off", "returns", "shared", "priority", "none", "none"])
        if kind != "none":
            both.hint(more.choice(keys[-3:]), kind, more.choice((0.0, 5.0, 300.0)), now_s + more.random())
        match more.randrange(12):
            case 0:
                both.model.evict(17)
                assert both.native.evict(17).tolist() == both.model.evicted
                both.model.evicted = []
            case 1:
                key = more.choice(keys)
                both.model.forget(key)
                both.native.forget(keys_of(key))
            case 2:
                capacity = more.choice((60, 90, 120))
                both.model.resize(capacity)
                both.native.resize(capacity)
        both.compare()
