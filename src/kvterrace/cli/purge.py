"""`kvterrace purge`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from kvterrace.cli.console import human_nbytes, stderr
from kvterrace.cli.tables import count, print_json, safe, stdout, table
from kvterrace.errors import ConfigError
from kvterrace.maintenance.purge import purge_store
from kvterrace.maintenance.report import PurgeReport
from kvterrace.maintenance.selection import ByNamespace, BySequence, ByTenant, Target

__all__ = ["EPILOGUE", "SCHEMA", "command"]

#: Name and version of what `--json` prints; see docs/reference/cli.md.
SCHEMA = "kvterrace.purge/1"

EPILOGUE = (
    "What it cannot reach: an SSD keeps old copies of overwritten flash pages until it collects them; snapshots, "
    "backups and copy-on-write file systems (btrfs, zfs) keep old blocks; and segments that the store itself removed "
    "earlier were not overwritten; of blocks that were in these, keys (hashes) may be left among the tombstones. Where "
    "that matters, keep the store on an encrypted volume and destroy its key."
)


def command(
    directories: Annotated[
        list[Path],
        typer.Argument(metavar="DIR...", help="Folder of the store, on each of its drives; no process may write it."),
    ],
    namespace: Annotated[
        str | None, typer.Option(metavar="DIGEST", help="A namespace: its digest, or the first digits of it.")
    ] = None,
    sequence: Annotated[
        str | None, typer.Option(metavar="LABEL", help="Blocks put under this label: text, or hex:6b7631.")
    ] = None,
    tenant: Annotated[str | None, typer.Option(metavar="NAME", help="All namespaces of this tenant.")] = None,
    partition: Annotated[str | None, typer.Option(metavar="NAME", help="Only this partition.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Change nothing; show what would go.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Remove the blocks of a namespace, tenant or sequence, and overwrite their bytes.

    What hangs on them goes too. Exit status: 0 done, 1 something could not be purged, 2 bad input.
    """
    target = _target(namespace, sequence, tenant)
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TimeRemainingColumn(),
        console=stderr,
        transient=True,
        disable=not stderr.is_terminal,
    )
    with bar:
        task = bar.add_task("", total=None)

        def told(what: str, done: int, total: int) -> None:
            bar.update(task, description=safe(what), completed=done, total=total)

        report = purge_store(directories, target, partition=partition, dry_run=dry_run, on_progress=told)
    if as_json:
        print_json(report_json(directories, report, dry_run=dry_run))
    else:
        _show(report, stdout(), dry_run=dry_run)
    if not report.complete:
        raise typer.Exit(1)


def _target(namespace: str | None, sequence: str | None, tenant: str | None) -> Target:
    given = [option for option in (namespace, sequence, tenant) if option is not None]
    if len(given) != 1:
        raise ConfigError(f"give one of --namespace, --sequence and --tenant, not {len(given)}")
    if namespace is not None:
        return ByNamespace(namespace.lower())
    if sequence is not None:
        return BySequence.parse(sequence)
    assert tenant is not None
    return ByTenant(tenant)


def report_json(directories: list[Path], report: PurgeReport, *, dry_run: bool) -> dict[str, object]:
    """A report as plain data: the schema of `--json`."""
    return {
        "schema": SCHEMA,
        "paths": [str(one) for one in directories],
        "dry_run": dry_run,
        "complete": report.complete,
        "namespaces": [digest.hex() for digest in report.digests],
        "partitions": [asdict(one) for one in report.partitions],
        "descriptions_removed": [digest.hex() for digest in report.descriptions],
        "undescribed": [
            {"digest": digest.hex(), "records": records, "record_nbytes": nbytes}
            for digest, (records, nbytes) in sorted(report.undescribed.items())
        ],
        "finished": report.finished,
        "room_nbytes": report.room_nbytes,
        "damaged": report.damaged,
        "notes": report.notes,
        "failures": [{"where": one.where, "what": one.what} for one in report.failures],
    }


def _show(report: PurgeReport, out: Console, *, dry_run: bool) -> None:
    rows = table(
        "would be purged" if dry_run else "purged",
        "partition",
        ">records",
        ">of them live",
        ">other copies",
        ">hanging on them",
        ">bytes",
        ">invalidated keys",
        ">segments rewritten",
        ">bytes carried over",
    )
    for one in report.partitions:
        rows.add_row(
            safe(one.name),
            f"{one.records:,}",
            f"{one.live_records:,}",
            f"{one.copy_records:,}",
            f"{one.descendant_records:,}",
            human_nbytes(one.record_nbytes),
            f"{one.tombstone_keys:,}",
            f"{one.segments:,}",
            human_nbytes(one.copied_nbytes),
        )
    if rows.row_count:
        out.print(rows)
    for line in _lines(report, dry_run=dry_run):
        out.print(safe(line), soft_wrap=True)


def _lines(report: PurgeReport, *, dry_run: bool) -> list[str]:
    parts = report.partitions
    records = sum(one.records for one in parts)
    lines = []
    if not records:
        lines.append("no record of it was found")
    hanging = sum(one.descendant_records for one in parts)
    if hanging:
        lines.append(f"{count(hanging, 'record')} of other labels hung on them and could never have been matched again")
    if dry_run and report.room_nbytes:
        lines.append(f"it takes at least {human_nbytes(report.room_nbytes)} of free room for a while")
    overwritten = sum(one.overwritten_nbytes for one in parts)
    unknown = sum(one.unknown_nbytes for one in parts)
    if overwritten:
        lines.append(f"{human_nbytes(overwritten)} were overwritten with zeros before their files were removed")
    if unknown:
        lines.append(f"{human_nbytes(unknown)} in them belonged to no record, and could have been anything")
    entries = sum(one.quarantine_entries for one in parts)
    if entries:
        lines.append(f"of the quarantine logs, {count(entries, 'line')} named a purged block and were zeroed")
    lines += [f"{name}: left by an interrupted purge; overwritten and removed" for name in report.finished]
    lines += [f"description of namespace {digest.hex()}: removed" for digest in report.descriptions]
    damaged = sum(one.damaged_records for one in parts)
    if damaged:
        lines.append(f"{count(damaged, 'record')} that should have stayed were damaged, and are gone:")
        lines += [f"  {where}" for where in report.damaged]
    lines += [f"note: {note}" for note in report.notes]
    lines += [
        f"! namespace {digest.hex()} has no description, so its tenant is not known: {count(number, 'record')}, "
        f"{human_nbytes(nbytes)}; if it is one of this tenant, purge it with --namespace"
        for digest, (number, nbytes) in sorted(report.undescribed.items())
    ]
    lines += [f"! {one.where}: {one.what}" for one in report.failures]
    return lines
