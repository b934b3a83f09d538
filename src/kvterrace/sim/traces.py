"""Request traces, as chains of block ids with times."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvterrace.errors import ConfigError

__all__ = ["TraceRequest", "read_trace"]


@dataclass(frozen=True, slots=True, eq=False)
class TraceRequest:
    """One request: when it came (seconds), and the ids of the blocks of its prompt, in order. An id stands for a
    whole prefix. Lengths in tokens; 0 where the trace does not say.
    """

    at_s: float
    ids: npt.NDArray[np.int64]
    session: int = -1
    input_tokens: int = 0
    output_tokens: int = 0


def read_trace(path: Path, *, coarsen: int = 1) -> Iterator[TraceRequest]:
    """Requests of a trace in Mooncake's format (`hash_ids`) or with run-length coded ids (`hash_runs`), gzipped or
    plain.

    Args:
        coarsen: take blocks of this many of the trace's blocks; a trailing rest is dropped.

    Raises:
        ConfigError: the file is missing, or a line is not a request; the message names the line.
    """
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8", errors="replace") as lines:
            for number, line in enumerate(lines, 1):
                try:
                    row = json.loads(line)
                    yield TraceRequest(
                        float(row["timestamp"]) / 1e3,
                        _ids(row)[coarsen - 1 :: coarsen],
                        row.get("session", -1),
                        int(row.get("input_length", 0)),
                        int(row.get("output_length", 0)),
                    )
                except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
                    raise ConfigError(
                        f"{path}, line {number}: not a request of a known trace format: {error!r}"
                    ) from error
    except (OSError, EOFError, zlib.error) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"{path}: {why}; give a trace file (.jsonl or .jsonl.gz)") from error


def _ids(row: dict[str, list[int]]) -> npt.NDArray[np.int64]:
    if "hash_ids" in row:
        ids = np.asarray(row["hash_ids"], np.int64)
        if ids.ndim != 1:
            raise ValueError("hash_ids is no list of numbers")
        return ids
    runs = row["hash_runs"]
    pairs = zip(runs[::2], runs[1::2], strict=True)
    pieces = [np.arange(first, first + count, dtype=np.int64) for first, count in pairs]
    return np.concatenate(pieces) if pieces else np.zeros(0, np.int64)
