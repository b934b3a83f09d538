"""The native hooks, case by case: every refusal in its words, and a caller's memory that only right blocks reach."""

from __future__ import annotations

import errno
import gc
import itertools
import struct
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.native_twins import (
    BLOCKS,
    FIELDS,
    NONCE,
    OFFSET,
    PUT_SEQ,
    WHERE,
    Form,
    Twins,
    chain_for,
    memories,
    native_outcome,
    random_bytes,
    record_of,
    renew_crc,
)

from kvterrace.buffers import BlockBuffers, Bytes
from kvterrace.format import record as rec
from kvterrace.format.passes import Landed, Reason, check_layout
from kvterrace.io.base import IoClass, IoKind, IoRequest, IoResult
from kvterrace.layout import KVLayout
from kvterrace.types import Corrupt, DeviceFailed, Hit, Stale, Tier

native: Any = pytest.importorskip("kvterrace._native", reason="the native module is not built")

#: Four parts of 64 B, of 49,152 B, and of 131,072 B: only the last go past the cache.
SMALL = KVLayout(layers=2, kv_heads=1, head_dim=8, dtype="float16", block_tokens=4)
MEDIUM = KVLayout(layers=2, kv_heads=4, head_dim=128, dtype="float16", block_tokens=48)
LARGE = KVLayout(layers=2, kv_heads=4, head_dim=128, dtype="float16", block_tokens=128)
HIT = Hit(Tier.SSD)


def done(nbytes: int = 0, error: OSError | None = None) -> IoResult:
    return IoResult(IoRequest(IoKind.CALL, IoClass.DEMAND), nbytes, error)


def patch(**values: int | bytes) -> Callable[[Bytes], None]:
    """Set fields of a header, or words of its part table (`word_<number>`); the CRC is right again after it."""

    def damage(record: Bytes) -> None:
        for name, value in values.items():
            at, nbytes = (208 + 4 * int(name[5:]), 4) if name.startswith("word_") else FIELDS[name]
            data = value if isinstance(value, bytes) else value.to_bytes(nbytes, "little")
            record[at : at + nbytes] = np.frombuffer(data, np.uint8)
        renew_crc(record)

    return damage


def tombstone(record: Bytes) -> None:
    rec.encode_tombstone(bytes(256), record, put_seq=PUT_SEQ, namespace=chain_for(SMALL).namespace.digest, epoch=3)
    rec.place(record, NONCE, OFFSET)


def flip(at: int) -> Callable[[Bytes], None]:
    def damage(record: Bytes) -> None:
        record[at] ^= 1

    return damage


