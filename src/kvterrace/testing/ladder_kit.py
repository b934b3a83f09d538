"""What the suite for ladders stands on: the ladder under test, and blocks whose bytes follow from their keys."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from kvterrace.buffers import Bytes
from kvterrace.keys import KeyChain, Namespace, chain_keys
from kvterrace.layout import KVLayout
from kvterrace.store import Store
from kvterrace.types import Busy, GetOutcome, Hit, Present, PutOutcome, Rejected, Stored

__all__ = ["UNTOUCHED", "WAIT_S", "LadderKit", "all_are"]

#: What a caller's buffer holds before a read: shows which bytes were touched.
UNTOUCHED = 0xA5
WAIT_S = 60.0


class LadderKit:
    """What the suite is told of a ladder, and does to it.

    `open_ladder` is called again after the store was closed, within the same test: what is durable must then be there.
    Give the store `DRAM_NBYTES` of DRAM, room for 24 of the suite's blocks, and `LOWER_NBYTES` below that, so that
    blocks do leave DRAM. Class attributes and hooks say what the ladder can do; a test that needs more does nothing.
    """

    #: Whether what `flush` reported as written is there after a restart.
    durable: bool = False
    #: Whether there is a tier below DRAM. Then no block that was accepted is lost while that has room.
    has_lower_tier: bool = False

    LAYOUT = KVLayout(layers=3, kv_heads=2, head_dim=24, dtype="float16", block_tokens=16)
    RECORD_NBYTES = 16384  # 9,216 B of payload in three pages, and a header
    DRAM_NBYTES = 24 * RECORD_NBYTES
    LOWER_NBYTES = 512 * RECORD_NBYTES

    # Hooks

    def open_ladder(self) -> Store:
        """Open the ladder under test, as it was left by the last `close`, or new."""
        raise NotImplementedError("say how to open the ladder under test")

    def damage(self, key: bytes) -> bool:
        """While the store is closed, change bytes of what the lower tier holds of the block `key`; False: cannot."""
        del key
        return False

    def stall(self) -> AbstractContextManager[None] | None:
        """While it is entered, reads from the lower tier do not end; afterwards they do. None: cannot."""
        return None

    def setup_method(self) -> None:
        """Open the ladder."""
        self.store = self.open_ladder()

    def teardown_method(self) -> None:
        """Close it."""
        self.store.close()

    # Tools

    def chain(self, name: int, blocks: int, **namespace: Any) -> KeyChain:
        """Keys of `blocks` blocks; two names share no block."""
        tokens = np.random.default_rng(name).integers(0, 50_000, blocks * self.LAYOUT.block_tokens)
        return chain_keys(Namespace("conformance", self.LAYOUT, **namespace), tokens)

    def content(self, chain: KeyChain, start: int = 0, stop: int | None = None) -> Bytes:
        """The one right content of blocks of `chain`, shape `(blocks, block_nbytes)`: it follows from their keys."""
        keys = list(chain)[start:stop]
        blocks = [
            np.random.default_rng(list(key)).integers(0, 256, self.LAYOUT.block_nbytes, dtype=np.uint8) for key in keys
        ]
        return np.stack(blocks) if blocks else np.zeros((0, self.LAYOUT.block_nbytes), np.uint8)

    def put(self, chain: KeyChain, start: int = 0, stop: int | None = None, **options: Any) -> list[PutOutcome]:
        """Put blocks with their content, and wait."""
        transfer = self.store.put(chain, self.content(chain, start, stop), start=start, stop=stop, **options)
        outcomes = self.store.wait(transfer, WAIT_S)
        assert transfer.done, f"{transfer} did not end in {WAIT_S} s"
        assert all(isinstance(one, (Stored, Present, Busy, Rejected)) for one in outcomes)
        return outcomes  # type: ignore[return-value] # just asserted

    def get(self, chain: KeyChain, start: int = 0, stop: int | None = None, **options: Any) -> list[GetOutcome]:
        """Get blocks and wait. Checks what holds for every read: one outcome for each block, the right bytes for a Hit,
        and an untouched buffer for anything else.
        """
        right = self.content(chain, start, stop)
        out = np.full_like(right, UNTOUCHED)
        transfer = self.store.get(chain, out, start=start, stop=stop, **options)
        outcomes = self.store.wait(transfer, WAIT_S)
        assert transfer.done, f"{transfer} did not end in {WAIT_S} s"
        assert len(outcomes) == len(right)
        for number, outcome in enumerate(outcomes):
            if isinstance(outcome, Hit):
                assert np.array_equal(out[number], right[number]), f"block {start + number} came back wrong"
            else:
                assert (out[number] == UNTOUCHED).all(), f"block {start + number}: {outcome}, and its buffer touched"
        return outcomes  # type: ignore[return-value] # of a get

    def restart(self) -> None:
        """Flush, close, open again."""
        assert self.store.flush(WAIT_S), "flush reports that not all was written"
        assert self.store.close(), "close reports that not all was written or ended"
        self.store = self.open_ladder()


def all_are(outcomes: Iterable[object], kind: Any) -> bool:
    """Whether every outcome is of `kind`."""
    return all(isinstance(one, kind) for one in outcomes)
