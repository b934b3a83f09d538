"""The native passes against the Python path, in CPU seconds of one thread: medians of interleaved rounds.

    python benchmarks/micro_passes.py [--rounds 15] [--blocks 64]

Each row does the same work in both ways on the same memory, block after block through more memory than the caches hold.
Blocks have 2 MiB in 32 parts of 64 KiB; the caller has one contiguous buffer, or an engine's rows of 256 B.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import crc32c
import numpy as np

from kvterrace.buffers import BlockBuffers, Bytes
from kvterrace.engine.core import NamespaceEntry
from kvterrace.engine.filler import _Fill, _fill
from kvterrace.engine.landing import Copy, Landing, Want, finish_read, scatter_all
from kvterrace.engine.ledger import Geometry
from kvterrace.engine.transfers import Transfer, TransferKind
from kvterrace.format import passes
from kvterrace.format.record import part_table, place
from kvterrace.io.base import IoClass, IoKind, IoRequest, IoResult
from kvterrace.keys import Namespace, chain_keys
from kvterrace.layout import KVLayout

#: 32 parts of 64 KiB: 16 layers, K and V of 8 heads x 32 tokens x 128 of two bytes.
LAYOUT = KVLayout(layers=16, kv_heads=8, head_dim=128, dtype="float16", block_tokens=32)
NONCE = bytes(range(16))
Work = Callable[[], object]


def compare(name: str, nbytes: int, rounds: int, ways: dict[str, Work], before: Work = lambda: None) -> None:
    """Print bytes a CPU second of each way; the last is compared with the first."""
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, work in ways.items():
            before()
            start = time.thread_time()
            work()
            seconds[way].append(time.thread_time() - start)
    rates = {way: nbytes / statistics.median(times) / 1e9 for way, times in seconds.items()}
    first, *_, last = rates.values()
    row = "  ".join(f"{way} {rate:6.2f}" for way, rate in rates.items())
    print(f"{name:34} {row}  GB/s of CPU  ({last / first:.2f}x)")


class Bench:
    """`blocks` blocks: a caller's memory, the slots, and both ways between them."""

    def __init__(self, native: Any, blocks: int, *, source: Any) -> None:
        self.native, self.blocks = native, blocks
        self.chain = chain_keys(Namespace("bench", LAYOUT), np.arange(blocks * LAYOUT.block_tokens) % 1000)
        sizes = LAYOUT.part_nbytes
        self.geometry = Geometry(4096, sum(sizes))
        space = self.chain.namespace
        self.entry = NamespaceEntry(space.digest, space.epoch, self.geometry, part_table(sizes), space)
        self.buffers = BlockBuffers(LAYOUT, source, blocks).require_writable()
        self.shape = native.RecordShape(space.digest, space.epoch, 4096, sum(sizes), list(sizes))
        self.places = native.Places(self.buffers.pieces, list(sizes), 0, self.buffers)
        self.arena = np.zeros((blocks, self.geometry.record_nbytes), np.uint8)
        self.nbytes = blocks * sum(sizes)
        self.renew()

    def renew(self) -> None:
        """Nothing is claimed yet."""
        self.transfer = Transfer(
            TransferKind.GET, self.chain, 0, self.blocks, buffers=self.buffers, submitted_s=0.0, deadline_s=None,
            sequence=bytes(16),
        )  # fmt: skip
        self.claims = self.native.Claims(self.blocks)

    def done(self, slots: list[Bytes]) -> IoResult:
        request = IoRequest(IoKind.READ, IoClass.DEMAND, None, 0, slots)
        return IoResult(request, sum(slot.nbytes for slot in slots))

    def put(self) -> None:
        for index in range(self.blocks):
            _fill(_Fill(self.transfer, index, 0, self.arena[index], self.entry, 7, 1))

    def put_native(self) -> None:
        chain = self.chain
        for index in range(self.blocks):
            item = self.native.Fill(
                self.arena[index], self.shape, chain.key(index), chain.key(index - 1), index, bytes(16), 7, 1,
                places=self.places, block=index, claims=self.claims, claim=index,
            )  # fmt: skip
            self.native.FillHook([item])(self.done([]))
            assert item.done

    def place_all(self) -> None:
        for index in range(self.blocks):
            place(self.arena[index], NONCE, index * 4096)

    def read(self) -> None:
        for index in range(self.blocks):
            nowhere: Any = None
            slot = self.arena[index]
            key, at = self.chain.key(index), index * 4096
            one = Landing(Want(self.transfer, index, 0), slot, nowhere, nowhere, at, NONCE, key, self.entry, 7)
            finish_read([one], self.done([slot]))

    def read_native(self) -> None:
        for index in range(self.blocks):
            slot = self.arena[index]
            one = self.native.Landing(
                slot, self.shape, self.chain.key(index), 7, NONCE, index * 4096,
                places=self.places, block=index, claims=self.claims, claim=index,
            )  # fmt: skip
            self.native.ReadHook([one])(self.done([slot]))
            assert one.copied

    def copy(self) -> None:
        for index in range(self.blocks):
            scatter_all([Copy(Want(self.transfer, index, 0), self.arena[index], self.entry)], self.done([]))

    def copy_native(self) -> None:
        for index in range(self.blocks):
            one = self.native.Copy(
                self.arena[index], self.shape, places=self.places, block=index, claims=self.claims, claim=index
            )
            self.native.CopyHook([one])(self.done([]))

    def run(self, what: str, rounds: int) -> None:
        compare(f"put, {what}", self.nbytes, rounds, {"Python": self.put, "native": self.put_native}, self.renew)
        self.place_all()
        compare(f"read, {what}", self.nbytes, rounds, {"Python": self.read, "native": self.read_native}, self.renew)
        compare(f"copy, {what}", self.nbytes, rounds, {"Python": self.copy, "native": self.copy_native}, self.renew)


