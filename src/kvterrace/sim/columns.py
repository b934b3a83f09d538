"""A whole trace in memory, as columns."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvterrace.errors import ConfigError
from kvterrace.io.probe import why_not_native
from kvterrace.sim.traces import TraceRequest, read_trace
from kvterrace.tracing.files import is_trace

__all__ = ["TraceColumns", "inferred_block_tokens", "load_trace"]

#: Tokens of the blocks that a trace with run-length coded ids is replayed with, unless another number is asked for.
_RUN_BLOCK_TOKENS = 256
#: What a block may have where a trace does not say, the likeliest first: 512 is Mooncake's.
_LIKELY_BLOCK_TOKENS = (512, 1024, 256, 128, 64, 32, 16, 2048, 4096)
_REPORT_EVERY = 512


@dataclass(frozen=True, slots=True, eq=False)
class TraceColumns:
    """A trace.

    Attributes:
        ids: of the blocks of all requests end to end, head first; numbers from 0 in the order in which they first come.
        offsets: where each request begins in `ids`, and the end of the last; one more than there are requests.
        at_s: when each came, in seconds, never falling.
        tokens: of each prompt. What is behind its last whole block is in none, unless the trace has a partial one.
        output_tokens: of each answer, -1 where the trace does not say.
        distinct: different blocks.
        session: of each request, -1: not known. `stop`: why its answer ended, empty: not known. `api_s`: how long that
            took, 0: not known.
    """

    path: Path
    ids: npt.NDArray[np.uint32]
    offsets: npt.NDArray[np.uint64]
    at_s: npt.NDArray[np.float64]
    tokens: npt.NDArray[np.uint32]
    output_tokens: npt.NDArray[np.int32]
    distinct: int
    block_tokens: int
    session: npt.NDArray[np.int64]
    stop: tuple[str, ...]
    api_s: npt.NDArray[np.float64]

    def __len__(self) -> int:
        """Requests."""
        return len(self.at_s)


def load_trace(
    path: Path, *, block_tokens: int | None = None, on_read: Callable[[int], object] | None = None
) -> TraceColumns:
    """Read a trace.

    Args:
        block_tokens: of the blocks wanted, a multiple of those of the trace. None: those of the trace, but 256 where
            its ids are run-length coded (`hash_runs`).
        on_read: hears now and then how many requests were read.

    Raises:
        ConfigError: what `read_trace` refuses; no request, or none with a block; sizes that do not fit each other.
    """
    first = next(read_trace(path), None)
    if first is None:
        raise ConfigError(f"{path}: no request in it")
    known = first.block_tokens
    wanted = block_tokens or (known if is_trace(path) else max(known, _RUN_BLOCK_TOKENS) if known else None)
    coarsen = _multiple(path, wanted, known) if known and wanted else 1
    requests = []
    for number, request in enumerate(read_trace(path, coarsen=coarsen), 1):
        requests.append(request)
        if on_read is not None and number % _REPORT_EVERY == 0:
            on_read(number)
    if any(request.block_tokens != known * coarsen for request in requests):
        raise ConfigError(f"{path}: its requests have blocks of two sizes: split it")
    ids = [request.ids for request in requests]
    if known:
        tokens_a_block = known * coarsen
        _check_lengths(path, requests, tokens_a_block)
    else:
        natural = inferred_block_tokens(path, requests)
        coarsen = _multiple(path, wanted, natural) if wanted else 1
        ids = [one[coarsen - 1 :: coarsen] for one in ids]
        tokens_a_block = natural * coarsen
    keys = np.concatenate(ids).astype(np.uint64)
    if not len(keys):
        raise ConfigError(f"{path}: no request has a whole block of {tokens_a_block} tokens: nothing to keep")
    numbered, distinct = _numbered(keys)
    lengths = [len(one) for one in ids]
    tokens = [
        request.input_tokens or length * tokens_a_block for length, request in zip(lengths, requests, strict=True)
    ]
    return TraceColumns(
        path,
        numbered,
        np.array(list(itertools.accumulate(lengths, initial=0)), np.uint64),
        np.array([request.at_s for request in requests]),
        np.array(tokens, np.uint32),
        np.array([request.output_tokens or -1 for request in requests], np.int32),
        distinct,
        tokens_a_block,
        np.array([request.session for request in requests], np.int64),
        tuple(request.stop for request in requests),
        np.array([request.api_s for request in requests]),
    )


def _multiple(path: Path, wanted: int, natural: int) -> int:
    if wanted % natural:
        raise ConfigError(f"{path}: its blocks have {natural} tokens: give a multiple of that, not {wanted}")
    return wanted // natural


def _check_lengths(path: Path, requests: Iterable[TraceRequest], block_tokens: int) -> None:
    """Blocks that hold more tokens than the prompt has would be hits of more than there is."""
    for number, request in enumerate(requests, 1):
        tokens, blocks = request.input_tokens, len(request.ids)
        if tokens > 0 and blocks > -(-tokens // block_tokens):
            raise ConfigError(
                f"{path}, request {number}: {blocks} blocks of {block_tokens} tokens are more than its {tokens} "
                "tokens: was it converted with another --block-tokens?"
            )


def inferred_block_tokens(path: Path, requests: Iterable[TraceRequest]) -> int:
    """Tokens of a block of a trace that does not say it, by the lengths of its prompts; 512 where several would do.

    Raises:
        ConfigError: no size goes with all of them.
    """
    left = list(_LIKELY_BLOCK_TOKENS)
    for number, request in enumerate(requests, 1):
        tokens, blocks = request.input_tokens, len(request.ids)
        if tokens > 0:
            left = [one for one in left if blocks in (tokens // one, -(-tokens // one))]
        if not left:
            raise ConfigError(
                f"{path}, request {number}: {blocks} blocks for {tokens} tokens do not go with what came before: all "
                "blocks of a trace have one size, a power of two of tokens from 16 to 4096"
            )
    return left[0]


def _numbered(keys: npt.NDArray[np.uint64]) -> tuple[npt.NDArray[np.uint32], int]:
    if why_not_native() is None:
        from kvterrace._native import numbered

        return numbered(keys)
    _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
    rank = np.empty(len(first), np.uint32)
    rank[np.argsort(first)] = np.arange(len(first), dtype=np.uint32)
    return rank[inverse], len(first)
