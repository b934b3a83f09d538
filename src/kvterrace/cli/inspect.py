"""`kvterrace inspect`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from kvterrace.cli.console import human_nbytes, stderr
from kvterrace.cli.tables import ago, count, date, layout_words, print_json, safe, stdout, table
from kvterrace.keys import Namespace
from kvterrace.observe.inspected import NamespaceShare, PartitionReport, RunReport, SegmentCondition, SegmentReport
from kvterrace.observe.inspection import Inspection, inspect_store

__all__ = ["SCHEMA", "command", "report_json"]

#: Name and version of what `--json` prints; see docs/reference/cli.md.
SCHEMA = "kvterrace.inspect/1"
_SHOWN_SEGMENTS = 20


def command(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the store.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Show what a store holds. Reads only: also while another process has it open, also if it is damaged."""
    with stderr.status(f"reading {safe(str(directory))}"):
        report = inspect_store(directory)
    if as_json:
        print_json(report_json(report))
    else:
        _show(report, stdout())


# -- JSON --------------------------------------------------------------------------------------------------------------


def report_json(report: Inspection) -> dict[str, object]:
    """A report as plain data: the schema of `--json`."""
    marker = report.marker
    used = {share.digest for partition in report.partitions for share in partition.shares}
    return {
        "schema": SCHEMA,
        "path": str(report.root),
        "format_version": marker.format_version,
        "uuid": None if marker.store_uuid is None else marker.store_uuid.hex(),
        "created_unix_s": marker.created_unix_s,
        "drives": None if marker.drive is None else marker.drive.to_json(),
        "problems": report.problems,
        "namespaces": [
            _namespace_json(digest, report.namespace(digest)) for digest in sorted(used | set(report.namespaces))
        ],
        "tenants": [asdict(one) for one in report.tenants()],
        "partitions": [_partition_json(partition) for partition in report.partitions],
    }


def _namespace_json(digest: bytes, namespace: Namespace | None) -> dict[str, object]:
    if namespace is None:
        return {"digest": digest.hex(), "described": False}
    layout = namespace.layout
    sizes = {"block_nbytes": layout.block_nbytes, "nbytes_per_token": layout.nbytes_per_token}
    return {"digest": digest.hex(), "described": True, **namespace.describe(), **sizes}


def _partition_json(report: PartitionReport) -> dict[str, object]:
    states = {condition.value: 0 for condition in SegmentCondition}
    for segment in report.segments:
        states[segment.condition.value] += 1
    return {
        "name": report.name,
        "writer_pid": report.writer_pid,
        "problems": report.problems,
        "blocks": sum(share.blocks for share in report.shares),
        "orphan_blocks": sum(share.orphan_blocks for share in report.shares),
        "tombstone_keys": report.tombstone_keys,
        "bad_places": report.bad_places,
        "failed_blocks": report.failed_blocks,
        "file_nbytes": report.file_nbytes,
        "allocated_nbytes": report.allocated_nbytes,
        "live_nbytes": report.live_nbytes,
        "dead_nbytes": report.dead_nbytes,
        "other_nbytes": report.other_nbytes,
        "highest_put_seq": report.highest_put_seq,
        "highest_segment": report.highest_segment,
        "written_nbytes_at_least": report.written_nbytes_at_least,
        "written_nbytes_at_most_about": report.written_nbytes_at_most_about,
        "segment_states": states,
        "namespaces": [_share_json(share) for share in report.shares],
        "largest_runs": [_run_json(run) for run in report.largest_runs],
        "segments": [_segment_json(segment) for segment in report.segments],
    }


def _share_json(share: NamespaceShare) -> dict[str, object]:
    return {
        "digest": share.digest.hex(),
        "blocks": share.blocks,
        "orphan_blocks": share.orphan_blocks,
        "record_nbytes": share.record_nbytes,
        "payload_nbytes": share.payload_nbytes,
        "runs": share.runs,
        "sequences": share.sequences,
        "unnamed_blocks": share.unnamed_blocks,
        "oldest_created_unix_ns": share.oldest_unix_ns,
        "newest_created_unix_ns": share.newest_unix_ns,
    }


