"""From one trace format to another."""

from __future__ import annotations

import gzip
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from kvterrace.errors import ConfigError
from kvterrace.sim.columns import inferred_block_tokens
from kvterrace.sim.traces import TraceRequest, read_trace
from kvterrace.tracing.chains import IdChains
from kvterrace.tracing.files import header, is_trace, line, pack

__all__ = ["TraceFormat", "convert_trace", "format_of", "write_trace"]

TraceFormat = Literal["kvterrace", "mooncake", "claude-code"]

#: Tokens of a block of the published traces with `hash_runs`; their files do not say it.
_RUN_BLOCK_TOKENS = 64
_MEMBER_NBYTES = 1 << 18


def format_of(path: Path) -> TraceFormat:
    """The format of a trace, told by its first line: `claude-code` has `hash_runs`, `mooncake` `hash_ids`.

    Raises:
        ConfigError: it has none of these, or cannot be read.
    """
    try:
        if is_trace(path):
            return "kvterrace"
        opener: Callable[..., Any] = gzip.open if path.suffix == ".gz" else open
        with opener(path, "rb") as file:
            first = file.readline()
    except (OSError, EOFError) as error:
        raise ConfigError(f"{path}: {getattr(error, 'strerror', None) or error}; give a trace file") from error
    if b'"hash_runs"' in first:
        return "claude-code"
    if b'"hash_ids"' in first:
        return "mooncake"
    raise ConfigError(f"{path}, line 1: no known trace format: neither hash_ids, hash_runs nor a kvterrace trace")


def convert_trace(source: Path, target: Path, to: TraceFormat, *, block_tokens: int | None = None) -> int:
    """Write the trace `source` to `target` in another format; returns the number of requests. A file is written
    whole or not at all (a pipe or a device as it comes), and gzipped if its name ends in `.gz`.

    Args:
        to: `kvterrace` or `mooncake`.
        block_tokens: tokens of the source's blocks. None: 64 with `hash_runs`; with `hash_ids` what fits the lengths of
            its prompts, 512 if several do.

    Raises:
        ConfigError: the source is no trace, or one whose ids stand for no prefix, or whose blocks have no one size;
            or the target cannot be written.
    """
    origin = format_of(source)
    if to == "kvterrace":
        if origin == "kvterrace":
            raise ConfigError(f"{source} is in kvterrace's format already; give --to mooncake")
        rows = write_trace(read_trace(source), block_tokens or _block_tokens(source, origin), origin=origin)
    else:
        rows = _mooncake(read_trace(source))
    count = 0
    with _written(target) as write:
        for request, text in rows:
            write(text)
            count += request
    return count


def _block_tokens(source: Path, origin: TraceFormat) -> int:
    if origin == "claude-code":
        return _RUN_BLOCK_TOKENS
    try:
        return inferred_block_tokens(source, read_trace(source))
    except ConfigError as error:
        raise ConfigError(f"{error}; or say --block-tokens") from error


def write_trace(requests: Iterable[TraceRequest], block_tokens: int, *, origin: str) -> Iterator[tuple[bool, bytes]]:
    """Lines of a trace in kvterrace's format; with each, whether it is a request. Ids are kept."""
    chains = IdChains()
    yield False, line(header(recording=origin, number=0, began_unix_s=0, origin=origin))
    yield False, line({"op": "namespace", "ns": 0, "block_tokens": block_tokens})
    for number, request in enumerate(requests, 1):
        tip, known = _enter(chains, request, number)
        if known < len(request.ids):
            first = len(chains) - (len(request.ids) - known)
            after = chains.number_of(int(request.ids[known - 1])) if known else -1
            yield False, line({"op": "blocks", "first": first, "after": after, "runs": _runs(request.ids[known:])})
        yield True, line(_row(request, tip))


def _row(request: TraceRequest, tip: int) -> dict[str, Any]:
    row: dict[str, Any] = {"op": "request", "t": round(request.at_s, 6), "ns": 0, "tip": tip, "stop": len(request.ids)}
    known = {
        "session": request.session if request.session != -1 else None,
        "input_tokens": request.input_tokens,
        "output_tokens": request.output_tokens,
        "why": request.stop,
        "api_s": request.api_s,
        "closed": request.closed,
    }
    return row | {name: value for name, value in known.items() if value or (name == "session" and value == 0)}


def _mooncake(requests: Iterable[TraceRequest]) -> Iterator[tuple[bool, bytes]]:
    """Lines in Mooncake's format. Ids are numbered anew, from 0 in the order of first sight: those of a recorded trace
    are too wide for readers that take numbers for floats.
    """
    chains = IdChains()
    for number, request in enumerate(requests, 1):
        tip, _ = _enter(chains, request, number)
        row = {
            "timestamp": round(request.at_s * 1e3),
            "input_length": request.input_tokens,
            "output_length": request.output_tokens,
            "hash_ids": chains.numbers(tip).tolist(),
        }
        yield True, line(row)


def _enter(chains: IdChains, request: TraceRequest, number: int) -> tuple[int, int]:
    try:
        return chains.enter(request.ids)
    except ConfigError as error:
        raise ConfigError(f"request {number} of the trace: {error}") from error


def _runs(ids: npt.NDArray[np.int64]) -> list[int]:
    """Ids as first, count, first, count, ...."""
    # what ascends by one does not go round from the largest number to the least
    starts = np.append(0, np.flatnonzero((np.diff(ids) != 1) | (ids[1:] < ids[:-1])) + 1)
    counts = np.diff(starts, append=len(ids))
    runs: list[int] = np.stack([ids[starts], counts], axis=1).reshape(-1).tolist()
    return runs


@contextmanager
def _written(target: Path) -> Iterator[Callable[[bytes], None]]:
    """A function that writes to `target`, which is there once the block has ended well. What is there and is no file (a
    pipe, /dev/stdout, /dev/null) is written to as it is: nothing may take its place.
    """
    in_place = target.exists() and not target.is_file()
    part = target if in_place else target.with_name(f".{target.name}.{os.getpid()}.part")
    waiting: list[bytes] = []
    nbytes = 0
    try:
        with part.open("wb") as file:

            def flush() -> None:
                lines = b"".join(waiting)
                waiting.clear()
                file.write(pack(lines) if target.suffix == ".gz" else lines)

            def write(lines: bytes) -> None:
                nonlocal nbytes
                waiting.append(lines)
                nbytes += len(lines)
                if nbytes >= _MEMBER_NBYTES:
                    flush()
                    nbytes = 0

            yield write
            flush()
        if not in_place:
            part.replace(target)
    except OSError as error:
        raise ConfigError(f"cannot write {target}: {error.strerror or error}; give another place") from error
    finally:
        if not in_place:
            part.unlink(missing_ok=True)
