"""The native passes and the Python path, side by side: the same verdicts in the same words, and the same memory."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.native_twins import (
    BLOCKS,
    FIELDS,
    Form,
    Twins,
    caller,
    chain_for,
    copy_both,
    memories,
    random_bytes,
    record_of,
    renew_crc,
)

from kvterrace.buffers import BlockBuffers, Bytes
from kvterrace.engine.core import NamespaceEntry
from kvterrace.engine.filler import _Fill, _fill
from kvterrace.engine.transfers import Transfer, TransferKind
from kvterrace.format.record import part_table
from kvterrace.io.base import IoClass, IoKind, IoRequest, IoResult
from kvterrace.layout import KVLayout
from kvterrace.types import Hit, Tier

native: Any = pytest.importorskip("kvterrace._native", reason="the native module is not built")

MANY = settings(max_examples=200, deadline=None)
DONE = IoResult(IoRequest(IoKind.CALL, IoClass.DEMAND))

layouts = st.builds(
    KVLayout,
    layers=st.integers(1, 4),
    kv_heads=st.integers(1, 3),
    head_dim=st.sampled_from([1, 3, 8, 64, 200]),
    dtype=st.sampled_from(["uint8", "float16", "float32", "float64"]),
    block_tokens=st.integers(1, 5),
    value_head_dim=st.sampled_from([0, 0, 5]),
) | st.builds(
    KVLayout,  # large enough to go past the cache, with runs of 4 KiB and more
    layers=st.integers(1, 2),
    kv_heads=st.just(2),
    head_dim=st.sampled_from([510, 512]),
    dtype=st.just("float32"),
    block_tokens=st.integers(32, 40),
)
signs = st.sampled_from([1, 1, 1, -1])
forms = st.builds(
    Form,
    kind=st.sampled_from(["flat", "parts", "joined"]),
    axes=st.permutations(range(4)).map(tuple) | st.just((0, 1, 2, 3)),
    gaps=st.tuples(*[st.sampled_from([0, 0, 1, 3])] * 4),
    steps=st.tuples(signs, signs, signs, signs),
    as_bytes=st.booleans(),
    joined_at=st.integers(0, 3),
)


@st.composite
def reads(draw: st.DrawFn) -> Twins:
    layout = draw(layouts)
    layers = None
    if draw(st.booleans()):
        start = draw(st.integers(0, layout.layers - 1))
        layers = range(start, draw(st.integers(start + 1, layout.layers)))
    return Twins(chain_for(layout), draw(forms), layers, draw(st.sampled_from([False, False, False, True])))


@st.composite
def damage(draw: st.DrawFn, memory: Bytes, parts: int) -> None:
    """Nothing, a flipped bit, or a field that is another while the header's CRC is right; up to three of these."""
    for _ in range(draw(st.integers(0, 3))):
        match draw(st.sampled_from(["flip", "field", "field", "part", "part"])):
            case "flip":
                memory[draw(st.integers(0, memory.nbytes - 1))] ^= 1 << draw(st.integers(0, 7))
                continue
            case "field":
                at, nbytes = FIELDS[draw(st.sampled_from(sorted(FIELDS)))]
            case _:
                at, nbytes = 208 + 4 * draw(st.integers(0, 4 * parts - 1)), 4
        old = int.from_bytes(memory[at : at + nbytes].tobytes(), "little")
        new = draw(
            st.sampled_from([0, 1, 2, 4096, 8192, old + 1, old - 1, old + 4096, 2 * old, 2 ** (8 * nbytes) - 1])
            | st.integers(0, 2 ** (8 * nbytes) - 1)
        ) % 2 ** (8 * nbytes)
        memory[at : at + nbytes] = np.frombuffer(new.to_bytes(nbytes, "little"), np.uint8)
        renew_crc(memory)


@MANY
@given(st.data(), reads())
def test_reads(data: st.DataObject, twins: Twins) -> None:
    indexes = data.draw(st.lists(st.integers(0, BLOCKS - 1), min_size=1, max_size=BLOCKS, unique=True))
    records = {}
    for index in indexes:
        memory = twins.landed(record_of(twins.chain, index))
        data.draw(damage(memory, twins.layout.parts))
        if data.draw(st.integers(0, 9)) == 0:
            memory = memory[: data.draw(st.integers(0, memory.nbytes))].copy()
        records[index] = memory
    wanted = sum(memory.nbytes for memory in records.values())
    moved = wanted if data.draw(st.integers(0, 3)) else data.draw(st.integers(0, wanted))
    error = data.draw(st.sampled_from([None] * 9 + [OSError(5, "no")]))
    taken = data.draw(st.dictionaries(st.integers(0, BLOCKS - 1), st.sampled_from(["settled", "copying"]), max_size=1))
    before = memories(twins.native_wholes)
    expected, found, copied, native_copied = twins.read(native, records, moved=moved, error=error, taken=taken)
    assert found == expected
    assert native_copied == copied
    assert memories(twins.native_wholes) == memories(twins.wholes)
    for index, outcome, was_copied in zip(records, found, native_copied, strict=True):
        assert was_copied == (isinstance(outcome, Hit) and index not in taken and not twins.promote_only)
    if not any(native_copied):
        assert memories(twins.native_wholes) == before