CHAIN = chain_for(SMALL)
FF = b"\xff" * 32
#: What is done to a record of SMALL (8,192 B, payload from 4,096 on), and what is said of it.
REFUSALS: dict[str, tuple[Callable[[Bytes], None], type, str]] = {
    "magic": (patch(magic=b"KVTRECRE"), Corrupt, "no record begins here"),
    "length 0": (patch(header_nbytes=0), Corrupt, "impossible header length 0"),
    "length, no pages": (patch(header_nbytes=4097), Corrupt, "impossible header length 4097"),
    "length, too long": (patch(header_nbytes=20 * 4096), Corrupt, "impossible header length 81920"),
    "length, cut": (patch(header_nbytes=3 * 4096), Corrupt, "a header of 12288 B is cut at 8192 B"),
    "crc": (flip(4095), Corrupt, "header CRC does not match"),
    "version": (patch(format_version=2), Corrupt, "record of format version 2, this build reads 1"),
    "kind": (patch(kind=3), Corrupt, "unknown kind 3 or flags 0x0"),
    "flags": (patch(flags=255), Corrupt, "unknown kind 1 or flags 0xff"),
    "entry": (patch(part_entry_nbytes=20), Corrupt, "4 parts of 20 B do not fit a header of 4096 B"),
    "no parts": (patch(parts=0), Corrupt, "0 parts of 16 B do not fit a header of 4096 B"),
    "parts": (patch(parts=244), Corrupt, "244 parts of 16 B do not fit a header of 4096 B"),
    "parts, too many": (patch(parts=4097), Corrupt, "4097 parts of 16 B do not fit a header of 4096 B"),
    "offset": (patch(offset=OFFSET + 1), Corrupt, f"offset {OFFSET + 1} is not on a page boundary"),
    "payload": (patch(payload_nbytes=2**32), Corrupt, "4 parts in a payload of 4294967296 B"),
    "leaves": (patch(word_13=65), Corrupt, "the part table overlaps itself or leaves the payload of 256 B"),
    "overlaps": (patch(word_1=65), Corrupt, "the part table overlaps itself or leaves the payload of 256 B"),
    "descends": (patch(word_4=2**32 - 1), Corrupt, "the part table overlaps itself or leaves the payload of 256 B"),
    "raw": (patch(raw_nbytes=255), Corrupt, "parts decode to 256 B, the header says 255 B"),
    "tombstone": (patch(kind=2), Corrupt, "a tombstone cannot have 4 parts and 256 B"),
    "layout, less": (
        patch(payload_nbytes=257), Corrupt, "a record of 257 B in 4 parts, of another layout",
    ),
    "layout, parts": (
        patch(parts=3, raw_nbytes=192), Corrupt, "a record of 256 B in 3 parts, of another layout",
    ),
    "nonce": (
        patch(segment_nonce=FF[:16]), Stale, f"segment nonce is {'ff' * 16}, expected {bytes(range(16)).hex()}",
    ),
    "place": (patch(offset=4096), Corrupt, f"record belongs at 4096, found at {OFFSET}"),
    "no block": (tombstone, Stale, "found a tombstone, expected a block"),
    "key": (patch(key=FF), Stale, f"key is {'ff' * 32}, expected {CHAIN.key(1).hex()}"),
    "namespace": (
        patch(namespace=FF), Stale, f"namespace is {'ff' * 32}, expected {CHAIN.namespace.digest.hex()}",
    ),
    "epoch": (patch(epoch=4), Stale, "epoch is 4, expected 3"),
    "put_seq": (patch(put_seq=2**64 - 1), Stale, f"put_seq is {2**64 - 1}, expected {PUT_SEQ}"),
    "codec": (patch(codec=1), Corrupt, "codec 1 is not one that this build decodes"),
    "part, short": (patch(word_5=63), Corrupt, "part 1 at 64+63, decoding to 64 B, is of another layout"),
    "part, decoded": (
        patch(word_7=66, raw_nbytes=258), Corrupt, "part 1 at 64+64, decoding to 66 B, is of another layout",
    ),
    "payload, first": (flip(4096), Corrupt, "part 0: CRC is "),
    "payload, last": (flip(4096 + 255), Corrupt, "part 3: CRC is "),
}  # fmt: skip


@pytest.mark.parametrize(("damage", "kind", "reason"), REFUSALS.values(), ids=REFUSALS.keys())
def test_a_refusal_in_its_words(damage: Callable[[Bytes], None], kind: type, reason: str) -> None:
    twins = Twins(CHAIN)
    records = {index: record_of(CHAIN, index) for index in range(BLOCKS)}
    damage(records[1])
    before = memories(twins.native_wholes)
    expected, found, _, copied = twins.read(native, records)
    assert found == expected
    assert (found[0], found[2], copied) == (HIT, HIT, [True, False, True])
    refused = found[1]
    assert isinstance(refused, Corrupt | Stale) and isinstance(refused, kind)
    assert refused.where == WHERE and refused.reason.startswith(reason)
    part = slice(256, 512)
    assert memories(twins.native_wholes)[0][part] == before[0][part]


def test_every_reason_is_in_this_table_or_below() -> None:
    """`TOO_SHORT` and `PART_OUTSIDE` are refused of cut memory, `NO_PART` of a range that the record lacks."""
    seen = set()
    for damage, _, _ in REFUSALS.values():
        record = record_of(CHAIN, 1)
        damage(record)
        seen.add(Reason(one_landing(record).fault[0]))
    assert set(Reason) - seen == {Reason.NONE, Reason.TOO_SHORT, Reason.PART_OUTSIDE, Reason.NO_PART}


