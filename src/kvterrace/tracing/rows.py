"""From what a store tells to rows of a trace, in which blocks and sequences have names that lead nowhere."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from typing import Any

import numpy as np

from kvterrace.engine.transfers import Transfer, TransferKind
from kvterrace.keys import KEY_NBYTES, KeyChain, Namespace
from kvterrace.tracing.chains import named_prefix
from kvterrace.tracing.files import line
from kvterrace.types import GetOutcome, Hit, PutOutcome, Tier

__all__ = ["Rows", "Sampling", "runs_of"]

#: Bytes of a block's key that tell it from others within one file: keys are hashes.
_SHORT = 8
#: Blocks that one row names at most.
_NAMED_A_ROW = 1024
_UNNAMED_SEQUENCE = bytes(16)


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

    def takes(self, chain: KeyChain, sequence: bytes) -> bool:
        """Whether this sequence is recorded; where it has no name, its chain's first key stands for it."""
        name = sequence if sequence.strip(b"\0") else chain.key(0)[: len(_UNNAMED_SEQUENCE)]
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

    def transfer(self, transfer: Transfer, ended_s: float) -> None:
        """A get or put of a sampled sequence, or a prefetch of what the file has named."""
        chain, stop = transfer.chain, transfer.stop
        assert chain is not None
        if transfer.start >= stop:
            return
        if transfer.kind is TransferKind.PREFETCH:
            stop = min(stop, self._named_of(chain, stop))
            if transfer.start >= stop:
                return
        elif not self._sampling.takes(chain, transfer.sequence):
            return
        row: dict[str, Any] = {
            "op": transfer.kind.value,
            "t": self._at(transfer.submitted_s),
            "took": round(ended_s - transfer.submitted_s, 6),
            "ns": self._namespace(chain.namespace),
            "tip": self._tip(chain, stop),
            "start": transfer.start,
            "stop": stop,
            "ended": _ended(transfer.outcomes[: stop - transfer.start]),
        }
        if transfer.sequence.strip(b"\0"):
            row["seq"] = self._sampling.sequence(transfer.sequence).hex()
        if transfer.layers is not None:
            row["layers"] = [transfer.layers.start, transfer.layers.stop]
        self.add(row)

    def touch(self, chain: KeyChain, scores: np.ndarray | None, now_s: float) -> None:
        """A touch, as far as the file has named the chain's blocks."""
        if not (stop := self._named_of(chain, len(chain))):
            return
        row: dict[str, Any] = {"op": "touch", "t": self._at(now_s), "tip": self._tip(chain, stop), "stop": stop}
        if scores is not None:
            row["scores"] = [float(f"{score:.4g}") for score in scores[:stop].tolist()]
        self.add(row)

    def invalidate(self, chain: KeyChain, start: int, now_s: float) -> None:
        """An invalidation, as far as the file has named the chain's blocks."""
        stop = self._named_of(chain, len(chain))
        if start < stop:
            tip = self._tip(chain, stop)
            self.add({"op": "invalidate", "t": self._at(now_s), "tip": tip, "start": start, "stop": stop})

    def move(self, op: str, tier: Tier, keys: bytes, now_s: float) -> None:
        """Copies came or went, of blocks that the file has named."""
        shorts = (keys[at : at + _SHORT] for at in range(0, len(keys), KEY_NBYTES))
        numbers = [number for short in shorts if (number := self._numbers.get(short)) is not None]
        if numbers:
            self.add({"op": op, "t": self._at(now_s), "tier": tier.name.lower(), "blocks": runs_of(sorted(numbers))})

    # -- names ---------------------------------------------------------------------------------------------------------

    def _at(self, now_s: float) -> float:
        return round(now_s - self._began_s, 6)

    def _namespace(self, namespace: Namespace) -> int:
        number = self._namespaces.get(namespace.digest)
        if number is None:
            number = self._namespaces[namespace.digest] = len(self._namespaces)
            layout = namespace.layout
            row = {"op": "namespace", "ns": number, "block_tokens": layout.block_tokens}
            self.add({**row, "block_nbytes": layout.block_nbytes})
        return number

    def _named_of(self, chain: KeyChain, stop: int) -> int:
        """How many of the first `stop` blocks of `chain` the file has named."""
        data, numbers = chain.data, self._numbers
        return named_prefix(lambda at: data[at * KEY_NBYTES : at * KEY_NBYTES + _SHORT] in numbers, stop)

    def _tip(self, chain: KeyChain, stop: int) -> int:
        """Number of the last of the first `stop` blocks of `chain`; all of them are named from now on."""
        numbers, data, block = self._numbers, chain.data, self._sampling.block
        known = self._named_of(chain, stop)
        for start in range(known, stop, _NAMED_A_ROW):
            end = min(start + _NAMED_A_ROW, stop)
            first = len(numbers)
            after = self._number(data, start - 1)
            for number, at in enumerate(range(start * KEY_NBYTES, end * KEY_NBYTES, KEY_NBYTES), first):
                numbers[data[at : at + _SHORT]] = number
            ids = [block(data[at : at + KEY_NBYTES]) for at in range(start * KEY_NBYTES, end * KEY_NBYTES, KEY_NBYTES)]
            self.add({"op": "blocks", "first": first, "after": after, "ids": b"".join(ids).hex()})
        return self._number(data, stop - 1)

    def _number(self, data: bytes, index: int) -> int:
        return self._numbers[data[index * KEY_NBYTES : index * KEY_NBYTES + _SHORT]] if index >= 0 else -1


def _ended(outcomes: Iterable[GetOutcome | PutOutcome]) -> list[list[str | int]]:
    """How blocks ended, in order: [word, count], .... The word of a hit is the tier's."""
    ended: list[list[str | int]] = []
    last: str | None = None
    count = 0
    for outcome in outcomes:
        word = outcome.tier.name.lower() if isinstance(outcome, Hit) else type(outcome).__name__.lower()
        if word != last:
            if last is not None:
                ended.append([last, count])
            last, count = word, 0
        count += 1
    if last is not None:
        ended.append([last, count])
    return ended


def runs_of(numbers: Iterable[int]) -> list[int]:
    """Numbers as first, count, first, count, ...; a run ascends by one."""
    runs: list[int] = []
    for number in numbers:
        if runs and number == runs[-2] + runs[-1]:
            runs[-1] += 1
        else:
            runs += [number, 1]
    return runs
