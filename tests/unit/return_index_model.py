"""The return-index policy once more: dicts and lists, and no care for speed. From docs/policies-default.md."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tests.unit.return_index_tables import BINS, STARTS_S, Record, Tables, Turn, bin_of

MASK = 2**64 - 1


@dataclass(eq=False)
class Block:
    key: int
    record: Record | None = None
    session: int = 0
    shared: bool = False
    inside: bool = False
    parent: Block | None = None
    children: int = 0
    depth: int = 0


class IndexModel:
    """The policy without its gate."""

    def __init__(self, capacity: int, seed: int, depth_worth: float = 0.0) -> None:
        self.capacity, self.random, self.depth_worth = capacity, seed, depth_worth
        self.now_s = -math.inf
        self.sessions = self.numbers = 0
        self.tables = Tables()
        self.records: list[Record] = []  # alive, in the order of their making
        self.timers: list[set[Record]] = [set() for _ in range(BINS)]  # by bin: those that have passed its end
        self.blocks: dict[int, Block] = {}
        self.leaves: list[Block] = []
        self.ghosts: OrderedDict[int, Block] = OrderedDict()
        self.evicted: list[int] = []

    @property
    def most_ghosts(self) -> int:
        return max(131072, min(16 * self.capacity, 1_000_000))

    def inside(self) -> set[int]:
        return {key for key, block in self.blocks.items() if block.inside}

    def request(self, keys: Sequence[int], now_s: float, output_tokens: int = -1, extend: bool = False) -> None:
        if not keys:
            return
        self.now_s = max(self.now_s, now_s)
        self._run_timers()
        keys = _until_repeated(keys)
        known = 0
        while known < len(keys) and keys[known] in self.blocks:
            known += 1
        chain = [self.blocks.setdefault(key, Block(key)) for key in keys]
        if extend and known > 0:
            self._extend(chain, known, output_tokens)
        else:
            self._turn(chain, known, output_tokens)
        for at in range(len(chain) - 1, -1, -1):
            chain[at].depth = at
            self._enter(chain[at], chain[at - 1] if at > 0 else None)
        self._shrink(self.capacity)

    def hint(self, key: int, kind: str, seconds: float, now_s: float) -> None:
        self.now_s = max(self.now_s, now_s)
        block = self.blocks.get(key)
        if block is None or block.record is None:
            return
        if kind == "shared":
            self._share(block)
            return
        named = block.record
        if named.kind == "shared" and kind != "priority":
            return
        for record in (named, named.body):
            if record is None or record.alive == 0:
                continue
            if kind == "priority":
                record.priority_until_s = self.now_s + seconds
            else:
                age_s = self.now_s - record.since_s
                self.tables.known.clear()
                record.hint = (kind, bin_of(age_s), bin_of(age_s + seconds))

    def evict(self, n: int) -> None:
        self._shrink(max(0, len(self.inside()) - n))

    def resize(self, capacity: int) -> None:
        self.capacity = capacity
        self._shrink(capacity)

    def forget(self, key: int) -> None:
        block = self.blocks.get(key)
        if block is not None and block.inside:
            self._exit(block)
            self.evicted.pop()

    def _run_timers(self) -> None:
        for at in range(BINS):
            for record in self.records:
                if record in self.timers[at]:
                    continue
                if self.now_s - record.since_s < STARTS_S[at + 1]:
                    break
                if at >= record.first_bin:
                    self.tables.learn(record, at, False, record.alive / math.sqrt(record.at_first))
                self.timers[at].add(record)

    def _turn(self, chain: list[Block], known: int, output_tokens: int) -> None:
        turn = Turn(blocks=len(chain), known=known, output_tokens=output_tokens)
        session = None
        if known > 0:
            before = chain[known - 1].record
            assert before is not None
            if 2 * known >= before.turn.blocks:
                session = chain[known - 1].session
                turn.number = before.turn.number + 1
                turn.gap_s = self.now_s - before.since_s
                log_gap = math.log2(1.0 + turn.gap_s)
                turn.log_gap = log_gap if turn.number == 2 else 0.5 * before.turn.log_gap + 0.5 * log_gap
        if session is None:
            self.sessions += 1
            session = self.sessions
        runs: list[tuple[Record, int]] = []
        for at, block in enumerate(chain):
            if block.record is None:
                continue
            if at > 0 and runs and chain[at - 1].record is block.record:
                runs[-1] = (block.record, runs[-1][1] + 1)
            else:
                runs.append((block.record, 1))
        for record, count in runs:
            self.tables.learn(record, bin_of(self.now_s - record.since_s), True, count / math.sqrt(record.at_first))
        body = shared = shared_before = None
        left: list[Record] = []
        for at, block in enumerate(chain):
            old = block.record
            if old is not None:
                left.append(old)
                block.shared = block.shared or block.session != session
            block.session = session
            if block.shared:
                assert old is not None
                if old is not shared_before:
                    own = Turn(blocks=len(chain), known=at, gap_s=self.now_s - old.since_s)
                    own.log_gap = math.log2(1.0 + self.now_s - old.since_s)
                    if old.kind == "shared":
                        own.number = old.own.number + 1
                        own.log_gap = 0.6 * old.own.log_gap + 0.4 * own.log_gap
                    shared = self._record("shared", turn, own, self.now_s)
                shared_before, block.record = old, shared
            else:
                shared_before = None
                if at > 0 and at == len(chain) - 1:
                    block.record = self._record("last", turn, turn, self.now_s)
                    block.record.body = body
                else:
                    body = body or self._record("body", turn, turn, self.now_s)
                    block.record = body
            assert block.record is not None
            block.record.at_first += 1
            block.record.alive += 1
        for record in left:
            self._leave(record)

    def _extend(self, chain: list[Block], known: int, output_tokens: int) -> None:
        deepest = chain[known - 1]
        made, session = deepest.record, deepest.session
        assert made is not None
        turn = Turn(**vars(made.turn))
        turn.blocks = max(turn.blocks, len(chain))
        if output_tokens >= 0:
            turn.output_tokens = output_tokens
        body: Record | None = None
        for block in reversed(chain[:known]):
            record = block.record
            assert record is not None
            if block.session != session or record.since_s != made.since_s:
                break
            if record.kind == "body":
                body = record
                break
        if made.kind == "last":
            if known == len(chain):
                made.turn = made.own = turn
            elif body is None:
                body = made
            else:
                self._move(deepest, body)
        self.tables.known.clear()
        if body is not None:
            body.kind, body.turn, body.own = "body", turn, turn
        for at in range(known, len(chain)):
            chain[at].session = session
            if at == len(chain) - 1:
                last = self._record("last", turn, turn, made.since_s)
                last.body = body
                self._move(chain[at], last)
            else:
                body = body or self._record("body", turn, turn, made.since_s)
                self._move(chain[at], body)

    def _share(self, block: Block) -> None:
        at: Block | None = block
        shared = shared_before = None
        while at is not None and not at.shared:
            old = at.record
            assert old is not None
            if old is not shared_before:
                shared = self._record("shared", old.turn, Turn(blocks=old.turn.blocks), old.since_s)
                shared_before = old
            assert shared is not None
            at.shared = True
            self._move(at, shared)
            at = at.parent

    def _record(self, kind: str, turn: Turn, own: Turn, since_s: float) -> Record:
        self.numbers += 1
        record = Record(kind, turn, own, since_s, self.numbers, bin_of(self.now_s - since_s))
        self.records.append(record)
        return record

    def _move(self, block: Block, record: Record) -> None:
        old, block.record = block.record, record
        record.at_first += 1
        record.alive += 1
        if old is not None:
            self._leave(old)

    def _leave(self, record: Record) -> None:
        record.alive -= 1
        if record.alive == 0:
            self.records.remove(record)

    def _enter(self, block: Block, parent: Block | None) -> None:
        if not block.inside:
            self.ghosts.pop(block.key, None)
            block.inside, block.parent = True, None
            if block.children == 0:
                self.leaves.append(block)
        if block.parent is parent:
            return
        self._orphan(block)
        block.parent = parent
        if parent is not None:
            self._no_leaf(parent)
            self.ghosts.pop(parent.key, None)
            parent.children += 1

    def _orphan(self, block: Block) -> None:
        parent, block.parent = block.parent, None
        if parent is None:
            return
        parent.children -= 1
        if parent.children == 0:
            if parent.inside:
                self.leaves.append(parent)
            else:
                self.ghosts[parent.key] = parent

    def _no_leaf(self, block: Block) -> None:
        if block in self.leaves:
            self.leaves[self.leaves.index(block)] = self.leaves[-1]
            self.leaves.pop()

    def _exit(self, block: Block) -> None:
        self.evicted.append(block.key)
        self._no_leaf(block)
        block.inside = False
        self._orphan(block)
        if block.children == 0:
            self.ghosts[block.key] = block
        while len(self.ghosts) > self.most_ghosts:
            key, ghost = self.ghosts.popitem(last=False)
            assert ghost.record is not None
            self._leave(ghost.record)
            del self.blocks[key]

    def _shrink(self, most: int) -> None:
        excess = len(self.inside()) - most
        while excess > 0:
            block: Block | None = self._victim()
            while block is not None:
                parent, record = block.parent, block.record
                self._exit(block)
                excess -= 1
                go_on = excess > 0 and parent in self.leaves
                block = parent if go_on and parent is not None and parent.record is record else None

    def _victim(self) -> Block:
        drawn: Iterable[Block] = self.leaves
        if len(self.leaves) > 64:
            drawn = [self.leaves[self._draw() % len(self.leaves)] for _ in range(64)]
        return min(drawn, key=self._order)

    def _order(self, block: Block) -> tuple[float, int]:
        record = block.record
        assert record is not None
        index = self.tables.index(record, bin_of(self.now_s - record.since_s))
        if self.now_s < record.priority_until_s:
            index *= 4.0
        return (index * (1.0 + self.depth_worth * block.depth), record.number)

    def _draw(self) -> int:
        self.random = (self.random + 0x9E3779B97F4A7C15) & MASK
        z = self.random
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        return z ^ (z >> 31)


def _until_repeated(keys: Sequence[int]) -> list[int]:
    seen: dict[int, None] = {}
    for key in keys:
        if key in seen:
            break
        seen[key] = None
    return list(seen)