@MANY
@given(layouts, forms)
def test_copies_from_slots(layout: KVLayout, form: Form) -> None:
    twins = Twins(chain_for(layout), form)
    copy_both(twins, native, {index: record_of(twins.chain, index) for index in (2, 0)})
    assert memories(twins.native_wholes) == memories(twins.wholes)


@MANY
@given(layouts, forms, st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1), st.binary(min_size=16, max_size=16))
def test_puts(layout: KVLayout, form: Form, put_seq: int, created_unix_ns: int, sequence: bytes) -> None:
    twins = Twins(chain_for(layout, epoch=2**32 - 1), form)
    shape, places, claims = twins.native_side(native)
    transfer = Transfer(
        TransferKind.PUT, twins.chain, 0, BLOCKS,
        buffers=twins.buffers, submitted_s=0.0, deadline_s=None, sequence=sequence,
    )  # fmt: skip
    space = twins.chain.namespace
    entry = NamespaceEntry(space.digest, space.epoch, twins.geometry, part_table(layout.part_nbytes), space)
    slots = [random_bytes(twins.geometry.record_nbytes, seed=index) for index in range(BLOCKS)]
    fills = [_Fill(transfer, i, 0, slot.copy(), entry, put_seq, created_unix_ns) for i, slot in enumerate(slots)]
    items = [
        native.Fill(
            slot, shape, twins.chain.key(index), twins.chain.key(index - 1), index, sequence, put_seq, created_unix_ns,
            places=places, block=index, claims=claims, claim=index,
        )
        for index, slot in enumerate(slots)
    ]  # fmt: skip
    transfer.settle(1, Hit(Tier.DRAM))  # given up meanwhile
    claims.settle(1)
    untouched = slots[1].copy()
    for fill in fills:
        _fill(fill)
    native.FillHook(items)(DONE)
    assert [item.done for item in items] == [fill.done for fill in fills] == [True, False, True]
    for fill, slot in zip(fills, slots, strict=True):
        assert slot.tobytes() == fill.slot.tobytes()
    assert np.array_equal(slots[1], untouched)
    for index in (0, 2):
        claims.settle(index)  # the copies have ended


@MANY
@given(layouts, forms, st.data())
def test_what_is_put_is_what_is_read(layout: KVLayout, form: Form, data: st.DataObject) -> None:
    """Without the Python path: a caller's blocks go into slots, and from there into another caller's memory."""
    twins = Twins(chain_for(layout), form)
    shape, places, claims = twins.native_side(native)
    slot = random_bytes(twins.geometry.record_nbytes)
    item = native.Fill(
        slot, shape, twins.chain.key(1), twins.chain.key(0), 1, bytes(16), 5, 6,
        places=places, block=1, claims=claims, claim=1,
    )  # fmt: skip
    native.FillHook([item])(DONE)
    other = data.draw(forms)
    _, source = caller(other, layout, None, 77)
    buffers = BlockBuffers(layout, source, BLOCKS).require_writable()
    landing = native.Landing(
        slot, shape, twins.chain.key(1), 5, bytes(16), 0,
        places=native.Places(buffers.pieces, list(layout.part_nbytes), 0, buffers), block=2,
        claims=native.Claims(3), claim=2,
    )  # fmt: skip
    hook = native.ReadHook([landing])
    hook(IoResult(IoRequest(IoKind.READ, IoClass.DEMAND), slot.nbytes))
    assert landing.copied, landing.fault
    for part, nbytes in enumerate(layout.part_nbytes):
        put, got = np.zeros(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
        twins.buffers.copy_in(1, part, put)
        buffers.copy_in(2, part, got)
        assert np.array_equal(put, got)


@given(st.binary(max_size=9000), st.booleans())
def test_any_bytes(tail: bytes, whole: bool) -> None:
    """Bytes that are no record at all, or only begin as one."""
    twins = Twins(chain_for(KVLayout(layers=1, kv_heads=1, head_dim=8, dtype="float16", block_tokens=2)))
    memory = np.frombuffer(tail, np.uint8).copy()
    if whole and memory.nbytes >= 208:
        memory[:24] = np.frombuffer(struct.pack("<8sHHIIHH", b"KVTRECRD", 1, 1, 4096, 0, 0, 0), np.uint8)
        renew_crc(memory)
    expected, found, _, copied = twins.read(native, {0: memory})
    assert found == expected
    assert copied == [False]
