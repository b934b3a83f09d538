"""What callers give to a store, checked before anything changes. Each refusal says what was given, and what to give."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvterrace.config import is_whole, require_seconds
from kvterrace.engine.transfers import Transfer
from kvterrace.errors import ConfigError
from kvterrace.keys import KeyChain
from kvterrace.types import Hint

__all__ = [
    "require_chain",
    "require_hint",
    "require_scores",
    "require_sequence",
    "require_span",
    "require_transfer",
]

#: Bytes of a sequence's name, as records hold it.
_SEQUENCE_NBYTES = 16
#: Layer groups that scores are kept of.
_MOST_GROUPS = 16
#: So far from what a float32 holds that no sum of scores comes there.
_MOST_SCORE = 1e30


def require_chain(chain: object) -> KeyChain:
    """A key chain. Raises ConfigError."""
    if not isinstance(chain, KeyChain):
        raise ConfigError(f"chain: give a KeyChain, as chain_keys makes it, not a {type(chain).__name__}")
    return chain


def require_span(chain: KeyChain, start: object, stop: object) -> tuple[int, int]:
    """Blocks `start..stop` of `chain`; a `stop` of None is its end. Raises ConfigError, IndexError: no such blocks."""
    first = _number(start, "start")
    end = len(chain) if stop is None else _number(stop, "stop")
    if not 0 <= first <= end <= len(chain):
        raise IndexError(f"blocks {first}..{end} are not in a chain of {len(chain)}")
    return first, end


def require_sequence(sequence: object) -> bytes:
    """The name of a sequence, filled up with zeros as records hold it. Raises ConfigError."""
    if not isinstance(sequence, bytes):
        raise ConfigError(f"sequence: give bytes, e.g. name.encode(), not a {type(sequence).__name__}")
    if len(sequence) > _SEQUENCE_NBYTES:
        raise ConfigError(f"sequence: {len(sequence)} bytes; at most {_SEQUENCE_NBYTES} (hash longer names)")
    return bytes(sequence).ljust(_SEQUENCE_NBYTES, b"\0")


def require_hint(sequence: object, kind: object, seconds: object) -> tuple[bytes, Hint, float | None]:
    """What a hint says of which sequence. Raises ConfigError."""
    name = require_sequence(sequence)
    if not any(name):
        raise ConfigError("sequence: a hint needs the name that its blocks are put with; blocks without one have none")
    if not isinstance(kind, Hint):
        raise ConfigError(f"kind: give a Hint, e.g. Hint.CLOSED, not {kind!r}")
    if kind is Hint.RETURNS and seconds is None:
        raise ConfigError("seconds: say in how many seconds the sequence returns")
    return name, kind, None if seconds is None else require_seconds(seconds, "seconds")


def require_scores(scores: Any, chain: KeyChain) -> npt.NDArray[np.float32]:
    """One attention score for each block of `chain`, or one for each and each of a few layer groups. Raises
    ConfigError.
    """
    try:
        given = np.asarray(scores)
    except (ValueError, TypeError):  # ragged
        given = np.zeros(0)
    groups = given.shape[:-1]
    fits = given.shape[-1:] == (len(chain),) and (not groups or (len(groups) == 1 and 0 < groups[0] <= _MOST_GROUPS))
    if fits and given.dtype.kind in "iuf":
        with np.errstate(over="ignore"):
            found = given.astype(np.float32)
        if ((found >= 0) & (found <= _MOST_SCORE)).all():  # NaN is neither
            return found
    raise ConfigError(f"scores: give {len(chain)} numbers from 0 to {_MOST_SCORE:.0e}, one for each block")


def require_transfer(transfer: object) -> Transfer:
    """A transfer. Raises ConfigError."""
    if not isinstance(transfer, Transfer):
        raise ConfigError(f"transfer: give what get, put or prefetch returned, not a {type(transfer).__name__}")
    return transfer


def _number(value: object, name: str) -> int:
    if not is_whole(value):
        raise ConfigError(f"{name}: give the number of a block, a whole number, not {value!r}")
    return int(value)