def _run_json(run: RunReport) -> dict[str, object]:
    return {
        "digest": run.digest.hex(),
        "sequence": run.sequence.hex(),
        "first_depth": run.first_depth,
        "blocks": run.blocks,
        "record_nbytes": run.record_nbytes,
    }


def _segment_json(segment: SegmentReport) -> dict[str, object]:
    plain = asdict(segment)
    del plain["path"], plain["condition"], plain["number"]
    return {
        "number": segment.number,
        "file": segment.path.name,
        "state": segment.condition.value,
        **plain,
    }


# -- tables ------------------------------------------------------------------------------------------------------------


def _show(report: Inspection, out: Console) -> None:
    marker = report.marker
    made = "" if marker.created_unix_s is None else f", made {date(int(marker.created_unix_s * 1e9))}"
    out.print(
        f"store {safe(str(report.root))}: format {marker.format_version or '?'}, "
        f"uuid {marker.store_uuid.hex() if marker.store_uuid else '?'}{made}"
    )
    if marker.drive is not None and marker.drive.count > 1:
        out.print(
            f"drive {marker.drive.index + 1} of {marker.drive.count} of its store: chains run over all of them; this "
            "is what lies here"
        )
    for problem in report.problems:
        out.print(f"! {safe(problem)}")
    _show_namespaces(report, out)
    _show_tenants(report, out)
    for partition in report.partitions:
        out.print()
        _show_partition(report, partition, out)
    if not report.partitions:
        out.print("no partitions: nothing was stored yet")


def _show_namespaces(report: Inspection, out: Console) -> None:
    used = {share.digest for partition in report.partitions for share in partition.shares}
    rows = table("namespaces", "digest", "model", "layout", ">block", ">epoch", "tenant", "codec", "numerics")
    for digest in sorted(used | set(report.namespaces)):
        namespace = report.namespace(digest)
        if namespace is None:
            rows.add_row(digest.hex(), "?", "description missing", "", "", "", "", "")
            continue
        rows.add_row(
            digest.hex()[:12],
            safe(namespace.model),
            safe(layout_words(namespace.layout)),
            human_nbytes(namespace.layout.block_nbytes),
            str(namespace.epoch),
            safe(namespace.tenant) or "-",
            safe(namespace.codec),
            safe(namespace.numerics) or "-",
        )
    if rows.row_count:
        out.print(rows)


def _show_tenants(report: Inspection, out: Console) -> None:
    rows = table("tenants", "tenant", ">namespaces", ">live blocks", ">on the drive")
    for one in report.tenants():
        name = "? (no description)" if one.tenant is None else safe(one.tenant) or "-"
        rows.add_row(name, f"{one.namespaces:,}", f"{one.blocks:,}", human_nbytes(one.record_nbytes))
    if rows.row_count:
        out.print(rows)


def _show_partition(report: Inspection, part: PartitionReport, out: Console) -> None:
    writer = f"process {part.writer_pid} writes it now" if part.writer_pid else "no writer seen"
    out.print(f"partition {safe(part.name)}: {writer}")
    for problem in part.problems:
        out.print(f"! {safe(problem)}")
    blocks = table(
        "live blocks",
        "namespace",
        ">blocks",
        ">on the drive",
        ">KV",
        ">tokens",
        ">runs",
        ">sequences",
        "oldest",
        "newest",
    )
    for share in part.shares:
        namespace = report.namespace(share.digest)
        blocks.add_row(
            share.digest.hex()[:12],
            f"{share.blocks:,}",
            human_nbytes(share.record_nbytes),
            human_nbytes(share.payload_nbytes),
            f"{share.blocks * namespace.layout.block_tokens:,}" if namespace else "?",
            f"{share.runs:,}",
            f"{share.sequences:,}" + (f" + {share.unnamed_blocks:,} blocks of none" if share.unnamed_blocks else ""),
            ago(share.oldest_unix_ns),
            ago(share.newest_unix_ns),
        )
    out.print(blocks)
    if part.bad_places or part.failed_blocks:
        out.print(
            f"quarantine: {count(part.bad_places, 'bad place')}, not read again; "
            f"{count(part.failed_blocks, 'block')} that went wrong"
        )
    orphans = sum(share.orphan_blocks for share in part.shares)
    drive = report.marker.drive
    alone = drive is None or drive.count == 1
    if orphans:
        why = "never matched, reclaimed with its segment" if alone else "the rest of it is on other drives, or nowhere"
        out.print(f"{count(orphans, 'more block')} without the whole prefix: {why}")
    _show_space(part, out, alone=alone)
    _show_runs(report, part, out)
    _show_segments(part, out)


