"""From what a store tells to rows of a trace, in which blocks and sequences have names that lead nowhere."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from typing import Any

import numpy as np

from kvterrace.engine.transfers import Transfer
from kvterrace.keys import KEY_NBYTES
from kvterrace.layout import KVLayout
from kvterrace.tracing.chains import named_prefix
from kvterrace.tracing.files import line
from kvterrace.types import Hit, Tier

__all__ = ["Rows", "Sampling", "how_it_ended", "runs_of"]

#: How consecutive blocks ended: a word, and how many.
Ended = tuple[tuple[str, int], ...]

#: Bytes of a block's key that tell it from others within one file: keys are hashes.
_SHORT = 8
#: Blocks that one row names at most.
_NAMED_A_ROW = 1024
#: Bytes of a sequence's name.
_SEQUENCE_NBYTES = 16


class Sampling:
    """Names that lead nowhere, and the choice of sequences: both by BLAKE2b with a key that nobody else has."""

    def __init__(self, salt: bytes, share: float) -> None:
        self._salt = salt
        self._bound = int(share * 2**64)

    def block(self, key: bytes) -> bytes:
        """The id of a block, 8 bytes."""
        return blake2b(key, digest_size=8, key=self._salt, person=b"block").digest()

    def sequence(self, name: bytes) -> bytes:
        """The id of a sequence, 8 bytes."""
        return blake2b(name, digest_size=8, key=self._salt, person=b"sequence").digest()

    def takes(self, keys: bytes, sequence: bytes) -> bool:
        """Whether this sequence is recorded; where it has no name, its chain's first key stands for it."""
        name = sequence if sequence.strip(b"\0") else keys[:_SEQUENCE_NBYTES]
        chosen = blake2b(name, digest_size=8, key=self._salt, person=b"sample").digest()
        return int.from_bytes(chosen, "little") < self._bound


