"""Records, against a layout and a CRC written down here again by hand."""

from __future__ import annotations

import os
import struct
from typing import Any

import numpy as np
import pytest

from kvterrace.buffers import Bytes
from kvterrace.format import checksum
from kvterrace.format import record as fmt
from kvterrace.format.record import BadRecord, RecordHeader, RecordKind, StaleRecord

# Offset in the header, struct code: docs/design.md, written down a second time.
FIELDS = {
    "magic": (0, "8s"),
    "version": (8, "H"),
    "kind": (10, "H"),
    "header_nbytes": (12, "I"),
    "header_crc": (16, "I"),
    "codec": (20, "H"),
    "flags": (22, "H"),
    "nonce": (24, "16s"),
    "offset": (40, "Q"),
    "put_seq": (48, "Q"),
    "namespace": (56, "32s"),
    "key": (88, "32s"),
    "parent": (120, "32s"),
    "depth": (152, "I"),
    "epoch": (156, "I"),
    "sequence": (160, "16s"),
    "payload_nbytes": (176, "Q"),
    "raw_nbytes": (184, "Q"),
    "created": (192, "Q"),
    "parts": (200, "I"),
    "entry_nbytes": (204, "I"),
}
TABLE_AT = 208

NONCE = bytes(range(16))
KEY, PARENT, NAMESPACE = (bytes([n]) * 31 + b"\0" for n in (0xA1, 0xB2, 0xC3))  # end in NUL on purpose
SEQUENCE = b"conversation-17\0"