def shape_of(layout: KVLayout, part_nbytes: list[int] | None = None) -> Any:
    sizes = layout.part_nbytes
    space = chain_for(layout).namespace
    return native.RecordShape(
        space.digest, space.epoch, rec.header_nbytes_for(len(sizes)), sum(sizes),
        list(sizes) if part_nbytes is None else part_nbytes,
    )  # fmt: skip


def one_landing(memory: Bytes, **more: Any) -> Any:
    """Block 1 of SMALL, verified as if all of `memory` had arrived."""
    landing = native.Landing(memory, shape_of(SMALL), CHAIN.key(1), PUT_SEQ, NONCE, OFFSET, **more)
    native.ReadHook([landing])(done(memory.nbytes))
    return landing


def test_every_bit_of_a_header_counts() -> None:
    """Each byte of the header page flipped: never a hit, and said as the Python path says it."""
    twins = Twins(CHAIN)
    good = record_of(CHAIN, 1)
    before = memories(twins.native_wholes)
    for at in range(4096):
        record = good.copy()
        record[at] ^= 1 << (at % 8)
        expected, found, _, copied = twins.read(native, {1: record})
        assert found == expected and isinstance(found[0], Corrupt) and copied == [False], at
    assert memories(twins.native_wholes) == before


def test_every_byte_of_a_payload_counts_and_no_byte_of_its_padding() -> None:
    good = record_of(CHAIN, 1)
    for at in range(4096, 8192):
        record = good.copy()
        record[at] ^= 0x80
        landing = one_landing(record)
        if at < 4096 + 256:
            assert landing.landed == Landed.BAD and landing.fault[1][0] == (at - 4096) // 64, at
        else:
            assert landing.landed == Landed.RIGHT, at


@pytest.mark.parametrize("nbytes", [0, 1, 207, 208, 4095, 4096, 4097, 4096 + 63, 4096 + 255])
def test_memory_that_is_cut(nbytes: int) -> None:
    twins = Twins(CHAIN)
    expected, found, _, copied = twins.read(native, {1: record_of(CHAIN, 1)[:nbytes].copy()})
    assert found == expected and copied == [False]
    words = "too short" if nbytes < 208 else "is cut at" if nbytes < 4096 else "is not in the"
    assert isinstance(found[0], Corrupt) and words in found[0].reason


@given(st.data())
def test_a_payload_in_runs_is_judged_as_one_in_a_piece(data: st.DataObject) -> None:
    """Wherever it is cut, and whatever is wrong with it."""
    record = record_of(CHAIN, 1)[: 4096 + 256].copy()
    if data.draw(st.booleans(), label="harmed"):
        record[data.draw(st.integers(0, len(record) - 1), label="at")] ^= 1 << data.draw(st.integers(0, 7))
    cuts = sorted(data.draw(st.lists(st.integers(0, 256), max_size=5), label="cuts"))
    runs = [record[4096 + a : 4096 + b].copy() for a, b in itertools.pairwise([0, *cuts, 256])]
    whole = one_landing(record)
    parted = native.Landing(record[:4096].copy(), shape_of(SMALL), CHAIN.key(1), PUT_SEQ, NONCE, OFFSET, runs=runs)
    native.ReadHook([parted])(done(4096 + 256))
    assert (parted.landed, parted.fault) == (whole.landed, whole.fault)
    assert parted.copied == (parted.landed == Landed.RIGHT)


def test_a_payload_in_runs_that_did_not_arrive_whole_is_missing() -> None:
    record = record_of(CHAIN, 1)
    for nbytes, landed in ((4096, Landed.MISSING), (4096 + 255, Landed.MISSING), (4096 + 256, Landed.RIGHT)):
        runs = [record[4096 : 4096 + 100].copy(), record[4096 + 100 : 4096 + 256].copy()]
        one = native.Landing(record[:4096].copy(), shape_of(SMALL), CHAIN.key(1), PUT_SEQ, NONCE, OFFSET, runs=runs)
        native.ReadHook([one])(done(nbytes))
        assert one.landed == landed, nbytes


