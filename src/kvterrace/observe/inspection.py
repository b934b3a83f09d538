"""What a store's folder holds, without opening the store: no lock, no change, whatever its state. No terminal.

Everything here is read from the drive: blocks that another process keeps only in DRAM are not seen. Sealed segments
cost three small reads each; others are read in full.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvterrace.format.record import PAGE_NBYTES, RecordKind
from kvterrace.format.recovery import LiveEntries, SegmentContents, live_entries, scan_segment
from kvterrace.format.recovery import SegmentState as ScanState
from kvterrace.format.segment import TRAILER_MAGIC, BadSegment, NewerFormat, SegmentHeader
from kvterrace.keys import Namespace
from kvterrace.observe.chains import Chains
from kvterrace.observe.folder import Marker, SegmentFile, StoreFolder, writer_pid
from kvterrace.observe.inspected import NamespaceShare, PartitionReport, RunReport, SegmentCondition, SegmentReport
from kvterrace.observe.medium import MediumFile
from kvterrace.observe.quarantined import read_quarantine

__all__ = [
    "Inspection",
    "TenantShare",
    "inspect_store",
    "sealing_traces",
]

_LARGEST_RUNS = 5
_TRIES = 3
_NO_SEQUENCE = bytes(16)
_NOTHING = (0, 0)


@dataclass(slots=True)
class TenantShare:
    """What one tenant has in a store: described namespaces, and of them blocks that an opened store finds. `tenant`:
    empty for namespaces of no tenant, None for those without a description to believe.
    """

    tenant: str | None
    namespaces: int = 0
    blocks: int = 0
    record_nbytes: int = 0


@dataclass(slots=True)
class Inspection:
    """A store. `namespaces`: what was read of each described digest, a text where its description is of no use."""

    root: Path
    marker: Marker
    namespaces: dict[bytes, Namespace | str]
    partitions: list[PartitionReport]
    problems: list[str]

    def tenants(self) -> list[TenantShare]:
        """What each tenant's namespaces hold, over all partitions; the largest first. Tenant None: not known."""
        shares = dict.fromkeys(self.namespaces, _NOTHING)
        for share in (share for partition in self.partitions for share in partition.shares):
            blocks, nbytes = shares.get(share.digest, _NOTHING)
            shares[share.digest] = (blocks + share.blocks, nbytes + share.record_nbytes)
        found: dict[str | None, TenantShare] = {}
        for digest, (blocks, nbytes) in shares.items():
            described = self.namespace(digest)
            name = None if described is None else described.tenant
            one = found.setdefault(name, TenantShare(name))
            one.namespaces += 1
            one.blocks += blocks
            one.record_nbytes += nbytes
        return sorted(found.values(), key=lambda one: (-one.record_nbytes, one.tenant or ""))

    def namespace(self, digest: bytes) -> Namespace | None:
        """What `digest` stands for; None where no believable description is there."""
        found = self.namespaces.get(digest)
        return found if isinstance(found, Namespace) else None


def inspect_store(root: Path) -> Inspection:
    """Read what `root` holds. Blocks; memory grows with the index (about 1 KB a block), not with the data.

    Raises:
        StoreUnusableError: or one of its kinds: no store, a newer format, no access. OSError: a folder cannot be read.
    """
    folder = StoreFolder(root)
    problems = [folder.marker.problem] if folder.marker.problem else []
    namespaces = folder.namespaces()
    problems += [
        f"namespaces/{digest.hex()}.json {found}" for digest, found in namespaces.items() if isinstance(found, str)
    ]
    problems += [
        f"{path.relative_to(root)} was left by a purge that was interrupted: run the purge again"
        for path in folder.unfinished_purges()
    ]
    partitions = [_inspect_partition(folder, path) for path in folder.partitions()]
    return Inspection(root, folder.marker, namespaces, partitions, problems)


def sealing_traces(header: SegmentHeader, last_page: bytes, file_nbytes: int) -> str | None:
    """Why a segment whose trailer cannot be believed must once have had one; None if nothing says so.

    A segment is given its whole size when it is made and cut behind its trailer when it is sealed; so a shorter one was
    sealed, or cut by something else, or lies on a file system that reserves nothing.
    """
    if last_page[:8] == TRAILER_MAGIC or last_page[16:32] == header.nonce:
        return "it was sealed, but its footer or trailer is damaged"
    if file_nbytes < header.capacity:
        return f"it is {file_nbytes} B long, was made with {header.capacity} B, and has no footer: it was cut"
    return None


def _inspect_partition(folder: StoreFolder, path: Path) -> PartitionReport:
    report = PartitionReport(path.name, path, writer_pid(path))
    contents: list[SegmentContents] = []
    reports: list[SegmentReport] = []
    try:
        files = folder.segments(path)
    except OSError as error:
        report.problems.append(f"cannot be read: {error.strerror or error}")
        return report
    for file in files:
        found = _inspect_segment(file, folder.marker.store_uuid)
        if found is None:
            report.problems.append(f"{file.path.name} was removed while it was looked at")
            continue
        segment, content = found
        report.segments.append(segment)
        if content is not None:
            contents.append(content)
            reports.append(segment)
            report.tombstone_keys += len(content.tombstones)
            for rows in (content.entries, content.tombstones):
                if len(rows):
                    report.highest_put_seq = max(report.highest_put_seq, int(rows["put_seq"].max()))
    quarantined = read_quarantine(path, folder.marker.store_uuid)
    report.problems += quarantined.problems
    report.failed_blocks = len(quarantined.strikes)
    report.bad_places = sum(len(quarantined.places.get(one.header.nonce, ())) for one in contents)
    live = live_entries(contents)
    if len(live.entries):
        _count_live(report, reports, live)
    return report