class Rows:
    """The rows of one file, and the blocks that it has named so far. Not thread-safe. About 110 B for each block.

    Args:
        began_s: of the recording, on the store's clock; times in rows count from there.
    """

    def __init__(self, sampling: Sampling, began_s: float) -> None:
        self._sampling = sampling
        self._began_s = began_s
        self._numbers: dict[bytes, int] = {}
        self._namespaces: dict[bytes, int] = {}
        self._lines: list[bytes] = []
        self.nbytes = 0  # of the lines that `take` would return
        self.rows = 0

    @property
    def named(self) -> int:
        """Blocks that the file has named."""
        return len(self._numbers)

    def take(self) -> bytes:
        """The lines since the last time."""
        lines = b"".join(self._lines)
        self._lines.clear()
        self.nbytes = 0
        return lines

    def add(self, row: dict[str, Any]) -> None:
        """One more row."""
        self._lines.append(line(row))
        self.nbytes += len(self._lines[-1])
        self.rows += 1

    # -- what happened -------------------------------------------------------------------------------------------------

    def transfer(
        self,
        op: str,
        digest: bytes,
        layout: KVLayout,
        keys: bytes,
        start: int,
        stop: int,
        *,
        sequence: bytes,
        layers: tuple[int, int] | None,
        ended: Ended,
        submitted_s: float,
        ended_s: float,
    ) -> None:
        """A get or put of a sampled sequence, or a prefetch of what the file has named.

        `digest` and `layout` are the namespace's, `keys` those of the chain.
        """
        if start >= stop:
            return
        if op == "prefetch":
            stop, asked = min(stop, self._named_of(keys, stop)), stop
            if start >= stop:
                return
            ended = _without_last(ended, asked - stop)
        elif not self._sampling.takes(keys, sequence):
            return
        row: dict[str, Any] = {
            "op": op,
            "t": self._at(submitted_s),
            "took": round(ended_s - submitted_s, 6),
            "ns": self._namespace(digest, layout),
            "tip": self._tip(keys, stop),
            "start": start,
            "stop": stop,
            "ended": ended,
        }
        if sequence.strip(b"\0"):
            row["seq"] = self._sampling.sequence(sequence).hex()
        if layers is not None:
            row["layers"] = layers
        self.add(row)

    def hint(self, sequence: bytes, kind: str, seconds: float | None, now_s: float) -> None:
        """A hint for a sampled sequence."""
        if self._sampling.takes(b"", sequence):
            row = {"op": "hint", "t": self._at(now_s), "seq": self._sampling.sequence(sequence).hex(), "kind": kind}
            self.add(row if seconds is None else row | {"seconds": seconds})

    def touch(self, keys: bytes, scores: np.ndarray | None, now_s: float) -> None:
        """A touch, as far as the file has named the chain's blocks."""
        if not (stop := self._named_of(keys, len(keys) // KEY_NBYTES)):
            return
        row: dict[str, Any] = {"op": "touch", "t": self._at(now_s), "tip": self._tip(keys, stop), "stop": stop}
        if scores is not None:
            row["scores"] = [float(f"{score:.4g}") for score in scores[:stop].tolist()]
        self.add(row)

    def invalidate(self, keys: bytes, start: int, now_s: float) -> None:
        """An invalidation, as far as the file has named the chain's blocks."""
        stop = self._named_of(keys, len(keys) // KEY_NBYTES)
        if start < stop:
            tip = self._tip(keys, stop)
            self.add({"op": "invalidate", "t": self._at(now_s), "tip": tip, "start": start, "stop": stop})

    def move(self, op: str, tier: str, keys: bytes, now_s: float) -> None:
        """Copies came or went, of blocks that the file has named."""
        shorts = (keys[at : at + _SHORT] for at in range(0, len(keys), KEY_NBYTES))
        numbers = [number for short in shorts if (number := self._numbers.get(short)) is not None]
        if numbers:
            self.add({"op": op, "t": self._at(now_s), "tier": tier, "blocks": runs_of(sorted(numbers))})

    # -- names ---------------------------------------------------------------------------------------------------------

    def _at(self, now_s: float) -> float:
        return round(now_s - self._began_s, 6)

    def _namespace(self, digest: bytes, layout: KVLayout) -> int:
        number = self._namespaces.get(digest)
        if number is None:
            number = self._namespaces[digest] = len(self._namespaces)
            row = {"op": "namespace", "ns": number, "block_tokens": layout.block_tokens}
            self.add({**row, "block_nbytes": layout.block_nbytes})
        return number

    def _named_of(self, keys: bytes, stop: int) -> int:
        """How many of the first `stop` blocks of a chain the file has named."""
        numbers = self._numbers
        return named_prefix(lambda at: keys[at * KEY_NBYTES : at * KEY_NBYTES + _SHORT] in numbers, stop)

    def _tip(self, keys: bytes, stop: int) -> int:
        """Number of the last of the first `stop` blocks of a chain; all of them are named from now on."""
        numbers, block = self._numbers, self._sampling.block
        known = self._named_of(keys, stop)
        for start in range(known, stop, _NAMED_A_ROW):
            end = min(start + _NAMED_A_ROW, stop)
            first = len(numbers)
            after = self._number(keys, start - 1)
            for number, at in enumerate(range(start * KEY_NBYTES, end * KEY_NBYTES, KEY_NBYTES), first):
                numbers[keys[at : at + _SHORT]] = number
            ids = [block(keys[at : at + KEY_NBYTES]) for at in range(start * KEY_NBYTES, end * KEY_NBYTES, KEY_NBYTES)]
            self.add({"op": "blocks", "first": first, "after": after, "ids": b"".join(ids).hex()})
        return self._number(keys, stop - 1)

    def _number(self, keys: bytes, index: int) -> int:
        return self._numbers[keys[index * KEY_NBYTES : index * KEY_NBYTES + _SHORT]] if index >= 0 else -1


def how_it_ended(transfer: Transfer) -> Ended:
    """How the blocks of a transfer that is done ended, in order. The word of a hit is the tier's."""
    ended: list[tuple[str, int]] = []
    last: Tier | type | None = None
    count = 0
    for outcome in transfer.outcomes:
        now = outcome.tier if isinstance(outcome, Hit) else type(outcome)
        if now is not last:
            if last is not None:
                ended.append((_word(last), count))
            last, count = now, 0
        count += 1
    if last is not None:
        ended.append((_word(last), count))
    return tuple(ended)


def _word(how: Tier | type) -> str:
    return (how.name if isinstance(how, Tier) else how.__name__).lower()


def _without_last(ended: Ended, blocks: int) -> Ended:
    """The same of fewer blocks."""
    left = sum(count for _, count in ended) - blocks
    kept = []
    for word, count in ended:
        if left > 0:
            kept.append((word, min(count, left)))
        left -= count
    return tuple(kept)


def runs_of(numbers: Iterable[int]) -> list[int]:
    """Numbers as first, count, first, count, ...; a run ascends by one."""
    runs: list[int] = []
    for number in numbers:
        if runs and number == runs[-2] + runs[-1]:
            runs[-1] += 1
        else:
            runs += [number, 1]
    return runs
