"""`kvterrace verify`."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from kvterrace.cli.console import human_nbytes, stderr
from kvterrace.cli.tables import count, print_json
from kvterrace.observe.verification import Fault, Verification, verify_store

__all__ = ["SCHEMA", "command"]

#: Name and version of what `--json` prints; see docs/reference/cli.md.
SCHEMA = "kvterrace.verify/1"


def command(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the store.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of lines.")] = False,
) -> None:
    """Read all of a store and check every checksum. Changes nothing. Exit status: 0 clean, 1 faults, 2 cannot tell."""
    began_s = time.monotonic()
    bar = Progress(
        TextColumn("verifying"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=stderr,
        transient=True,
        disable=not stderr.is_terminal,
    )
    with bar:
        task = bar.add_task("", total=None)
        found = verify_store(directory, lambda done, total: bar.update(task, completed=done, total=total))
    elapsed_s = time.monotonic() - began_s
    if as_json:
        print_json(_found_json(directory, found, elapsed_s))
    else:
        _show(found, elapsed_s)
    if not found.clean:
        raise typer.Exit(1)


def _show(found: Verification, elapsed_s: float) -> None:
    lines = [_line("fault", fault) for fault in found.faults]
    if found.faults_left_out:
        lines.append(f"fault: ... and {found.faults_left_out:,} more")
    lines += [_line("note", note) for note in found.notes]
    if found.notes_left_out:
        lines.append(f"note: ... and {found.notes_left_out:,} more")
    if found.bad_places or found.failed_blocks:
        lines.append(
            f"quarantine: {count(found.bad_places, 'bad place')}, not read again; "
            f"{count(found.failed_blocks, 'block')} that went wrong"
        )
    faults = len(found.faults) + found.faults_left_out
    lines.append(
        f"{'clean' if found.clean else count(faults, 'fault')}: {count(found.blocks, 'block')}, "
        f"{count(found.tombstones, 'tombstone')} and {count(found.parts, 'part')} sound in "
        f"{count(found.segments, 'segment')}; {human_nbytes(found.read_nbytes)} read in {elapsed_s:.1f} s, "
        f"{'past the page cache' if found.direct else 'O_DIRECT refused, page cache dropped where possible'}"
    )
    sys.stdout.write("".join(line + "\n" for line in lines))


def _line(kind: str, fault: Fault) -> str:
    key = "" if fault.key is None else f" key {fault.key.hex()}"
    text = f"{kind}: {fault.where}{key}: {fault.what}"
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)


def _found_json(directory: Path, found: Verification, elapsed_s: float) -> dict[str, object]:
    return {
        "schema": SCHEMA,
        "path": str(directory),
        "clean": found.clean,
        "faults": [_fault_json(fault) for fault in found.faults],
        "faults_left_out": found.faults_left_out,
        "notes": [_fault_json(note) for note in found.notes],
        "notes_left_out": found.notes_left_out,
        "partitions": found.partitions,
        "segments": found.segments,
        "blocks": found.blocks,
        "tombstones": found.tombstones,
        "parts": found.parts,
        "bad_places": found.bad_places,
        "failed_blocks": found.failed_blocks,
        "read_nbytes": found.read_nbytes,
        "direct_io": found.direct,
        "elapsed_s": elapsed_s,
    }


def _fault_json(fault: Fault) -> dict[str, object]:
    return {"where": fault.where, "key": None if fault.key is None else fault.key.hex(), "what": fault.what}