@pytest.mark.parametrize(
    ("header_nbytes", "run_nbytes", "more"),
    [(4096, 255, {}), (4096, 257, {}), (8192, 256, {}), (4096, 256, {"parts": (0, 1)}), (4096, 256, {"base": 64})],
)
def test_runs_that_are_not_the_payload_are_refused(header_nbytes: int, run_nbytes: int, more: dict[str, Any]) -> None:
    header, run = np.zeros(header_nbytes, np.uint8), np.zeros(run_nbytes, np.uint8)
    with pytest.raises(ValueError, match="the whole payload"):
        native.Landing(header, shape_of(SMALL), CHAIN.key(1), PUT_SEQ, NONCE, OFFSET, runs=[run], **more)


def test_a_part_that_the_record_lacks() -> None:
    landing = native.Landing(
        record_of(CHAIN, 1), shape_of(SMALL, []), CHAIN.key(1), PUT_SEQ, NONCE, OFFSET, parts=(3, 5)
    )
    native.VerifyHook([landing])(done())
    assert landing.landed == Landed.BAD
    assert landing.fault[0] == Reason.NO_PART and landing.fault[1][:2] == (4, 4)


# -- what arrives ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("moved", "error", "right"),
    [
        (3 * 8192, None, [True, True, True]),
        (3 * 8192 - 1, None, [True, True, False]),
        (2 * 8192, None, [True, True, False]),
        (8191, None, [False, False, False]),
        (0, None, [False, False, False]),
        (3 * 8192, OSError(errno.EIO, "gone"), [False, False, False]),
        (3 * 8192, OSError("no number"), [False, False, False]),
    ],
)
def test_records_of_a_read_that_is_short_or_fails(moved: int, error: OSError | None, right: list[bool]) -> None:
    twins = Twins(CHAIN)
    before = memories(twins.native_wholes)[0]
    records = {index: record_of(CHAIN, index) for index in range(BLOCKS)}
    expected, found, _, copied = twins.read(native, records, moved=moved, error=error)
    assert found == expected
    assert [one == HIT for one in found] == copied == right
    assert all(isinstance(one, DeviceFailed) for one, was in zip(found, right, strict=True) if not was)
    after = memories(twins.native_wholes)[0]
    for index, was in enumerate(right):
        part = slice(256 * index, 256 * (index + 1))
        assert after[part] == (records[index][4096 : 4096 + 256].tobytes() if was else before[part])


def test_a_landing_that_is_read_again_forgets_the_first_verdict() -> None:
    twins = Twins(CHAIN)
    shape, places, claims = twins.native_side(native)
    record = record_of(CHAIN, 0)
    landing = native.Landing(
        record, shape, CHAIN.key(0), PUT_SEQ, NONCE, OFFSET, places=places, block=0, claims=claims, claim=0
    )
    native.ReadHook([landing])(done(4096))
    assert landing.landed == Landed.MISSING and not landing.copied
    record[100] ^= 1
    native.ReadHook([landing])(done(8192))
    assert landing.landed == Landed.BAD
    record[100] ^= 1
    again = native.ReadHook([landing])
    assert (landing.landed, landing.fault[0]) == (Landed.UNSEEN, Reason.NONE)
    again(done(8192))
    assert landing.landed == Landed.RIGHT and landing.copied
    assert claims.settle(0)


# -- whose memory ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("state", ["settled", "copying"])
def test_a_block_that_is_settled_or_being_copied_is_not_written(layout: KVLayout, state: str) -> None:
    chain = chain_for(layout)
    twins = Twins(chain)
    before = memories(twins.native_wholes)[0]
    records = {index: record_of(chain, index) for index in range(BLOCKS)}
    _, found, _, copied = twins.read(native, records, taken={1: state})
    assert found == [HIT] * 3 and copied == [True, False, True]
    after, size = memories(twins.native_wholes)[0], layout.block_nbytes
    start = rec.header_nbytes_for(layout.parts)
    assert after[size : 2 * size] == before[size : 2 * size]
    for index in (0, 2):
        assert after[index * size : (index + 1) * size] == records[index][start : start + size].tobytes()


