"""Eviction policies over dicts: what the native ones are compared with."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable


class Model:
    """One block is used at a time; `inside` is what is there."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity

    def access(self, key: int) -> None:
        raise NotImplementedError

    def inside(self) -> set[int]:
        raise NotImplementedError


Queue = OrderedDict[int, int]


def pop_oldest(queue: Queue) -> int:
    return queue.popitem(last=False)[0]


class Fifo(Model):
    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.queue: Queue = OrderedDict()

    def inside(self) -> set[int]:
        return set(self.queue)

    def access(self, key: int) -> None:
        if key in self.queue:
            return self.hit(key)
        if len(self.queue) == self.capacity:
            pop_oldest(self.queue)
        self.queue[key] = 0
        return None

    def hit(self, key: int) -> None:
        pass


class Lru(Fifo):
    def hit(self, key: int) -> None:
        self.queue.move_to_end(key)


class Lfu(Model):
    """The victim is looked for among all: fewest uses, then the one not used for longest."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.uses: dict[int, tuple[int, int]] = {}
        self.now = 0

    def inside(self) -> set[int]:
        return set(self.uses)

    def access(self, key: int) -> None:
        self.now += 1
        if key not in self.uses and len(self.uses) == self.capacity:
            del self.uses[min(self.uses, key=lambda one: self.uses[one])]
        self.uses[key] = (self.uses.get(key, (0, 0))[0] + 1, self.now)


class TwoQ(Model):
    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.a1in: Queue = OrderedDict()
        self.a1out: Queue = OrderedDict()
        self.am: Queue = OrderedDict()

    def inside(self) -> set[int]:
        return set(self.a1in) | set(self.am)

    def access(self, key: int) -> None:
        if key in self.am:
            self.am.move_to_end(key)
        elif key in self.a1out:
            del self.a1out[key]
            self.reclaim()
            self.am[key] = 0
        elif key not in self.a1in:
            self.reclaim()
            self.a1in[key] = 0

    def reclaim(self) -> None:
        if len(self.a1in) + len(self.am) < self.capacity:
            return
        if len(self.a1in) > max(1, self.capacity // 4) or not self.am:
            self.a1out[pop_oldest(self.a1in)] = 0
            if len(self.a1out) > max(1, self.capacity // 2):
                pop_oldest(self.a1out)
        else:
            pop_oldest(self.am)


class Arc(Model):
    """Figure 4 of the paper, case by case."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.p = 0.0
        self.t1: Queue = OrderedDict()
        self.t2: Queue = OrderedDict()
        self.b1: Queue = OrderedDict()
        self.b2: Queue = OrderedDict()

    def inside(self) -> set[int]:
        return set(self.t1) | set(self.t2)

    def replace(self, in_b2: bool) -> None:
        if (self.t1 and (len(self.t1) > self.p or (in_b2 and len(self.t1) == self.p))) or not self.t2:
            self.b1[pop_oldest(self.t1)] = 0
        else:
            self.b2[pop_oldest(self.t2)] = 0

    def access(self, key: int) -> None:
        c, t1, t2, b1, b2 = self.capacity, self.t1, self.t2, self.b1, self.b2
        if key in t1 or key in t2:
            t1.pop(key, None)
            t2.pop(key, None)
        elif key in b1:
            self.p = min(c, self.p + max(1, len(b2) / len(b1)))
            self.replace(in_b2=False)
            del b1[key]
        elif key in b2:
            self.p = max(0, self.p - max(1, len(b1) / len(b2)))
            self.replace(in_b2=True)
            del b2[key]
        else:
            if len(t1) + len(b1) == c:
                if len(t1) < c:
                    pop_oldest(b1)
                    self.replace(in_b2=False)
                else:
                    pop_oldest(t1)
            elif len(t1) + len(t2) + len(b1) + len(b2) >= c:
                if len(t1) + len(t2) + len(b1) + len(b2) == 2 * c:
                    pop_oldest(b2)
                self.replace(in_b2=False)
            t1[key] = 0
            return
        t2[key] = 0


class S3Fifo(Model):
    """As many ghosts as the main queue has room, looked at after room was made."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.small_room = max(1, capacity // 10)
        self.main_room = capacity - self.small_room
        self.small: Queue = OrderedDict()
        self.main: Queue = OrderedDict()
        self.ghosts: Queue = OrderedDict()

    def inside(self) -> set[int]:
        return set(self.small) | set(self.main)

    def access(self, key: int) -> None:
        for queue in (self.small, self.main):
            if key in queue:
                queue[key] = min(3, queue[key] + 1)
                return
        while len(self.small) + len(self.main) == self.capacity:
            if len(self.small) >= self.small_room or not self.main:
                self.evict_small()
            else:
                self.evict_main()
        if key in self.ghosts:
            del self.ghosts[key]
            self.main[key] = 0
        else:
            self.small[key] = 0

    def evict_small(self) -> None:
        while self.small:
            key, uses = self.small.popitem(last=False)
            if uses > 1:
                self.main[key] = 0
                if len(self.main) > self.main_room:
                    return self.evict_main()
            else:
                self.ghosts[key] = 0
                if len(self.ghosts) > self.main_room:
                    pop_oldest(self.ghosts)
                return None
        return None

    def evict_main(self) -> None:
        while True:
            key, uses = self.main.popitem(last=False)
            if not uses:
                return
            self.main[key] = uses - 1


class Sieve(Model):
    """A plain list, the newest first, and a hand."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.order: list[int] = []
        self.visited: dict[int, bool] = {}
        self.hand: int | None = None

    def inside(self) -> set[int]:
        return set(self.order)

    def access(self, key: int) -> None:
        if key in self.visited:
            self.visited[key] = True
            return
        if len(self.order) == self.capacity:
            at = len(self.order) - 1 if self.hand is None else self.order.index(self.hand)
            while self.visited[self.order[at]]:
                self.visited[self.order[at]] = False
                at = at - 1 if at else len(self.order) - 1
            self.hand = self.order[at - 1] if at else None
            del self.visited[self.order.pop(at)]
        self.order.insert(0, key)
        self.visited[key] = False


