"""Request traces, as chains of block ids with times."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt

from kvterrace.errors import ConfigError

__all__ = ["TraceRequest", "read_trace"]

#: Tokens of a block whose ids are run-length coded.
_RUN_BLOCK_TOKENS = 64
#: A request of more blocks than this is damage, and would only fill the memory.
_MOST_BLOCKS = 1 << 24


@dataclass(frozen=True, slots=True, eq=False)
class TraceRequest:
    """One request: when it came (seconds), and the ids of the blocks of its prompt, in order. An id stands for a
    whole prefix.

    Attributes:
        input_tokens, output_tokens: of the prompt and of the answer; -1 where the trace does not say.
        stop: why the answer ended, in the trace's words; empty where it does not say.
        block_tokens: of each of `ids`, where the format says; else 0.
    """

    at_s: float
    ids: npt.NDArray[np.int64]
    session: int = -1
    input_tokens: int = -1
    output_tokens: int = -1
    stop: str = ""
    block_tokens: int = 0


_Whole = Annotated[int, msgspec.Meta(ge=0, lt=2**63 - 1)]


class _Line(msgspec.Struct):
    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    hash_ids: list[_Whole] | None = None
    hash_runs: list[_Whole] | None = None
    session: int = -1
    input_length: Annotated[int, msgspec.Meta(lt=2**31)] = -1
    output_length: Annotated[int, msgspec.Meta(lt=2**31)] = -1
    stop: str = ""


def read_trace(path: Path, *, coarsen: int = 1) -> Iterator[TraceRequest]:
    """Requests of a trace in Mooncake's format (`hash_ids`) or with run-length coded ids (`hash_runs`), gzipped or
    plain.

    Args:
        coarsen: take blocks of this many of the trace's blocks; a trailing rest is dropped.

    Raises:
        ConfigError: the file is missing, or a line is not a request, or earlier than the one before; the message names
            the line.
    """
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
                except (msgspec.MsgspecError, ValueError) as error:
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
        raise ConfigError(f"{path}, after line {number}: not whole as a gzip file: {error}") from error
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}; give a trace file (.jsonl or .jsonl.gz)") from error


def _request(row: _Line, coarsen: int) -> TraceRequest:
    if row.hash_ids is not None:
        ids, block_tokens = np.asarray(row.hash_ids, np.int64)[coarsen - 1 :: coarsen], 0
    elif row.hash_runs is not None:
        ids, block_tokens = _expanded(row.hash_runs, coarsen), _RUN_BLOCK_TOKENS * coarsen
    else:
        raise ValueError("neither hash_ids nor hash_runs")
    return TraceRequest(
        row.timestamp / 1e3, ids, row.session, row.input_length, row.output_length, row.stop, block_tokens
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