def crc_by_hand(data: bytes) -> int:
    """CRC32C bit by bit, from the polynomial alone."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def get(view: Bytes, name: str) -> Any:
    at, code = FIELDS[name]
    return struct.unpack_from("<" + code, view.tobytes(), at)[0]


def forge(view: Bytes, **fields: Any) -> Bytes:
    """A copy with other fields and, unless given, a right header CRC."""
    out = bytearray(view.tobytes())
    for name, value in fields.items():
        at, code = FIELDS[name]
        struct.pack_into("<" + code, out, at, value)
    if "header_crc" not in fields:
        nbytes = min(len(out), max(20, struct.unpack_from("<I", out, 12)[0]))
        out[16:20] = bytes(4)
        out[16:20] = struct.pack("<I", crc_by_hand(bytes(out[:nbytes])))
    return np.frombuffer(bytes(out), dtype=np.uint8)


def random_bytes(nbytes: int) -> Bytes:
    return np.frombuffer(os.urandom(nbytes), dtype=np.uint8)


def make(sizes: tuple[int, ...] = (1000, 5000, 1), **fields: Any) -> tuple[RecordHeader, Bytes]:
    """A header and a whole record, placed at 8192."""
    table = fmt.part_table(sizes)
    out = np.full(fmt.record_nbytes_for(sizes), 0xEE, dtype=np.uint8)  # a used slot: encode must leave no old byte
    start = fmt.header_nbytes_for(len(sizes))
    payload = out[start:]
    payload[: sum(sizes)] = random_bytes(sum(sizes))
    payload[sum(sizes) :] = 0
    fmt.seal_parts(table, payload)
    values: dict[str, Any] = {
        "kind": RecordKind.BLOCK,
        "put_seq": 77,
        "namespace": NAMESPACE,
        "key": KEY,
        "parent": PARENT,
        "payload_nbytes": sum(sizes),
        "parts": table,
        "depth": 5,
        "epoch": 9,
        "sequence": SEQUENCE,
        "codec": 3,
        "created_unix_ns": 123456789,
    }
    header = RecordHeader(**{**values, **fields})
    assert fmt.encode_header(header, out) == start
    fmt.place(out, NONCE, 8192)
    return header, out


def believed(view: Bytes) -> RecordHeader:
    header = fmt.decode_header(view)
    assert isinstance(header, RecordHeader), header
    return header


def identity(**changes: Any) -> dict[str, Any]:
    right = {"key": KEY, "namespace": NAMESPACE, "epoch": 9, "put_seq": 77, "nonce": NONCE, "offset": 8192}
    return {**right, **changes}


def test_crc32c_has_the_published_check_value() -> None:
    assert checksum.crc32c(b"123456789") == 0xE3069283 == crc_by_hand(b"123456789")
    assert checksum.crc32c(bytes(32)) == 0x8A9136AA  # RFC 3720, B.4
    assert checksum.crc32c(b"") == 0
    assert isinstance(checksum.hardware(), bool)


def test_crc32c_takes_arrays_and_goes_on() -> None:
    data = random_bytes(3000)
    assert checksum.crc32c(data) == crc_by_hand(data.tobytes())
    assert checksum.crc32c(data[1000:], checksum.crc32c(data[:1000])) == checksum.crc32c(data)
    assert checksum.crc32c(data[:0], 7) == 7


def test_header_lies_as_the_design_says() -> None:
    header, out = make()
    fields = {name: get(out, name) for name in FIELDS}
    crc = fields.pop("header_crc")
    assert fields == {
        "magic": b"KVTRECRD",
        "version": 1,
        "kind": 1,
        "header_nbytes": 4096,
        "codec": 3,
        "flags": 0,
        "nonce": NONCE,
        "offset": 8192,
        "put_seq": 77,
        "namespace": NAMESPACE,
        "key": KEY,
        "parent": PARENT,
        "depth": 5,
        "epoch": 9,
        "sequence": SEQUENCE,
        "payload_nbytes": 6001,
        "raw_nbytes": 6001,
        "created": 123456789,
        "parts": 3,
        "entry_nbytes": 16,
    }
    raw = out.tobytes()
    assert crc == crc_by_hand(raw[:16] + bytes(4) + raw[20:4096])
    payload = raw[4096:]
    for number, (offset, nbytes) in enumerate(((0, 1000), (1000, 5000), (6000, 1))):
        entry = struct.unpack_from("<IIII", raw, TABLE_AT + 16 * number)
        assert entry == (offset, nbytes, crc_by_hand(payload[offset : offset + nbytes]), nbytes)
    assert raw[TABLE_AT + 48 : 4096] == bytes(4096 - TABLE_AT - 48)
    assert len(raw) == 4096 + 8192 == header.record_nbytes


@pytest.mark.parametrize(("parts", "pages"), [(1, 1), (243, 1), (244, 2), (499, 2), (500, 3), (4096, 17)])
def test_header_takes_as_few_pages_as_hold_its_table(parts: int, pages: int) -> None:
    assert fmt.header_nbytes_for(parts) == pages * 4096
    header, out = make((3,) * parts)
    again = believed(out)
    assert again.parts.tobytes() == header.parts.tobytes()
    assert again.header_nbytes == get(out, "header_nbytes") == pages * 4096
    assert fmt.verify_parts(again, out[pages * 4096 :]) is None
    assert isinstance(fmt.decode_header(out[: pages * 4096 - 1]), BadRecord)


def test_place_only_changes_nonce_offset_and_crc() -> None:
    _, out = make()
    before = out.copy()
    fmt.place(out[:4096], b"another segment!", 1 << 40)
    changed = set(np.flatnonzero(out != before).tolist())
    assert changed <= {*range(16, 20), *range(24, 48)}
    again = believed(out)
    assert (again.nonce, again.offset, again.key) == (b"another segment!", 1 << 40, KEY)


def test_every_flipped_header_bit_is_noticed() -> None:
    _, out = make()
    view = out[:4096].copy()
    for at in range(4096):
        for mask in (1 << at % 8, 0xFF):
            view[at] ^= mask
            assert isinstance(fmt.decode_header(view), BadRecord), at
            view[at] ^= mask
    assert fmt.check_identity(believed(view), **identity()) is None


def test_every_flipped_payload_byte_names_its_part() -> None:
    header, out = make()
    payload = out[4096:]
    for part, (start, stop) in enumerate(((0, 1000), (1000, 6000), (6000, 6001))):
        for at in {*range(start, stop, 97), start, stop - 1}:
            payload[at] ^= 0x10
            bad = fmt.verify_parts(header, payload)
            assert bad is not None
            assert bad.reason.startswith(f"part {part}:")
            others = [range(n, n + 1) for n in range(3) if n != part]
            assert [fmt.verify_parts(header, payload, one) for one in others] == [None, None]
            payload[at] ^= 0x10
    payload[6001:] ^= 0xFF
    assert fmt.verify_parts(header, payload) is None, "padding is nobody's"
    assert fmt.verify_parts(header, payload[:6001]) is None


def test_a_part_is_verified_by_itself_from_where_the_read_began() -> None:
    header, out = make()
    payload = out[4096:]
    assert fmt.verify_parts(header, payload[1000:6000], range(1, 2), base=1000) is None
    for view, parts, base in (
        (payload[1000:5999], range(1, 2), 1000),
        (payload[1001:], range(1, 2), 1001),
        (payload, range(3, 4), 0),
        (payload, range(-1, 0), 0),
        (payload[:0], None, 0),
    ):
        assert isinstance(fmt.verify_parts(header, view, parts, base=base), BadRecord)


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"nonce": bytes(16)}, StaleRecord),
        ({"offset": 4096}, BadRecord),
        ({"key": KEY[:-1] + b"\1"}, StaleRecord),
        ({"namespace": KEY}, StaleRecord),
        ({"epoch": 8}, StaleRecord),
        ({"put_seq": 78}, StaleRecord),
    ],
)
def test_identity_tells_stale_from_misplaced(changes: dict[str, Any], kind: type) -> None:
    _, out = make()
    assert type(fmt.check_identity(believed(out), **identity(**changes))) is kind


@pytest.mark.parametrize(
    "fields",
    [
        {"magic": b"KVTRECRE"},
        {"version": 0},
        {"version": 2},
        {"kind": 0},
        {"kind": 3},
        {"flags": 1},
        {"header_nbytes": 0},
        {"header_nbytes": 4095},
        {"header_nbytes": 8192},
        {"header_nbytes": 2**32 - 4096},
        {"parts": 0},
        {"parts": 4},  # a part of zeros: overlaps
        {"parts": 244},
        {"parts": 2**32 - 1},
        {"entry_nbytes": 0},
        {"entry_nbytes": 32},
        {"payload_nbytes": 6000},
        {"payload_nbytes": 2**64 - 1},
        {"raw_nbytes": 6002},
        {"raw_nbytes": 2**64 - 1},
        {"offset": 8193},
        {"kind": 2},
    ],
)
def test_impossible_headers_with_a_right_crc_are_refused(fields: dict[str, Any]) -> None:
    _, out = make()
    assert isinstance(fmt.decode_header(forge(out)), RecordHeader)
    assert isinstance(fmt.decode_header(forge(out, **fields)), BadRecord)


@pytest.mark.parametrize("entry", [(999, 5000), (1000, 5001), (1000, 2**32 - 1), (2**32 - 1, 2**32 - 1), (6002, 0)])
def test_impossible_part_tables_with_a_right_crc_are_refused(entry: tuple[int, int]) -> None:
    _, out = make()
    raw = out.copy()
    struct.pack_into("<II", raw.data, TABLE_AT + 16, *entry)
    assert isinstance(fmt.decode_header(forge(raw)), BadRecord)


def test_decoded_header_does_not_alias_the_view() -> None:
    _, out = make()
    header = believed(out)
    out[:] = 0
    assert header.parts["nbytes"].tolist() == [1000, 5000, 1]


def test_tombstone_round_trip() -> None:
    keys = random_bytes(32 * 200).tobytes()
    out = np.full(fmt.tombstone_nbytes_for(200) + 9, 0xEE, dtype=np.uint8)
    header = fmt.encode_tombstone(keys, out, put_seq=5, namespace=NAMESPACE, epoch=9)
    fmt.place(out, NONCE, 4096)
    raw = out.tobytes()
    assert raw[header.record_nbytes :] == b"\xee" * 9
    assert raw[4096 : 4096 + 6400] == keys
    assert raw[4096 + 6400 : header.record_nbytes] == bytes(header.record_nbytes - 4096 - 6400)
    assert get(out, "kind") == 2
    assert struct.unpack_from("<IIII", raw, TABLE_AT) == (0, 6400, crc_by_hand(keys), 6400)
    again = believed(out)
    assert again.kind is RecordKind.TOMBSTONE
    assert fmt.verify_parts(again, out[4096:]) is None
    assert isinstance(fmt.check_identity(again, **identity(offset=4096, key=bytes(32), put_seq=5)), StaleRecord)


def test_what_could_not_be_read_again_is_not_written() -> None:
    header, out = make()
    fields = {name: getattr(header, name) for name in header.__slots__}
    for changes in (
        {"key": KEY[:31]},
        {"nonce": b""},
        {"sequence": bytes(17)},
        {"flags": 1},
        {"offset": 1},
        {"put_seq": 2**64},
        {"depth": -1},
        {"payload_nbytes": 6000},
        {"kind": RecordKind.TOMBSTONE},
        {"parts": header.parts[:0]},
    ):
        with pytest.raises(ValueError, match=r"."):
            fmt.encode_header(RecordHeader(**{**fields, **changes}), out)
    with pytest.raises(ValueError, match="fit"):
        fmt.encode_header(header, out[:4095])
    for sizes in ((), (1,) * 4097, (-1,), (2**32,), (2**31, 2**31)):
        with pytest.raises(ValueError, match="part"):
            fmt.part_table(sizes)
    with pytest.raises(ValueError, match="place"):
        fmt.place(np.zeros(4096, dtype=np.uint8), NONCE, 0)
    with pytest.raises(ValueError, match="lie"):
        fmt.place(out, NONCE, 100)
    for keys in (b"", bytes(33), bytes(32 * (fmt.MAX_TOMBSTONE_KEYS + 1))):
        with pytest.raises(ValueError, match="tombstone"):
            fmt.encode_tombstone(keys, np.zeros(2 << 20, dtype=np.uint8), put_seq=1, namespace=NAMESPACE)
