"""The gate of the default policy: what is inside follows the better of the return-index policy and ARC."""

from __future__ import annotations

import itertools
import math
import random
from collections import OrderedDict
from collections.abc import Iterator

import numpy as np
import pytest

native = pytest.importorskip("kvterrace._native", reason="the extension module is not built: make native")


def keys_of(*keys: int) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    return np.array(keys, dtype=np.uint64)


class ArcModel:
    """ARC from figure 4 of Megiddo and Modha (2003): four ordered dicts, oldest first."""

    def __init__(self, capacity: int) -> None:
        self.c, self.p = capacity, 0.0
        self.t1, self.t2, self.b1, self.b2 = (OrderedDict[int, None]() for _ in range(4))

    def inside(self, key: int) -> bool:
        return key in self.t1 or key in self.t2

    def replace(self, key: int) -> None:
        if self.t1 and (len(self.t1) > self.p or (key in self.b2 and len(self.t1) == self.p)):
            self.b1[self.t1.popitem(last=False)[0]] = None
        else:
            self.b2[self.t2.popitem(last=False)[0]] = None

    def access(self, key: int) -> None:
        if self.inside(key):
            self.t1.pop(key, None)
            self.t2.pop(key, None)
            self.t2[key] = None
        elif key in self.b1:
            self.p = min(self.p + max(len(self.b2) / len(self.b1), 1.0), self.c)
            self.replace(key)
            del self.b1[key]
            self.t2[key] = None
        elif key in self.b2:
            self.p = max(self.p - max(len(self.b1) / len(self.b2), 1.0), 0.0)
            self.replace(key)
            del self.b2[key]
            self.t2[key] = None
        else:
            if len(self.t1) + len(self.b1) == self.c:
                if len(self.t1) < self.c:
                    self.b1.popitem(last=False)
                    self.replace(key)
                else:
                    self.t1.popitem(last=False)
            elif (total := len(self.t1) + len(self.t2) + len(self.b1) + len(self.b2)) >= self.c:
                if total == 2 * self.c:
                    self.b2.popitem(last=False)
                self.replace(key)
            self.t1[key] = None


class GateModel:
    """The rule of the gate, over the policy without it and a model of ARC; `real` is what is inside."""

    def __init__(self, capacity: int, seed: int) -> None:
        self.c = capacity
        self.index, self.arc = native.IndexDirectory(capacity, seed), ArcModel(capacity)
        self.follows_arc = False
        self.ahead = self.accesses = 0.0
        self.real: set[int] = set()
        self.changes = 0

    def in_leader(self, keys: set[int]) -> set[int]:
        if self.follows_arc:
            return {key for key in keys if self.arc.inside(key)}
        listed = list(keys)
        return {key for key, inside in zip(listed, self.index.inside(keys_of(*listed)), strict=True) if inside}

    def request(self, keys: list[int], now_s: float) -> None:
        hits_index = [*self.index.inside(keys_of(*keys)), False]
        hits_arc = [*(self.arc.inside(key) for key in keys), False]
        memory = max(20.0 * self.c, 20000.0)
        kept = math.exp(-len(keys) / memory)
        self.ahead = self.ahead * kept + hits_index.index(False) - hits_arc.index(False)
        self.accesses = self.accesses * kept + len(keys)
        if self.accesses > memory / 4:
            lead = 0.005 * self.accesses
            if self.ahead > lead if self.follows_arc else self.ahead < -lead:
                self.follows_arc = not self.follows_arc
                self.changes += 1
        before = self.in_leader(self.real) | set(keys)
        self.index.request(keys_of(*keys), now_s)
        for key in reversed(keys):
            self.arc.access(key)
        self.real |= set(keys)
        # What the leader had and has no more has left; so has what of the request it did not keep.
        self.real -= before - self.in_leader(before)

    def take(self, gone: list[int]) -> None:
        """Strays, the oldest choice of the old leader first, go as far as there is no room."""
        strays = self.real - self.in_leader(self.real)
        dropped = [key for key in gone if key in self.real]
        assert set(dropped) <= strays
        assert len(dropped) == max(0, len(self.real) - self.c)
        self.real -= set(dropped)


def traffic(seed: int) -> Iterator[tuple[list[int], float]]:
    """By hand: the gate acts from 5,000 accesses on.

    First the clock stands still and there is nothing to learn from, but some keys are hot: ARC's case. Then sessions
    return when it is their time, and twice as many requests never do.
    """
    draw, fresh, now_s = random.Random(seed), itertools.count(10_000), 1.0
    for _ in range(5_900):
        yield [draw.randrange(30) if draw.random() < 0.5 else next(fresh)], now_s
    sessions = [[next(fresh) for _ in range(4)] for _ in range(8)]
    for turn in itertools.count():
        now_s += 1.0
        yield sessions[turn % 8], now_s
        yield [next(fresh) for _ in range(4)], now_s + 0.1
        yield [next(fresh) for _ in range(4)], now_s + 0.2


def test_what_is_inside_follows_the_leader_there_and_back() -> None:
    """After a change some of what only the old leader wanted, or only the new one has, is asked for on purpose."""
    model, real, draw = GateModel(50, 3), native.ReturnIndex(50, 3), random.Random(4)
    seen: set[int] = set()
    asked = {"strays": 0, "missing": 0}
    more: list[tuple[list[int], float]] = []
    requests = itertools.islice(traffic(3), 6_600)
    for count in itertools.count():
        if more:
            keys, now_s = more.pop()
        elif (following := next(requests, None)) is not None:
            keys, now_s = following
        else:
            break
        changes = model.changes
        model.request(keys, now_s)
        real.request(keys_of(*keys), now_s)
        gone = real.take_evicted().tolist()
        model.take(gone)
        seen.update(keys)
        assert real.follows_arc == model.follows_arc, count
        assert len(real) == len(model.real), count
        assert not real.inside(keys_of(*gone)).any()
        if count % 307 == 0 or model.changes > changes:
            known = sorted(seen)
            inside = real.inside(keys_of(*known))
            assert {key for key, there in zip(known, inside, strict=True) if there} == model.real, count
        if model.changes > changes:
            leading = model.in_leader(seen)
            for name, keys_there in (("strays", model.real - leading), ("missing", leading - model.real)):
                chosen = draw.sample(sorted(keys_there), min(3, len(keys_there)))
                asked[name] += len(chosen)
                more += [([key], now_s) for key in chosen]
            # The second's new tail has ARC evict its head, which comes in again.
            grown = list(range(10**6, 10**6 + 70))
            more += [(grown, now_s), (grown[:30], now_s)]
    assert model.changes >= 2
    assert min(asked.values()) >= 3
