"""Request traces, as chains of block ids with times."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt

from kvterrace.errors import ConfigError
from kvterrace.tracing.files import is_trace

__all__ = ["TraceRequest", "read_trace"]

#: Tokens of a block whose ids are run-length coded.
_RUN_BLOCK_TOKENS = 64
#: A request of more blocks than this is damage, and would only fill the memory.
_MOST_BLOCKS = 1 << 24


@dataclass(frozen=True, slots=True, eq=False)
class TraceRequest:
    """One request: when it came (seconds), and the ids of the blocks of its prompt, in order. An id stands for a
    whole prefix: it always has the same predecessor.

    Attributes:
        session: the conversation; -1: not known.
        input_tokens, output_tokens: of the prompt and of the answer; 0: not known.
        stop: why the answer ended, e.g. `tool_use` or `end_turn`; empty: not known.
        api_s: how long the answer took; 0: not known.
        closed: whether the client has said that the session ends with it.
        block_tokens: of each of `ids`, where the format says; else 0.
    """

    at_s: float
    ids: npt.NDArray[np.int64]
    session: int = -1
    input_tokens: int = 0
    output_tokens: int = 0
    stop: str = ""
    api_s: float = 0.0
    closed: bool = False
    block_tokens: int = 0


_Whole = Annotated[int, msgspec.Meta(ge=0, lt=2**63 - 1)]


class _Line(msgspec.Struct):
    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    hash_ids: list[_Whole] | None = None
    hash_runs: list[_Whole] | None = None
    session: int = -1
    input_length: Annotated[int, msgspec.Meta(lt=2**31)] = 0
    output_length: Annotated[int, msgspec.Meta(lt=2**31)] = 0
    stop: str | None = None
    api_ms: float | None = None


def read_trace(path: Path, *, coarsen: int = 1) -> Iterator[TraceRequest]:
    """Requests of a trace: in kvterrace's format (a file, or the folder that a store recorded to), in Mooncake's
    (`hash_ids`), or with run-length coded ids (`hash_runs`); gzipped or plain.

    Args:
        coarsen: take blocks of this many of the trace's blocks; a trailing rest is dropped.

    Raises:
        ConfigError: the file is missing, is in a newer format, or a line is not a request, or earlier than the one
            before; the message names the line.
    """
    from kvterrace.sim.recorded import read_recorded  # here: it makes TraceRequests

    try:
        if not is_trace(path):
            yield from _read_lines(path, coarsen)
            return
        for request in read_recorded(path):
            yield replace(request, ids=request.ids[coarsen - 1 :: coarsen], block_tokens=request.block_tokens * coarsen)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}; give a trace file (.jsonl or .jsonl.gz)") from error


def _read_lines(path: Path, coarsen: int) -> Iterator[TraceRequest]:
    decoder = msgspec.json.Decoder(_Line)
    opener = gzip.open if path.suffix == ".gz" else open
    number, before_s = 0, 0.0
    try:
        with opener(path, "rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.isspace():
                    continue
                try:
                    request = _request(decoder.decode(line), coarsen)
                except (msgspec.MsgspecError, ValueError, RecursionError) as error:
                    raise ConfigError(
                        f"{path}, line {number}: not a request of a known trace format: {error}"
                    ) from error
                if request.at_s < before_s:
                    raise ConfigError(
                        f"{path}, line {number}: at {request.at_s} s, the request before at {before_s} s: sort the "
                        "file by timestamp"
                    )
                before_s = request.at_s
                yield request
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ConfigError(f"{path}: damaged or cut off after line {number}; get the whole file: {error}") from error


def _request(row: _Line, coarsen: int) -> TraceRequest:
    if row.hash_ids is not None:
        ids, block_tokens = np.asarray(row.hash_ids, np.int64)[coarsen - 1 :: coarsen], 0
    elif row.hash_runs is not None:
        ids, block_tokens = _expanded(row.hash_runs, coarsen), _RUN_BLOCK_TOKENS * coarsen
    else:
        raise ValueError("neither hash_ids nor hash_runs")
    return TraceRequest(
        row.timestamp / 1e3,
        ids,
        row.session,
        row.input_length,
        row.output_length,
        row.stop or "",
        (row.api_ms or 0.0) / 1e3,
        block_tokens=block_tokens,
    )


def _expanded(runs: list[int], coarsen: int) -> npt.NDArray[np.int64]:
    if sum(runs[1::2]) > _MOST_BLOCKS:
        raise ValueError(f"more than {_MOST_BLOCKS} blocks in one request")
    pieces, seen = [], 0
    for first, count in zip(runs[::2], runs[1::2], strict=True):
        skip = (coarsen - 1 - seen) % coarsen
        pieces.append(np.arange(first + skip, first + count, coarsen, dtype=np.int64))
        seen += count
    return np.concatenate(pieces) if pieces else np.zeros(0, np.int64)
