"""One record, one caller's memory, and both ways through it: the native passes and the Python path."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import crc32c as reference
import numpy as np
import numpy.typing as npt

from kvterrace.buffers import BlockBuffers, Bytes
from kvterrace.engine.claims import PythonClaims
from kvterrace.engine.core import NamespaceEntry
from kvterrace.engine.landing import Copy, Landing, Want, finish_read, not_read, scatter_all, verify
from kvterrace.engine.ledger import Geometry
from kvterrace.engine.transfers import Transfer, TransferKind
from kvterrace.format import record as rec
from kvterrace.format.passes import Landed, fault_of
from kvterrace.io.base import IoClass, IoKind, IoRequest, IoResult
from kvterrace.keys import KeyChain, Namespace
from kvterrace.layout import KVLayout
from kvterrace.types import Corrupt, GetOutcome, Hit, Stale, Tier

BLOCKS = 3
NONCE = bytes(range(16))
OFFSET = 7 * rec.PAGE_NBYTES
PUT_SEQ = 2**40 + 5
WHERE = "a.seg@28672"
#: The fields of a record header before its part table, as docs/design.md has them: (at, bytes).
FIELDS = {
    "magic": (0, 8),
    "format_version": (8, 2),
    "kind": (10, 2),
    "header_nbytes": (12, 4),
    "codec": (20, 2),
    "flags": (22, 2),
    "segment_nonce": (24, 16),
    "offset": (40, 8),
    "put_seq": (48, 8),
    "namespace": (56, 32),
    "key": (88, 32),
    "parent": (120, 32),
    "depth": (152, 4),
    "epoch": (156, 4),
    "sequence": (160, 16),
    "payload_nbytes": (176, 8),
    "raw_nbytes": (184, 8),
    "created_unix_ns": (192, 8),
    "parts": (200, 4),
    "part_entry_nbytes": (204, 4),
}


def random_bytes(nbytes: int, seed: int = 0) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def chain_for(layout: KVLayout, *, epoch: int = 3) -> KeyChain:
    return KeyChain(Namespace("twins", layout, epoch), bytes(32), random_bytes(32 * BLOCKS, seed=99).tobytes())


@dataclass(frozen=True)
class Form:
    """How a caller holds its memory. `axes`: order in memory of (blocks, heads, tokens, items); `gaps`: how much longer
    each is there; `steps`: -1 for axes that run backwards. `kind`: "flat", "parts", or "joined" (one allocation, parts
    along an axis at `joined_at`).
    """

    kind: str = "flat"
    axes: tuple[int, ...] = (0, 1, 2, 3)
    gaps: tuple[int, ...] = (0, 0, 0, 0)
    steps: tuple[int, ...] = (1, 1, 1, 1)
    as_bytes: bool = False
    joined_at: int = 0


def caller(form: Form, layout: KVLayout, layers: range | None, seed: int) -> tuple[list[npt.NDArray[Any]], Any]:
    """Memory full of random bytes, whole, and what a caller hands over of it: the same for the same arguments."""
    numbers = range(layers.start if layers else 0, layers.stop if layers else layout.layers)
    shapes = [shape for _ in numbers for shape in layout.part_shapes]
    if form.kind == "flat":
        nbytes = BLOCKS * sum(h * t * d for h, t, d in shapes) * layout.itemsize
        memory = random_bytes(nbytes, seed)
        return [memory], memory
    dtype = np.dtype("u1" if form.as_bytes else f"u{layout.itemsize}")
    per_item = layout.itemsize if form.as_bytes else 1
    wanted = [(BLOCKS, h, t, d * per_item) for h, t, d in shapes]
    if form.kind == "joined" and len(set(wanted)) == 1:
        whole, axes = _room(form, wanted[0], dtype, seed, extra=len(wanted))
        views = [_view(form, whole[(slice(None),) * form.joined_at + (part,)], wanted[0]) for part in range(axes)]
        return [whole], views
    wholes = [_room(form, shape, dtype, seed + part, extra=0)[0] for part, shape in enumerate(wanted)]
    return wholes, [_view(form, whole, shape) for whole, shape in zip(wholes, wanted, strict=True)]


def _room(
    form: Form, shape: tuple[int, ...], dtype: np.dtype[Any], seed: int, *, extra: int
) -> tuple[npt.NDArray[Any], int]:
    lengths = [shape[axis] + form.gaps[axis] for axis in form.axes]
    if extra:
        lengths.insert(form.joined_at, extra)
    nbytes = int(np.prod(lengths)) * dtype.itemsize
    return random_bytes(nbytes, seed).view(dtype).reshape(lengths), extra


def _view(form: Form, room: npt.NDArray[Any], shape: tuple[int, ...]) -> npt.NDArray[Any]:
    view = room.transpose(np.argsort(form.axes))
    for axis, length in enumerate(shape):
        cut = slice(0, length) if form.steps[axis] > 0 else slice(length - 1, None, -1)
        view = view[(slice(None),) * axis + (cut,)]
    assert view.shape == shape
    return view


def record_of(chain: KeyChain, index: int, *, seed: int = 5) -> Bytes:
    """A block's record as it lies in its segment, by the Python format."""
    layout = chain.namespace.layout
    table = rec.part_table(layout.part_nbytes)
    payload = random_bytes(layout.block_nbytes, seed + index)
    rec.seal_parts(table, payload)
    header = rec.RecordHeader(
        rec.RecordKind.BLOCK, PUT_SEQ, chain.namespace.digest, chain.key(index), chain.key(index - 1),
        layout.block_nbytes, table, depth=index, epoch=chain.namespace.epoch,
    )  # fmt: skip
    out = np.zeros(header.record_nbytes, np.uint8)
    start = rec.encode_header(header, out)
    rec.place(out, NONCE, OFFSET)
    out[start : start + payload.size] = payload
    return out


