"""What the soak's blocks hold, which conversations there are, and which of them were given up for good.

The bytes of a block follow from its key alone, by arithmetic that the library does not know. So any process can check
any hit without having seen the put, also after a kill.
"""

from __future__ import annotations

import functools
import itertools
import random
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvterrace import KeyChain, KVLayout, Namespace, chain_keys
from kvterrace.buffers import Bytes

MiB = 1 << 20
PAGE = 4096

_WORDS = np.arange(MiB // 8, dtype=np.uint64)
#: Graves that are kept; beyond that a random one is forgotten, so that the soak itself does not grow.
_MOST_GRAVES = 1500


@dataclass(frozen=True)
class Kind:
    """A namespace of the load: its conversations, their longest length, and what a record of it takes, by hand."""

    namespace: Namespace
    conversations: int
    groups: int
    most_blocks: int
    header_nbytes: int
    record_nbytes: int

    @property
    def covered_nbytes(self) -> int:
        """Bytes of a record that a checksum covers: all but the padding behind the payload."""
        return self.header_nbytes + self.namespace.layout.block_nbytes


def _kind(name: str, conversations: int, groups: int, most: int, pages: tuple[int, int], **layout: Any) -> Kind:
    namespace = Namespace(model=f"soak-{name}", layout=KVLayout(**layout))
    return Kind(namespace, conversations, groups, most, pages[0] * PAGE, sum(pages) * PAGE)


#: About 380 MiB if all of it were there at once. Payloads of 16 KiB; 11,520 B (padded); 128 KiB in 256 parts, so a
#: header of two pages; 512 KiB in fused parts.
KINDS = (
    _kind("plain", 700, 16, 40, (1, 4), layers=4, kv_heads=2, head_dim=32, dtype="float16", block_tokens=16),
    _kind("odd", 400, 8, 40, (1, 3), layers=3, kv_heads=1, head_dim=40, dtype="float16", block_tokens=24),
    _kind("wide", 60, 4, 16, (2, 32), layers=128, kv_heads=1, head_dim=8, dtype="float16", block_tokens=32),
    _kind(
        "fused",
        60,
        4,
        12,
        (1, 128),
        layers=8,
        kv_heads=1,
        head_dim=512,
        dtype="bfloat16",
        block_tokens=64,
        parts_per_layer=1,
    ),
)
BY_RECORD = {kind.record_nbytes: kind for kind in KINDS}
LARGEST_RECORD = max(BY_RECORD)


@dataclass(frozen=True)
class Conversation:
    """Conversation `slot` of a kind; once given up, the slot goes on with the next `generation`."""

    kind: int
    slot: int
    generation: int


@functools.lru_cache(4096)
def shape_of(one: Conversation) -> tuple[int, int]:
    """Blocks of the prefix that its group shares, and of the whole conversation at its longest (lognormal)."""
    kind = KINDS[one.kind]
    group = random.Random(f"group {one.kind} {one.slot % kind.groups}")
    own = random.Random(f"conversation {one.kind} {one.slot} {one.generation}")
    prefix = min(kind.most_blocks // 2, int(group.lognormvariate(0.8, 0.9)))
    return prefix, min(kind.most_blocks, prefix + 1 + int(own.lognormvariate(1.6, 0.8)))


@functools.lru_cache(2048)
def chain_of(one: Conversation) -> KeyChain:
    """The whole conversation."""
    kind = KINDS[one.kind]
    prefix, length = shape_of(one)
    width = kind.namespace.layout.block_tokens
    shared = np.random.default_rng([1, one.kind, one.slot % kind.groups]).integers(0, 2**32, prefix * width)
    own = np.random.default_rng([2, one.kind, one.slot, one.generation]).integers(0, 2**32, (length - prefix) * width)
    return chain_keys(kind.namespace, np.concatenate([shared, own]))


def content(key: bytes, nbytes: int) -> Bytes:
    """What the block of `key` holds."""
    step = np.uint64(int.from_bytes(key[:8], "little") | 1)
    first = np.uint64(int.from_bytes(key[8:16], "little"))
    words = _WORDS[: -(-nbytes // 8)] * step
    words += first
    return words.view(np.uint8)[:nbytes]


class Pool:
    """Who is talked to: conversations by Zipf's law, each by one client at a time. Thread-safe."""

    def __init__(self, seed: int, generations: Iterable[Iterable[int]] | None = None) -> None:
        self._lock = threading.Lock()
        self._busy: set[tuple[int, int]] = set()
        self.generations = [[0] * kind.conversations for kind in KINDS]
        if generations is not None:
            self.generations = [list(row) for row in generations]
        self._places = [(number, slot) for number, kind in enumerate(KINDS) for slot in range(kind.conversations)]
        random.Random(f"pool {seed}").shuffle(self._places)
        self._weights = list(itertools.accumulate(1.0 / (rank + 20.0) for rank in range(len(self._places))))

    def take(self, rng: random.Random) -> Conversation:
        """A conversation that nobody else uses, until `give_back`."""
        while True:
            place = rng.choices(self._places, cum_weights=self._weights)[0]
            with self._lock:
                if place not in self._busy:
                    self._busy.add(place)
                    return Conversation(*place, self.generations[place[0]][place[1]])

    def give_back(self, one: Conversation) -> None:
        """Somebody else may use it now."""
        with self._lock:
            self._busy.discard((one.kind, one.slot))

    def retire(self, one: Conversation) -> None:
        """Nobody ever puts a block of this generation again."""
        with self._lock:
            self.generations[one.kind][one.slot] = max(self.generations[one.kind][one.slot], one.generation + 1)


@dataclass(eq=False)
class Grave:
    """Blocks `start..known` of a retired conversation were invalidated while the index knew them: no hit ever again.

    In the life in which it was dug that holds at once; after a restart, if `durable`.
    """

    one: Conversation
    start: int
    known: int
    durable: bool = False

    @property
    def keys(self) -> set[bytes]:
        """First eight bytes of the key of each of its blocks."""
        chain = chain_of(self.one)
        return {chain.key(index)[:8] for index in range(self.start, self.known)}


class Graves:
    """What may not come back. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._all: list[Grave] = []
        self._rng = random.Random("graves")
        self.dug = self.exempted = self.undurable = self.forgotten = 0

    def dig(self, grave: Grave) -> None:
        with self._lock:
            self.dug += 1
            self._all.append(grave)
            if len(self._all) > _MOST_GRAVES:
                self.forgotten += 1
                self._all.pop(self._rng.randrange(len(self._all)))

    def fresh(self) -> list[Grave]:
        """Those that no flush has covered yet: to be asked before a flush, and marked after it."""
        with self._lock:
            return [one for one in self._all if not one.durable]

    def sample(self, rng: random.Random) -> Grave | None:
        with self._lock:
            return rng.choice(self._all) if self._all else None

    def each(self) -> list[Grave]:
        with self._lock:
            return list(self._all)

    def end_of_life(self, lost: Callable[[Grave], bool]) -> None:
        """Keep what a restart must keep: what is durable, less that whose tombstones a fault has destroyed."""
        with self._lock:
            kept = [one for one in self._all if one.durable]
            self.undurable += len(self._all) - len(kept)
            self._all = [one for one in kept if not lost(one)]
            self.exempted += len(kept) - len(self._all)

    def __len__(self) -> int:
        return len(self._all)
