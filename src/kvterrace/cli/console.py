"""Where output goes: answers to stdout, everything about them to stderr, errors as one line."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from kvterrace.errors import ConfigError

__all__ = ["fail", "few_warnings", "human_nbytes", "stderr", "write_json"]

#: Progress, tables and notes.
stderr = Console(stderr=True, highlight=False)


def fail(message: str) -> None:
    """Say in one line on stderr what went wrong and what to do."""
    line = " ".join(message.split())
    sys.stderr.write(f"kvterrace: {line}\n")
    sys.stderr.flush()


@contextmanager
def few_warnings(most: int = 3) -> Iterator[None]:
    """The library's warnings go to stderr, the first `most` of them; of the others only how many they were."""
    handler = _FewLines(most)
    logger = logging.getLogger("kvterrace")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        if handler.left_out:
            fail(f"... and {handler.left_out} more warnings")


class _FewLines(logging.Handler):
    def __init__(self, most: int) -> None:
        super().__init__(logging.WARNING)
        self._room = most
        self.left_out = 0

    def emit(self, record: logging.LogRecord) -> None:
        if self._room <= 0:
            self.left_out += 1
            return
        self._room -= 1
        try:
            fail(record.getMessage())
        except (TypeError, ValueError, OSError):  # a wrong format, a closed stderr
            self.handleError(record)


def human_nbytes(nbytes: int) -> str:
    """`1536` -> `"1.5 KiB"`."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def write_json(path: Path, data: Mapping[str, object]) -> None:
    """Write `data` to `path`, whole or not at all; a pipe or a device (/dev/stdout) is written to as it is. Raises
    ConfigError where that cannot be.
    """
    in_place = path.exists() and not path.is_file()
    part = path if in_place else path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_text(json.dumps(data, indent=2, default=str) + "\n", encoding="utf-8")
        if not in_place:
            part.replace(path)
    except OSError as error:
        if not in_place:
            part.unlink(missing_ok=True)
        raise ConfigError(f"cannot write {path}: {error.strerror or error}: give --json another place") from error