_Inspected = tuple[SegmentReport, SegmentContents | None]


def _inspect_segment(file: SegmentFile, store_uuid: bytes | None) -> _Inspected | None:
    report = SegmentReport(file.number, file.path, SegmentCondition.UNREADABLE, file.nbytes, file.allocated_nbytes)
    try:
        with MediumFile(file.path, piece_nbytes=1 << 20) as medium:
            for _ in range(_TRIES):
                nbytes = medium.nbytes
                found = scan_segment(medium.read, nbytes)
                if medium.nbytes == nbytes:  # else it was sealed, and so cut, while it was read
                    break
            report.file_nbytes = nbytes
            traces = None
            if isinstance(found, SegmentContents) and found.state is ScanState.SCANNED:
                last = bytes(medium.read((nbytes - 1) // PAGE_NBYTES * PAGE_NBYTES, PAGE_NBYTES))
                traces = sealing_traces(found.header, last, nbytes) if found.data_end < nbytes else None
    except FileNotFoundError:
        return None
    except OSError as error:
        report.problems.append(f"cannot be read: {error.strerror or error}")
        return report, None
    match found:
        case SegmentContents():
            return report, _describe(report, found, store_uuid, traces)
        case BadSegment(reason):
            report.condition = SegmentCondition.DAMAGED
            report.problems.append(reason)
        case NewerFormat(version):
            report.condition = SegmentCondition.NEWER
            report.problems.append(f"segment format {version}: upgrade kvterrace to read it")
        case _:
            report.problems.append(found.reason)
    return report, None


def _describe(
    report: SegmentReport, found: SegmentContents, store_uuid: bytes | None, traces: str | None
) -> SegmentContents | None:
    """Fill in `report`; returns the contents if the store would use them."""
    sealed = found.state is ScanState.SEALED
    report.capacity_nbytes = found.header.capacity
    report.created_unix_ns = found.header.created_unix_ns
    report.used_nbytes = found.file_nbytes if sealed else found.data_end
    is_block = found.entries["kind"] == RecordKind.BLOCK
    report.blocks = int(is_block.sum())
    report.tombstones = len(found.entries) - report.blocks
    report.record_nbytes = int(found.entries["record_nbytes"].sum(dtype=np.uint64))
    report.condition = SegmentCondition.SEALED if sealed else SegmentCondition.UNSEALED
    if not sealed:
        report.problems += [problem for problem in found.problems if not problem.startswith(("trailer", "not sealed"))]
    if traces is not None:
        report.condition = SegmentCondition.DAMAGED
        report.problems.insert(0, traces)
    if store_uuid is not None and found.header.store_uuid != store_uuid:
        report.problems.insert(0, f"it belongs to another store, {found.header.store_uuid.hex()}")
    elif found.header.segment_id != report.number:
        report.problems.insert(0, f"it is segment {found.header.segment_id:08x} under another name")
    else:
        return found
    report.condition = SegmentCondition.DAMAGED
    return None


def _count_live(report: PartitionReport, segments: Sequence[SegmentReport], live: LiveEntries) -> None:
    entries = live.entries
    chains = Chains(entries)
    found = chains.rooted
    sizes = entries["record_nbytes"].astype(np.int64)
    for number, segment in enumerate(segments):
        mine = found & (live.segments == number)
        segment.live_blocks = int(mine.sum())
        segment.live_nbytes = int(sizes[mine].sum())
    sequences = np.ascontiguousarray(entries["sequence"])
    heads, run_of = np.unique(chains.head[found], return_inverse=True)
    run_blocks = np.bincount(run_of, minlength=len(heads))
    run_nbytes = np.bincount(run_of, sizes[found], len(heads)).astype(np.int64)
    for number, digest in enumerate(live.namespaces):
        of_it = entries["namespace"] == number
        if not of_it.any():
            continue
        mine = found & of_it
        created = entries["created_unix_ns"][mine]
        names, counts = np.unique(sequences[mine], return_counts=True)
        unnamed = [int(count) for name, count in zip(names, counts, strict=True) if name.tobytes() == _NO_SEQUENCE]
        report.shares.append(
            NamespaceShare(
                digest,
                blocks=int(mine.sum()),
                orphan_blocks=int(of_it.sum()) - int(mine.sum()),
                record_nbytes=int(sizes[mine].sum()),
                payload_nbytes=int(entries["payload_nbytes"][mine].sum(dtype=np.uint64)),
                runs=int((entries["namespace"][heads] == number).sum()),
                sequences=len(names) - len(unnamed),
                unnamed_blocks=sum(unnamed),
                oldest_unix_ns=int(created.min()) if len(created) else 0,
                newest_unix_ns=int(created.max()) if len(created) else 0,
            )
        )
    for at in np.lexsort((heads, -run_nbytes))[:_LARGEST_RUNS]:
        row = entries[heads[at]]
        report.largest_runs.append(
            RunReport(
                live.namespaces[int(row["namespace"])],
                row["sequence"].tobytes(),
                int(row["depth"]),
                int(run_blocks[at]),
                int(run_nbytes[at]),
            )
        )