def _show_space(part: PartitionReport, out: Console, *, alone: bool) -> None:
    space = table("space and wear", "what", ">bytes", "")
    dead = "reclaimed with their segment" if alone else "among them blocks that begin on another drive"
    space.add_row(
        "segment files", human_nbytes(part.file_nbytes), f"{human_nbytes(part.allocated_nbytes)} of the drive"
    )
    space.add_row("live records", human_nbytes(part.live_nbytes), _share_of(part.live_nbytes, part.file_nbytes))
    space.add_row("dead records", human_nbytes(part.dead_nbytes), dead)
    space.add_row("other", human_nbytes(part.other_nbytes), "headers, footers, room that holds no record yet")
    space.add_row("written, at least", human_nbytes(part.written_nbytes_at_least), "into the files that are there now")
    space.add_row(
        "written, at most about",
        human_nbytes(part.written_nbytes_at_most_about),
        f"{part.highest_segment:,} segments were numbered; if each was full, and no number was given twice",
    )
    out.print(space)
    dropped = f"; {count(part.tombstone_keys, 'invalidated key')} on record" if part.tombstone_keys else ""
    out.print(f"highest put-sequence number on the drive: {part.highest_put_seq:,}{dropped}")


def _share_of(nbytes: int, of_nbytes: int) -> str:
    return f"{100 * nbytes / of_nbytes:.0f} % of the files" if of_nbytes else ""


def _show_runs(report: Inspection, part: PartitionReport, out: Console) -> None:
    rows = table("largest runs", "namespace", "sequence", ">from block", ">blocks", ">tokens", ">on the drive")
    for run in part.largest_runs:
        namespace = report.namespace(run.digest)
        rows.add_row(
            run.digest.hex()[:12],
            _sequence_words(run.sequence),
            f"{run.first_depth:,}",
            f"{run.blocks:,}",
            f"{run.blocks * namespace.layout.block_tokens:,}" if namespace else "?",
            human_nbytes(run.record_nbytes),
        )
    if rows.row_count:
        out.print(rows)


def _sequence_words(sequence: bytes) -> str:
    name = sequence.rstrip(b"\0")
    if not name:
        return "-"
    return safe(name.decode("ascii")) if name.isascii() and name.decode("ascii").isprintable() else sequence.hex()


def _show_segments(part: PartitionReport, out: Console) -> None:
    by_state = [(state, [one for one in part.segments if one.condition is state]) for state in SegmentCondition]
    out.print(
        f"{count(len(part.segments), 'segment')}: "
        + (", ".join(f"{len(some):,} {state.value}" for state, some in by_state if some) or "none")
    )
    sealed = [one for one in part.segments if one.condition is SegmentCondition.SEALED]
    others = [one for one in part.segments if one.condition is not SegmentCondition.SEALED]
    shown = sorted(others + sealed[-max(_SHOWN_SEGMENTS - len(others), 0) :], key=lambda one: one.number)
    if len(others) >= _SHOWN_SEGMENTS:
        shown = others[:_SHOWN_SEGMENTS]
    rows = table("segments", "file", "state", ">file", ">blocks", ">live", ">live bytes", "made", "remark")
    for one in shown:
        rows.add_row(
            one.path.name,
            one.condition.value,
            human_nbytes(one.file_nbytes),
            f"{one.blocks:,}",
            f"{one.live_blocks:,}",
            human_nbytes(one.live_nbytes),
            ago(one.created_unix_ns),
            safe("; ".join(one.problems[:3])),
        )
    if rows.row_count:
        out.print(rows)
    if len(shown) < len(part.segments):
        out.print(f"... and {len(part.segments) - len(shown):,} more segments; --json lists all of them")