@pytest.mark.parametrize("layout", [SMALL, LARGE], ids=["small", "large"])
def test_one_wrong_part_leaves_the_whole_block_unwritten(layout: KVLayout) -> None:
    chain = chain_for(layout)
    twins = Twins(chain)
    before = memories(twins.native_wholes)
    record = record_of(chain, 1)
    record[rec.header_nbytes_for(layout.parts) + layout.block_nbytes - 1] ^= 1
    _, found, _, _ = twins.read(native, {1: record})
    assert isinstance(found[0], Corrupt)
    assert memories(twins.native_wholes) == before


def test_a_record_of_an_unknown_layout_can_be_promoted() -> None:
    landing = native.Landing(record_of(CHAIN, 1), shape_of(SMALL, []), CHAIN.key(1), PUT_SEQ, NONCE, OFFSET)
    native.ReadHook([landing])(done(8192))
    assert landing.landed == Landed.RIGHT and not landing.copied


def test_layers_are_read_by_themselves() -> None:
    """Bytes outside what is wanted may be anything: they were not asked for."""
    twins = Twins(CHAIN, layers=range(1, 2))
    record = record_of(CHAIN, 1)
    record[4096 : 4096 + 128] = 0
    _, found, _, copied = twins.read(native, {1: record})
    assert found == [HIT] and copied == [True]
    assert memories(twins.native_wholes)[0][128:256] == record[4096 + 128 : 4096 + 256].tobytes()


def test_layers_that_begin_behind_the_first_page() -> None:
    chain = chain_for(LARGE)
    twins = Twins(chain, layers=range(1, 2))
    assert twins.span() == (range(2, 4), 262_144, 262_144)
    record = record_of(chain, 1)
    expected, found, _, copied = twins.read(native, {1: twins.landed(record)})
    assert found == expected == [HIT] and copied == [True]
    assert memories(twins.native_wholes)[0][262_144 : 2 * 262_144] == record[4096 + 262_144 :].tobytes()


def test_memory_stays_while_a_hook_has_it() -> None:
    twins = Twins(CHAIN, Form("parts"))
    shape, places, claims = twins.native_side(native)
    record = record_of(CHAIN, 0)
    payload = record[4096 : 4096 + 64].tobytes()
    landing = native.Landing(
        record, shape, CHAIN.key(0), PUT_SEQ, NONCE, OFFSET, places=places, block=0, claims=claims, claim=0
    )
    hook = native.ReadHook([landing])
    whole = twins.native_wholes[0]
    watched = [weakref.ref(one) for one in (record, twins.native_buffers._arrays[1], twins.native_buffers._arrays[3])]
    del twins, shape, places, claims, record, landing
    gc.collect()
    assert all(one() is not None for one in watched)
    hook(done(8192))
    assert whole[0].tobytes() == payload
    del hook
    gc.collect()
    assert all(one() is None for one in watched)


def test_parts_that_differ_only_in_how_far_apart_blocks_are() -> None:
    rooms = [np.zeros((BLOCKS, 64 * (1 + part)), np.uint8) for part in range(4)]
    places = native.Places([room[:, :64] for room in rooms], [64] * 4)
    record, claims = record_of(CHAIN, 2), native.Claims(1)
    copy = native.Copy(record, shape_of(SMALL), places=places, block=2, claims=claims, claim=0)
    native.CopyHook([copy])(done())
    for part, room in enumerate(rooms):
        start = 4096 + 64 * part
        assert room[2, :64].tobytes() == record[start : start + 64].tobytes()
        assert not room[:2].any() and not room[2, 64:].any()


def test_a_copy_that_ran_is_ended() -> None:
    twins = Twins(CHAIN)
    shape, places, claims = twins.native_side(native)
    copy = native.Copy(record_of(CHAIN, 2), shape, places=places, block=2, claims=claims, claim=2)
    native.CopyHook([copy])(done())
    assert copy.copied
    assert claims.settle(2)


# -- the way in --------------------------------------------------------------------------------------------------------


