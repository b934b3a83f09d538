"""The index that a restart builds, against plain dicts: forks, holes, copies, tombstones, namespaces."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.harness import LARGE, LARGE_NBYTES, SMALL, SMALL_NBYTES

from kvterrace.clock import ManualClock
from kvterrace.engine.blocks import NOWHERE
from kvterrace.engine.core import Core
from kvterrace.engine.ledger import Ledger
from kvterrace.engine.rebuild import rebuild
from kvterrace.engine.space import SegmentSpace
from kvterrace.format.recovery import SegmentContents, SegmentState
from kvterrace.format.segment import ENTRY_DTYPE, TOMBSTONE_DTYPE, SegmentHeader
from kvterrace.io.fake import FakeDevice
from kvterrace.keys import KEY_NBYTES, KeyChain
from kvterrace.testing.invariants import check_ledger
from kvterrace.tiers.memory import Arena
from kvterrace.tiers.segments import RecoveredSegment, footer_room_nbytes

Path = tuple[int, ...]
#: Parts of a core that these tests do not use.
_CLOCK = ManualClock(100.0)
_ARENA, _DEVICE = Arena(4096), FakeDevice(_CLOCK)
NAMESPACES = (SMALL, LARGE)
NBYTES = {0: (4096, 256, SMALL_NBYTES), 1: (4096, 12288, LARGE_NBYTES)}


def key_of(namespace: int, path: Path) -> bytes:
    """The prefix itself, spelt out, behind eight bytes that many keys share."""
    return bytes([len(path) % 2] * 8) + bytes([namespace + 1, *(step + 1 for step in path)]).ljust(24, b"\xff")


@dataclass(frozen=True)
class Block:
    namespace: int
    path: Path
    sequence: int
    put_seq: int
    depth_off: int = 0  # a record that says another depth than its parent allows

    @property
    def key(self) -> bytes:
        return key_of(self.namespace, self.path)

    @property
    def parent(self) -> bytes:
        return key_of(self.namespace, self.path[:-1]) if len(self.path) > 1 else bytes(KEY_NBYTES)


@dataclass(frozen=True)
class Tombstone:
    key: bytes
    put_seq: int


_paths = st.lists(st.integers(0, 2), min_size=1, max_size=7).map(tuple)


@st.composite
def partitions(draw: st.DrawFn) -> list[list[Block | Tombstone]]:
    """Segments of one partition, in order of number; records in order of offset."""
    leaves = draw(st.lists(st.tuples(st.integers(0, 1), _paths, st.integers(0, 1)), max_size=8))
    blocks: list[Block] = []
    for namespace, path, sequence in leaves:
        missing = draw(st.integers(0, 15))  # most often no block of the chain
        blocks += [Block(namespace, path[:stop], sequence, 0) for stop in range(1, len(path) + 1) if stop != missing]
    order = draw(st.permutations(range(len(blocks)))) if draw(st.booleans()) else range(len(blocks))
    blocks = [replace(blocks[at], put_seq=at + 1) for at in order]
    records: list[Block | Tombstone] = []
    odd = draw(st.dictionaries(st.integers(0, len(blocks)), st.sampled_from(["off", "copy", "dead"]), max_size=6))
    for at, block in enumerate(blocks):
        what = odd.get(at)
        records.append(replace(block, depth_off=1) if what == "off" else block)
        if what == "copy":  # carried forward: a copy with the same number, perhaps in a later segment
            records.append(block)
        elif what == "dead":
            other = draw(st.sampled_from(blocks))
            records.append(Tombstone(other.key, draw(st.integers(0, len(blocks) + 1))))
    cuts = sorted(draw(st.lists(st.integers(0, len(records)), max_size=3)))
    return [records[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(records)], strict=True)]


def contents_of(number: int, records: list[Block | Tombstone]) -> SegmentContents:
    """As a footer would say it; the namespaces of every second segment are numbered the other way round."""
    digests = [one.digest for one in NAMESPACES]
    if number % 2:
        digests.reverse()
    entries = np.zeros(len(records), ENTRY_DTYPE)
    dead = []
    offset = 4096
    for row, record in zip(entries, records, strict=True):
        if isinstance(record, Tombstone):
            row["kind"], row["put_seq"], row["record_nbytes"], row["parts"] = 2, record.put_seq, 8192, 1
            row["payload_nbytes"], row["header_nbytes"] = 32, 4096
            dead.append((np.void(record.key), record.put_seq))
        else:
            row["key"], row["parent"] = np.void(record.key), np.void(record.parent)
            row["sequence"] = np.void(bytes([record.sequence] * 16))
            row["kind"], row["put_seq"], row["parts"] = 1, record.put_seq, 1
            row["depth"] = (len(record.path) - 1 + record.depth_off) % 2**32
            row["header_nbytes"], row["payload_nbytes"], row["record_nbytes"] = NBYTES[record.namespace]
            row["namespace"] = digests.index(NAMESPACES[record.namespace].digest)
        row["offset"] = offset
        offset += int(row["record_nbytes"])
    header = SegmentHeader(bytes(16), number.to_bytes(16, "little"), number, 0, 1 << 20)
    tombstones = np.array(dead, TOMBSTONE_DTYPE) if dead else np.zeros(0, TOMBSTONE_DTYPE)
    return SegmentContents(header, SegmentState.SEALED, entries, tuple(digests), tombstones, offset, offset + 8192)


@dataclass(frozen=True)
class Known:
    block: Block
    segment: int
    page: int


def _keys(one: Known) -> list[bytes]:
    """Its own key and those of all before it in its chain."""
    return [key_of(one.block.namespace, one.block.path[:n]) for n in range(1, len(one.block.path) + 1)]


def model(segments: list[list[Block | Tombstone]]) -> dict[tuple[int, Path], Known]:
    """What must be in the index, by namespace and path."""
    best: dict[bytes, Known] = {}
    dead: dict[bytes, int] = {}
    for number, records in enumerate(segments, 1):
        page = 1
        for record in records:
            if isinstance(record, Tombstone):
                dead[record.key] = max(dead.get(record.key, 0), record.put_seq)
                page += 2
                continue
            before = best.get(record.key)
            if before is None or record.put_seq >= before.block.put_seq:
                best[record.key] = Known(record, number, page)
            page += NBYTES[record.namespace][2] // 4096
    # dead is what was invalidated later than it was put, and what hangs on what was
    alive = {key: one for key, one in best.items() if one.block.put_seq >= max(dead.get(at, 0) for at in _keys(one))}
    found = {}
    for one in alive.values():
        above = [alive.get(key) for key in _keys(one)]
        if all(each is not None and not each.block.depth_off for each in above):
            found[one.block.namespace, one.block.path] = one
    return found


def chain_of(namespace: int, path: Path) -> KeyChain:
    keys = b"".join(key_of(namespace, path[: n + 1]) for n in range(len(path)))
    return KeyChain(NAMESPACES[namespace], bytes(KEY_NBYTES), keys)


def index_of(segments: list[list[Block | Tombstone]]) -> tuple[Core, int]:
    space = SegmentSpace(1 << 30, 1 << 20, footer_room_nbytes)
    core = Core(Ledger(4096, space), _ARENA, _DEVICE, (), _CLOCK)
    found = []
    for number, records in enumerate(segments, 1):
        contents = contents_of(number, records)
        found.append(RecoveredSegment(number, contents.file_nbytes, contents))
    return core, rebuild(core, found, 100.0)


@given(partitions())
@settings(max_examples=60, deadline=None)
def test_a_rebuilt_index_holds_what_a_dict_says(segments: list[list[Block | Tombstone]]) -> None:
    core, count = index_of(segments)
    ledger, table = core.ledger, core.ledger.table
    check_ledger(ledger)
    expected = model(segments)
    assert count == table.used == len(expected)
    for (namespace, path), one in expected.items():
        ids = ledger.find(chain_of(namespace, path))
        assert len(ids) == len(path)
        block = int(ids[-1])
        assert bytes(table.key[block]) == one.block.key
        assert int(table.put_seq[block]) == one.block.put_seq
        assert (int(table.segment[block]), int(table.page[block])) == (one.segment, one.page)
        assert table.slot[block] == NOWHERE
    for record in (record for records in segments for record in records if isinstance(record, Block)):
        known = [(record.namespace, record.path[: n + 1]) in expected for n in range(len(record.path))]
        assert len(ledger.find(chain_of(record.namespace, record.path))) == [*known, False].index(False)
    assert ledger.next_put_seq == max((one.put_seq for records in segments for one in records), default=0) + 1


@given(partitions())
@settings(max_examples=40, deadline=None)
def test_a_rebuilt_run_goes_on_until_a_fork_or_another_sequence(segments: list[list[Block | Tombstone]]) -> None:
    """And is as young as the youngest of its blocks, and of all that hangs on them: a millisecond for each put."""
    core, _ = index_of(segments)
    ledger = core.ledger
    expected = model(segments)
    newest = ledger.next_put_seq - 1
    for (namespace, path), one in expected.items():
        run = ledger.run_of(int(ledger.find(chain_of(namespace, path))[-1]))
        children = [other for other in expected if other[0] == namespace and other[1][:-1] == path]
        joined = len(children) == 1 and expected[children[0]].block.sequence == one.block.sequence
        last = run.ids[-1] == ledger.find(chain_of(namespace, path))[-1]
        assert last != joined
        begin = path[: run.depth + 1]
        below = [
            other.block.put_seq
            for (owner, place), other in expected.items()
            if owner == namespace and place[: len(begin)] == begin
        ]
        used_s = float(ledger.tree.used_s[run.number])
        assert abs(used_s - (100.0 - (newest - max(below)) * 1e-3)) < 1e-9
        assert run.sequence == bytes([one.block.sequence] * 16)


def test_namespaces_keep_their_sizes() -> None:
    core, _ = index_of([[Block(0, (1,), 0, 1)], [Block(1, (1,), 0, 2)]])
    sizes = {entry.digest: entry.geometry.record_nbytes for entry in core.namespaces}
    assert sizes == {SMALL.digest: SMALL_NBYTES, LARGE.digest: LARGE_NBYTES}
    assert core.ledger.space is not None
    assert core.ledger.space.live_nbytes == SMALL_NBYTES + LARGE_NBYTES


def test_a_block_does_not_hang_on_one_of_another_namespace() -> None:
    space = SegmentSpace(1 << 30, 1 << 20, footer_room_nbytes)
    core = Core(Ledger(4096, space), _ARENA, _DEVICE, (), _CLOCK)
    contents = contents_of(1, [Block(0, (1,), 0, 1), Block(1, (1, 1), 0, 2)])
    contents.entries["parent"][1] = np.void(key_of(0, (1,)))
    assert rebuild(core, [RecoveredSegment(1, contents.file_nbytes, contents)], 100.0) == 1
    check_ledger(core.ledger)
