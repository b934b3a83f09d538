"""Request traces, as chains of block ids with times."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvterrace.errors import ConfigError
from kvterrace.tracing.files import is_trace

__all__ = ["TraceRequest", "read_trace"]


@dataclass(frozen=True, slots=True, eq=False)
class TraceRequest:
    """One request: when it came (seconds), and the ids of the blocks of its prompt, in order. An id stands for a
    whole prefix: it always has the same predecessor.

    Attributes:
        session: the conversation; -1: not known.
        input_tokens, output_tokens: 0: not known.
        stop: why the answer ended, e.g. `tool_use` or `end_turn`; empty: not known.
        api_s: how long the answer took.
        closed: whether the client has said that the session ends with it.
    """

    at_s: float
    ids: npt.NDArray[np.int64]
    session: int = -1
    input_tokens: int = 0
    output_tokens: int = 0
    stop: str = ""
    api_s: float = 0.0
    closed: bool = False


def read_trace(path: Path, *, coarsen: int = 1) -> Iterator[TraceRequest]:
    """Requests of a trace: in kvterrace's format (a file, or the folder that a store recorded to), in Mooncake's
    (`hash_ids`), or with run-length coded ids (`hash_runs`); gzipped or plain.

    Args:
        coarsen: take blocks of this many of the trace's blocks; a trailing rest is dropped.

    Raises:
        ConfigError: the file is missing, is in a newer format, or a line is not a request; the message names the line.
    """
    from kvterrace.sim.recorded import read_recorded  # here: it makes TraceRequests

    try:
        requests = read_recorded(path) if is_trace(path) else _read_lines(path)
        for request in requests:
            yield request if coarsen == 1 else replace(request, ids=request.ids[coarsen - 1 :: coarsen])
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}; give a trace file (.jsonl or .jsonl.gz)") from error


def _read_lines(path: Path) -> Iterator[TraceRequest]:
    opener: Callable[..., Any] = gzip.open if path.suffix == ".gz" else open
    decode = json.JSONDecoder().decode
    number = 0
    with opener(path, "rt", encoding="utf-8", errors="replace") as lines:
        try:
            for line in lines:
                number += 1
                yield _request(decode(line))
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise ConfigError(f"{path}, line {number}: not a request of a known trace format: {error!r}") from error
        except (EOFError, zlib.error) as error:
            raise ConfigError(f"{path}: damaged or cut off after line {number}; get the whole file") from error


def _request(row: dict[str, Any]) -> TraceRequest:
    return TraceRequest(
        float(row["timestamp"]) / 1e3,
        _ids(row),
        row.get("session", -1),
        int(row.get("input_length", 0)),
        int(row.get("output_length", 0)),
        row.get("stop") or "",
        (row.get("api_ms") or 0) / 1e3,
    )


def _ids(row: dict[str, Any]) -> npt.NDArray[np.int64]:
    if "hash_ids" in row:
        ids = np.asarray(row["hash_ids"], np.int64)
        if ids.ndim != 1:
            raise ValueError("hash_ids is no list of numbers")
        return ids
    runs = row["hash_runs"]
    if len(runs) == 2:
        return np.arange(runs[0], runs[0] + runs[1], dtype=np.int64)
    pairs = zip(runs[::2], runs[1::2], strict=True)
    pieces = [np.arange(first, first + count, dtype=np.int64) for first, count in pairs]
    return np.concatenate(pieces) if pieces else np.zeros(0, np.int64)