def fill(layout: KVLayout, source: Any, slot: Bytes) -> Any:
    buffers = BlockBuffers(layout, source, BLOCKS)
    places = native.Places(buffers.pieces, list(layout.part_nbytes), 0, buffers)
    return native.Fill(
        slot, shape_of(layout), b"k" * 32, b"p" * 32, 7, b"s" * 16, 11, 12,
        places=places, block=1, claims=native.Claims(BLOCKS), claim=1,
    )  # fmt: skip


@pytest.mark.parametrize("layout", [SMALL, LARGE], ids=["small", "large"])
def test_a_filled_slot_by_hand(layout: KVLayout) -> None:
    """The record as docs/design.md has it, put together without the library's format."""
    source = random_bytes(BLOCKS * layout.block_nbytes)
    payload = source[layout.block_nbytes : 2 * layout.block_nbytes].tobytes()
    sizes, space = layout.part_nbytes, chain_for(layout).namespace
    slot = random_bytes(4096 + -(-len(payload) // 4096) * 4096, seed=1)
    item = fill(layout, source, slot)
    native.FillHook([item])(done())
    assert item.done
    table = b""
    for part, nbytes in enumerate(sizes):
        at = sum(sizes[:part])
        table += struct.pack("<IIII", at, nbytes, crc(payload[at : at + nbytes]), nbytes)
    front = struct.pack("<8sHHI", b"KVTRECRD", 1, 1, 4096)
    back = struct.pack("<HH16sQQ", 0, 0, bytes(16), 0, 11) + space.digest + b"k" * 32 + b"p" * 32
    back += struct.pack("<II16sQQQII", 7, 3, b"s" * 16, len(payload), len(payload), 12, len(sizes), 16) + table
    back += bytes(4096 - len(front) - 4 - len(back))
    header = front + struct.pack("<I", crc(front + bytes(4) + back)) + back
    assert slot[:4096].tobytes() == header
    assert slot[4096:].tobytes() == payload + bytes(slot.nbytes - 4096 - len(payload))


def test_a_put_that_was_given_up_leaves_its_slot_alone() -> None:
    slot = random_bytes(8192, seed=1)
    claims = native.Claims(BLOCKS)
    buffers = BlockBuffers(SMALL, random_bytes(BLOCKS * 256), BLOCKS)
    item = native.Fill(
        slot, shape_of(SMALL), b"k" * 32, b"p" * 32, 7, b"s" * 16, 11, 12,
        places=native.Places(buffers.pieces, list(SMALL.part_nbytes), 0, buffers), block=1, claims=claims, claim=1,
    )  # fmt: skip
    assert claims.give_up() == [0, 1, 2]
    native.FillHook([item])(done())
    assert not item.done
    assert np.array_equal(slot, random_bytes(8192, seed=1))


def crc(data: bytes) -> int:
    """Bit by bit where it is short; else a table of bytes."""
    value = 0xFFFFFFFF
    for byte in data:
        value = _TABLE[(value ^ byte) & 255] ^ value >> 8
    return value ^ 0xFFFFFFFF


def _entry(value: int) -> int:
    for _ in range(8):
        value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
    return value


_TABLE = [_entry(value) for value in range(256)]


@pytest.mark.parametrize("layout", [MEDIUM, LARGE], ids=["through the cache", "past it"])
def test_a_sum_is_that_of_the_slot_even_while_the_caller_writes(layout: KVLayout) -> None:
    """A caller that breaks the rules gets a block of mixed bytes, never one that is refused later."""
    source = random_bytes(BLOCKS * layout.block_nbytes)
    stop = threading.Event()

    def disturb() -> None:
        value = 0
        while not stop.is_set():
            value = (value + 1) % 256
            source[:] = value

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        for _ in range(300):
            slot = np.empty(4096 + layout.block_nbytes, np.uint8)
            native.FillHook([fill(layout, source, slot)])(done())
            header = rec.decode_header(slot)
            assert isinstance(header, rec.RecordHeader)
            assert rec.verify_parts(header, slot[4096:]) is None
    finally:
        stop.set()
        thread.join()


# -- what is refused before anything runs ------------------------------------------------------------------------------


def test_places_that_do_not_fit() -> None:
    flat = np.zeros((BLOCKS, 256), np.uint8)
    for arrays, sizes, words in [
        ([flat], [100], "part 0 has 256 B a block, not 100 B"),
        ([flat, flat], [64] * 4, "2 pieces for 4 parts"),
        ([flat], [64] * 3, "one piece for all parts"),
        ([flat, flat[:2]], [256, 256], "different numbers of blocks"),
        ([], [], "no pieces"),
    ]:
        with pytest.raises(ValueError, match=words):
            native.Places(arrays, sizes)


def test_landings_that_do_not_fit() -> None:
    flat = np.zeros((BLOCKS, 256), np.uint8)
    places, claims = native.Places([flat], [64] * 4), native.Claims(BLOCKS)
    record = record_of(CHAIN, 1)
    one = (record, shape_of(SMALL), CHAIN.key(1), PUT_SEQ, NONCE, OFFSET)
    mine = {"places": places, "claims": claims, "block": 1, "claim": 1}
    flat.flags.writeable = False
    locked = native.Places([flat], [64] * 4)
    for values, more, words in [
        ((*one[:2], b"short", *one[3:]), {}, "key takes 32 B, not 5 B"),
        ((*one[:4], b"short", one[5]), {}, "nonce takes 16 B, not 5 B"),
        (one, mine | {"block": 3}, "no block 3 of 3"),
        (one, mine | {"claim": 3}, "no claim 3 of 3"),
        (one, mine | {"claims": None}, "places without claims"),
        (one, mine | {"places": locked}, "read-only"),
        (one, mine | {"parts": (1, 4)}, "must be among what is verified"),
        (one, mine | {"places": native.Places([flat[:, :192].copy()], [64] * 3, 2)}, "not those of this layout"),
        ((record, shape_of(SMALL, []), *one[2:]), mine, "not those of this layout"),
        (one, {"base": -1}, "cannot be negative"),
    ]:
        with pytest.raises(ValueError, match=words):
            native.Landing(*values, **more)
    record.flags.writeable = False
    with pytest.raises((BufferError, ValueError)):
        native.Landing(*one)


def test_slots_that_do_not_fit() -> None:
    source = random_bytes(BLOCKS * 256)
    with pytest.raises(ValueError, match="a record of 8192 B does not fit 8191 B"):
        fill(SMALL, source, np.zeros(8191, np.uint8))
    with pytest.raises(ValueError, match="parts of 255 B in a payload of 256 B"):
        native.RecordShape(bytes(32), 0, 4096, 256, [255])
    with pytest.raises(ValueError, match="no header of 8192 B has 1 parts"):
        native.RecordShape(bytes(32), 0, 8192, 256, [256])
    some = native.Places([np.zeros((BLOCKS, 128), np.uint8)], [64] * 2)
    with pytest.raises(ValueError, match="a put takes all parts of a block"):
        native.Fill(
            np.zeros(8192, np.uint8), shape_of(SMALL), bytes(32), bytes(32), 0, bytes(16), 1, 1,
            places=some, block=0, claims=native.Claims(1), claim=0,
        )  # fmt: skip


def test_check_layout_of_the_python_path() -> None:
    header = rec.decode_header(record_of(CHAIN, 1))
    assert isinstance(header, rec.RecordHeader)
    assert check_layout(header, SMALL.part_nbytes) is None
    found = check_layout(header, (64, 64, 63, 65))
    assert found == rec.BadRecord("part 2 at 128+64, decoding to 64 B, is of another layout")


def test_a_hook_that_did_not_run_says_so() -> None:
    landing = native.Landing(record_of(CHAIN, 1), shape_of(SMALL), CHAIN.key(1), PUT_SEQ, NONCE, OFFSET)
    native.ReadHook([landing])
    assert landing.landed == Landed.UNSEEN
    with pytest.raises(AssertionError):
        native_outcome(landing, Twins(CHAIN).landing(1, record_of(CHAIN, 1)), done())
