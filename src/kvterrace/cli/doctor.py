"""`kvterrace doctor`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from kvterrace.cli.tables import print_json
from kvterrace.observe.machine import Finding, State, examine

__all__ = ["SCHEMA", "command"]

#: Name and version of what `--json` prints; see docs/reference/cli.md.
SCHEMA = "kvterrace.doctor/1"


def command(
    directory: Annotated[Path, typer.Argument(metavar="[DIR]", help="Where a store is, or is to be.")] = Path(),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of lines.")] = False,
) -> None:
    """Say what this machine and a drive of it let a store do. Exit status: 0 all is well, 1 there is a problem."""
    findings = examine(directory)
    good = all(finding.state is not State.PROBLEM for finding in findings)
    if as_json:
        print_json(
            {
                "schema": SCHEMA,
                "path": str(directory.absolute()),
                "good": good,
                "findings": [_finding_json(finding) for finding in findings],
            }
        )
    else:
        sys.stdout.write("".join(_line(finding) for finding in findings))
    if not good:
        raise typer.Exit(1)


def _line(finding: Finding) -> str:
    remedy = f" -> {finding.remedy}" if finding.remedy else ""
    text = f"{finding.state:<7}  {finding.name}: {finding.text}{remedy}"
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text) + "\n"


def _finding_json(finding: Finding) -> dict[str, object]:
    return {
        "name": finding.name,
        "state": str(finding.state),
        "text": finding.text,
        "remedy": finding.remedy or None,
        "value": finding.value,
    }