def renew_crc(record: Bytes) -> None:
    """Make the header's CRC right again, over as many bytes as the header says it has (if it has them)."""
    (nbytes,) = struct.unpack_from("<I", record.data, 12)
    if 208 <= nbytes <= record.nbytes:
        record[16:20] = 0
        struct.pack_into("<I", record.data, 16, reference.crc32c(record[:nbytes].tobytes()))


@dataclass
class Twins:
    """The same read, twice: each side has its own copy of the memory. `layers`: None for whole blocks."""

    chain: KeyChain
    form: Form = field(default_factory=Form)
    layers: range | None = None
    promote_only: bool = False

    def __post_init__(self) -> None:
        self.layout = self.chain.namespace.layout
        sizes = self.layout.part_nbytes
        self.geometry = Geometry(rec.header_nbytes_for(len(sizes)), sum(sizes))
        self.wholes, source = caller(self.form, self.layout, self.layers, 1)
        self.native_wholes, native_source = caller(self.form, self.layout, self.layers, 1)
        self.buffers = BlockBuffers(self.layout, source, BLOCKS, layers=self.layers).require_writable()
        self.native_buffers = BlockBuffers(self.layout, native_source, BLOCKS, layers=self.layers)
        self.transfer = Transfer(
            TransferKind.GET, self.chain, 0, BLOCKS,
            buffers=None if self.promote_only else self.buffers, submitted_s=0.0, deadline_s=None, layers=self.layers,
        )  # fmt: skip
        self.transfer.claims = PythonClaims(BLOCKS)
        space = self.chain.namespace
        self.entry = NamespaceEntry(space.digest, space.epoch, self.geometry, rec.part_table(sizes), space)

    def native_side(self, native: Any) -> tuple[Any, Any, Any]:
        """Shape, places and claims."""
        sizes, wanted = list(self.layout.part_nbytes), self.native_buffers.parts
        shape = native.RecordShape(
            self.chain.namespace.digest, self.chain.namespace.epoch, self.geometry.header_nbytes,
            self.geometry.payload_nbytes, sizes,
        )  # fmt: skip
        places = native.Places(
            self.native_buffers.pieces, sizes[wanted.start : wanted.stop], wanted.start, self.native_buffers
        )
        return shape, places, native.Claims(BLOCKS)

    def span(self) -> tuple[range | None, int, int]:
        """The parts to verify, the payload offset where reading begins, and how many bytes, as a read of layers has
        them.
        """
        if self.layers is None:
            return None, 0, -(-self.geometry.payload_nbytes // 4096) * 4096
        parts = self.buffers.parts
        first = sum(self.layout.part_nbytes[: parts.start]) // 4096 * 4096
        last = sum(self.layout.part_nbytes[: parts.stop])
        return parts, first, -(-(last - first) // 4096) * 4096

    def landed(self, record: Bytes) -> Bytes:
        """The bytes that the read brings of a record: all, or the header and the wanted span."""
        _, base, nbytes = self.span()
        header = self.geometry.header_nbytes
        return np.concatenate([record[:header], record[header + base : header + base + nbytes]])

    def landing(self, index: int, memory: Bytes) -> Landing:
        volume: Any = SimpleNamespace(files=SimpleNamespace(where=lambda *_: WHERE))
        segment: Any = SimpleNamespace(number=0)
        return Landing(
            Want(self.transfer, index, 0), memory, volume, segment, OFFSET, NONCE, self.chain.key(index), self.entry,
            PUT_SEQ, self.span()[0],
        )  # fmt: skip

    def read(
        self, native: Any, records: dict[int, Bytes], *, moved: int | None = None, error: OSError | None = None,
        taken: dict[int, str] | None = None,
    ) -> tuple[list[GetOutcome], list[GetOutcome], list[bool], list[bool]]:  # fmt: skip
        """Land `records` (by index of the block), of which `moved` bytes arrived, on both sides; `taken`: blocks that
        are "settled" or "copying" already. Returns the outcomes and who was copied: Python's, then the native ones.
        """
        shape, places, claims = self.native_side(native)
        for index, state in (taken or {}).items():
            if state == "settled":
                self.transfer.settle(index, Hit(Tier.DRAM))
                claims.settle(index)
            else:
                assert self.transfer.begin_copy(index) and claims.begin_copy(index)
        parts, base, _ = self.span()
        ones = [self.landing(index, record) for index, record in records.items()]
        twins = [
            native.Landing(
                one.memory.copy(), shape, one.key, one.put_seq, one.nonce, one.offset,
                places=None if self.promote_only else places, block=one.want.index,
                claims=None if self.promote_only else claims, claim=one.want.index,
                parts=None if parts is None else (parts.start, parts.stop), base=base,
            )
            for one in ones
        ]  # fmt: skip
        request = IoRequest(IoKind.READ, IoClass.DEMAND, None, OFFSET, [one.memory for one in ones])
        wanted = sum(one.memory.nbytes for one in ones)
        result = IoResult(request, wanted if moved is None else moved, error)
        before = self.copied_states
        if self.layers is None:
            finish_read(ones, result)
            native.ReadHook(twins)(result)
        else:
            for one in ones:
                verify(one, one.memory[self.geometry.header_nbytes :], base)
            native.VerifyHook(twins)(result)
        outcomes: list[GetOutcome] = []
        for one in ones:
            assert one.outcome is not None and one.fault is None
            outcomes.append(one.outcome)
        found = [native_outcome(twin, one, result) for twin, one in zip(twins, ones, strict=True)]
        after = self.copied_states
        copied = [after[one.want.index] and not before[one.want.index] for one in ones]
        return outcomes, found, copied, [twin.copied for twin in twins]

    @property
    def copied_states(self) -> list[bool]:
        """Which blocks the Python path has copied."""
        claims = self.transfer.claims
        assert isinstance(claims, PythonClaims)
        return [state == 2 for state in claims._states]


def native_outcome(verdict: Any, one: Landing, result: IoResult) -> GetOutcome:
    """What the store would make of a native landing."""
    if verdict.landed == Landed.MISSING:
        failed = replace(one, outcome=None)
        not_read(failed, result)
        assert failed.outcome is not None
        return failed.outcome
    match fault_of(verdict, one):
        case rec.BadRecord(reason):
            return Corrupt(one.where, reason)
        case rec.StaleRecord(reason):
            return Stale(one.where, reason)
        case None:
            assert verdict.landed == Landed.RIGHT
            return Hit(Tier.SSD)


def copy_both(twins: Twins, native: Any, slots: dict[int, Bytes]) -> None:
    """Scatter records from their slots to the caller, on both sides."""
    shape, places, claims = twins.native_side(native)
    group = [Copy(Want(twins.transfer, index, 0), slot, twins.entry) for index, slot in slots.items()]
    items = [
        native.Copy(slot.copy(), shape, places=places, block=index, claims=claims, claim=index)
        for index, slot in slots.items()
    ]
    result = IoResult(IoRequest(IoKind.CALL, IoClass.DEMAND))
    scatter_all(group, result)
    native.CopyHook(items)(result)
    assert all(one.fault is None for one in group) and all(item.copied for item in items)


def memories(wholes: list[npt.NDArray[Any]]) -> list[bytes]:
    return [whole.tobytes() for whole in wholes]