def rows(blocks: int) -> list[np.ndarray]:
    """An engine's cache: `(heads, tokens of all blocks, dim)` for each part, seen block by block."""
    caches = [np.zeros((8, blocks * 32, 128), np.uint16) for _ in range(LAYOUT.parts)]
    return [cache.reshape(8, blocks, 32, 128).transpose(1, 0, 2, 3) for cache in caches]


def tokens_first(blocks: int) -> list[np.ndarray]:
    """The same with tokens before heads: nothing longer than 256 B is contiguous."""
    caches = [np.zeros((blocks * 32, 8, 128), np.uint16) for _ in range(LAYOUT.parts)]
    return [cache.reshape(blocks, 32, 8, 128).transpose(0, 2, 1, 3) for cache in caches]


def sum_all(crc: Callable[[Bytes], int], pieces: Iterable[Bytes]) -> None:
    for piece in pieces:
        crc(piece)


def sums(native: Any, blocks: int, rounds: int) -> None:
    data = np.random.default_rng(0).integers(0, 256, (blocks, LAYOUT.block_nbytes), dtype=np.uint8)
    target = np.zeros_like(data)
    for name, nbytes, times in (("16 KiB in cache", 16 << 10, 4000), ("64 KiB in cache", 64 << 10, 1000)):
        pieces = [data[0, :nbytes]] * times
        compare(
            f"CRC, {name}", nbytes * times, rounds,
            {
                "package": partial(sum_all, lambda piece: crc32c.crc32c(piece.data), pieces),
                "native": partial(sum_all, native.crc32c, pieces),
            },
        )  # fmt: skip
    compare(
        "CRC, blocks in memory", data.nbytes, rounds,
        {
            "package": partial(sum_all, lambda block: crc32c.crc32c(block.data), data),
            "native": partial(sum_all, native.crc32c, data),
        },
    )  # fmt: skip

    def copy_then_sum() -> None:
        for block, to in zip(data, target, strict=True):
            to[:] = block
            crc32c.crc32c(to.data)

    compare(
        "copy and CRC, blocks in memory", data.nbytes, rounds,
        {
            "copy, package": copy_then_sum,
            "through cache": lambda: [native.copy_crc32c(to, block) for block, to in zip(data, target, strict=True)],
            "past it": lambda: [native.stream_crc32c(to, block) for block, to in zip(data, target, strict=True)],
        },
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--blocks", type=int, default=64)
    args = parser.parse_args()
    native = passes.native()
    if native is None:
        raise SystemExit("the native module is not built")
    print(f"CRC32C runs on {native.crc32c_kernel()}; {args.blocks} blocks of 2 MiB; medians of {args.rounds} rounds")
    sums(native, args.blocks, args.rounds)
    one = np.zeros(args.blocks * LAYOUT.block_nbytes, np.uint8)
    Bench(native, args.blocks, source=one).run("one buffer", args.rounds)
    Bench(native, args.blocks, source=rows(args.blocks)).run("rows of 8 KiB", args.rounds)
    Bench(native, args.blocks, source=tokens_first(args.blocks)).run("rows of 256 B", args.rounds)


if __name__ == "__main__":
    main()