class WTinyLfu(Model):
    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.window_room = max(1, capacity // 5)
        self.main_room = capacity - self.window_room
        self.window: Queue = OrderedDict()
        self.probation: Queue = OrderedDict()
        self.protected: Queue = OrderedDict()
        self.uses: Counter[int] = Counter()
        self.counted = 0

    def inside(self) -> set[int]:
        return set(self.window) | set(self.probation) | set(self.protected)

    def access(self, key: int) -> None:
        self.uses[key] = min(15, self.uses[key] + 1)
        self.counted += 1
        if self.counted == 10 * self.capacity:
            self.counted = 0
            self.uses = Counter({one: uses // 2 for one, uses in self.uses.items()})
        if key in self.window:
            self.window.move_to_end(key)
        elif key in self.probation or key in self.protected:
            self.probation.pop(key, None)
            self.protected.pop(key, None)
            self.protected[key] = 0
            if len(self.protected) > self.main_room * 4 // 5:
                self.probation[pop_oldest(self.protected)] = 0
        else:
            self.window[key] = 0
            if len(self.window) > self.window_room:
                self.admit(pop_oldest(self.window))

    def admit(self, key: int) -> None:
        if len(self.probation) + len(self.protected) == self.main_room:
            queue = self.probation or self.protected
            if not queue or self.uses[key] <= self.uses[next(iter(queue))]:
                return
            pop_oldest(queue)
        self.probation[key] = 0


class Belady(Model):
    """Told before each request of what comes after it, as one list of blocks."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.here: set[int] = set()
        self.future: list[int] = []

    def inside(self) -> set[int]:
        return set(self.here)

    def next_use(self, key: int) -> int:
        return self.future.index(key) if key in self.future else len(self.future) + key

    def access(self, key: int) -> None:
        if key not in self.here and key not in self.future:
            return
        self.here.add(key)
        if len(self.here) > self.capacity:
            self.here.remove(max(self.here, key=self.next_use))


MODELS: dict[str, Callable[[int], Model]] = {
    "fifo": Fifo,
    "fifo-head": Fifo,
    "lru-tail": Lru,
    "lru-head": Lru,
    "lfu": Lfu,
    "2q": TwoQ,
    "arc": Arc,
    "s3-fifo": S3Fifo,
    "sieve": Sieve,
    "w-tinylfu": WTinyLfu,
    "belady": Belady,
}


def in_order(policy: str, ids: list[int]) -> Iterable[int]:
    return ids if policy.endswith("-head") else reversed(ids)


def ladder(
    requests: list[list[int]], policy: str, upper: int, lower: int, tokens: list[int], block: int
) -> Counter[str]:
    """A ladder by the book: sets compared before and after each use, every count made one by one."""
    dram, ssd = MODELS[policy](upper), MODELS[policy](lower) if lower else None
    counts: Counter[str] = Counter()
    seen: set[int] = set()

    def below() -> set[int]:
        return ssd.inside() if ssd else set()

    for number, ids in enumerate(requests):
        rest = [one for later in requests[number + 1 :] for one in later]
        for tier in (dram, ssd):
            if isinstance(tier, Belady):
                tier.future = rest
        read, hit_tokens, missing = [], 0, False
        for at, one in enumerate(ids):
            missing = missing or one not in dram.inside() | below()
            if not missing:
                tier_name = "upper" if one in dram.inside() else "lower"
                here = min(tokens[number], (at + 1) * block) - at * block
                counts[f"{tier_name}_hits"] += 1
                counts[f"{tier_name}_hit_tokens"] += here
                hit_tokens += here
                read += [one] if tier_name == "lower" else []
            elif one not in seen:
                counts["missed_new"] += 1
            else:
                counts["missed_behind" if one in dram.inside() | below() else "missed_dropped"] += 1
        seen |= set(ids)
        counts["requests"] += 1
        counts["blocks"] += len(ids)
        counts["tokens"] += tokens[number]
        counts["tokens_squared"] += tokens[number] ** 2
        counts["hit_tokens_squared"] += hit_tokens**2
        gone_below: list[int] = []

        def used_below(one: int, gone: list[int] = gone_below) -> None:
            assert ssd is not None
            before = ssd.inside()
            ssd.access(one)
            gone += sorted((before | {one}) - ssd.inside())

        if ssd:
            for one in in_order(policy, ids):
                if one in ssd.inside():
                    used_below(one)
        left: list[int] = []
        for one in in_order(policy, ids):
            before = dram.inside()
            dram.access(one)
            left += sorted((before | {one}) - dram.inside())
        counts["promoted"] += sum(one in dram.inside() for one in read)
        for one in left:
            if one in dram.inside():
                continue
            if ssd is None:
                counts["dropped"] += 1
                continue
            if one not in ssd.inside():
                used_below(one)
                counts["written"] += one in ssd.inside()
            counts["demoted"] += one in ssd.inside()
        for one in gone_below:
            if one not in below():
                counts["copies_lost" if one in dram.inside() else "dropped"] += 1
    return counts
