"""What the return-index policy learns, once more: dicts, and no care for speed. From docs/policies-default.md.

Floating-point sums are taken in the order in which that page names the tables, so that decisions agree to the bit.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, field

BINS = 31
#: Where each bin of age begins, in seconds, and where the last one ends.
STARTS_S = [0.0] + [2.0 ** ((i - 1) / 2) for i in range(1, BINS + 1)]


def bin_of(age_s: float) -> int:
    """The bin of an age; BINS: never."""
    return max(i for i, start_s in enumerate(STARTS_S) if i == 0 or start_s <= age_s)


def size_class(count: int, values: int) -> int:
    return min(max(count, 0).bit_length(), values - 1)


@dataclass
class Turn:
    number: int = 1
    gap_s: float | None = None
    log_gap: float = 0.0
    blocks: int = 0
    known: int = 0
    output_tokens: int = -1


@dataclass(eq=False)
class Record:
    kind: str
    turn: Turn  # that made it
    own: Turn  # what the tables see: the same, but for shared runs
    since_s: float
    number: int
    first_bin: int
    at_first: int = 0
    alive: int = 0
    body: Record | None = None
    hint: tuple[str, int, int] | None = None  # kind, bin from which it is known, bin that it names
    priority_until_s: float = -math.inf


@dataclass
class Tables:
    """Entries by table and value; each a weight and the squares of its gradients."""

    entries: dict[Hashable, list[float]] = field(default_factory=dict)
    known: dict[tuple[Record, int], float] = field(default_factory=dict)  # indexes, until something is learned

    def entry(self, name: tuple[Hashable, ...]) -> list[float]:
        if name not in self.entries:
            self.entries[name] = [self.at_first(name), 0.0]
        return self.entries[name]

    @staticmethod
    def at_first(name: tuple[Hashable, ...]) -> float:
        match name:
            case ("closed" | "one_off", _):
                return -4.0
            case ("distance", int(distance), _) if distance <= 2:
                return -2.0 if distance < -3 else 0.0 if distance < -1 else 2.0
        return 0.0

    def names(self, record: Record, at: int) -> list[tuple[Hashable, ...]]:
        turn, four = record.own, at // 4
        fresh = turn.blocks - turn.known
        answered = (
            record.kind != "shared" and turn.output_tokens >= 0 and STARTS_S[at] >= 1.0 + 0.015 * turn.output_tokens
        )
        part: Hashable = "shared" if record.kind == "shared" else "answered" if answered else "asked"
        number = turn.number if turn.number <= 4 else min(turn.number.bit_length() + 1, 11) + 1
        gap = -1 if turn.gap_s is None else min(int(2.0 * math.log2(1.0 + turn.gap_s)), 31)
        relative: int | None = None
        if turn.gap_s is not None:
            relative = min(max(at - min(math.floor(2.0 * turn.log_gap + 0.5), 200), -12), 12)
        names: list[tuple[Hashable, ...]] = [
            (part, "last", record.kind == "last", at),
            (part, "turn", number, at),
            (part, "blocks", size_class(turn.blocks, 16), four),
            (part, "new", size_class(fresh, 16), turn.gap_s is not None, four),
            (part, "gap", gap, four),
            (part, "known and new", size_class(turn.known, 13), size_class(fresh, 13), four),
            (part, "relative", relative, four),
        ]
        if answered:
            output = size_class(turn.output_tokens, 16)
            names += [
                (part, "output", output, at),
                (part, "output and blocks", output, size_class(turn.blocks, 16), four),
            ]
        if record.hint is not None and at >= record.hint[1]:
            kind, _, due = record.hint
            if kind == "returns":
                names += [("distance", min(max(at - due, -12), 12), four), ("due", due, at)]
            else:
                names.append((kind, at))
        return names

    def chance(self, record: Record, at: int) -> float:
        total = -2.0
        for name in self.names(record, at):
            total += self.entry(name)[0]
        return 1.0 / (1.0 + math.exp(-total))

    def learn(self, record: Record, at: int, used: bool, weight: float) -> None:
        if at >= BINS:
            return
        self.known.clear()
        gradient = (self.chance(record, at) - (1.0 if used else 0.0)) * weight
        for name in self.names(record, at):
            entry = self.entry(name)
            entry[1] += gradient * gradient
            entry[0] -= 0.2 * gradient / math.sqrt(8.0 + entry[1])

    def index(self, record: Record, at: int) -> float:
        if (record, at) in self.known:
            return self.known[record, at]
        best = uses = held_s = 0.0
        left = 1.0
        for i in range(at, BINS):
            chance = self.chance(record, i)
            uses += left * chance
            held_s += left * (1.0 - 0.5 * chance) * (STARTS_S[i + 1] - STARTS_S[i])
            best = max(best, uses / held_s)
            left *= 1.0 - chance
        self.known[record, at] = best
        return best
