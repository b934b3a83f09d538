"""Requests from the rows of a kvterrace trace: those of a converted one as they are, those of a store put together.

A store sees gets and puts. What one request was is found from how they follow on each other; docs/reference/
trace-format.md has the rule.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvterrace.errors import ConfigError
from kvterrace.sim.traces import TraceRequest
from kvterrace.tracing.chains import Chains
from kvterrace.tracing.files import MAGIC, read_rows, trace_files

__all__ = ["read_recorded"]

#: Requests that a later put may still belong to.
_OPEN_REQUESTS = 1 << 16
#: A transfer that begins later than this after the last one of a request is another request's.
_GAP_S = 30.0
_TIERS = frozenset({"device", "dram", "cxl", "ssd", "remote"})


@dataclass(slots=True, eq=False)
class _Request:
    """A request as far as it is known. Blocks by number. `ended_s`: when its last transfer had ended."""

    at_s: float
    ended_s: float
    tip: int
    stop: int
    block_tokens: int = 0
    session: int = -1
    input_tokens: int = 0
    output_tokens: int = 0
    why: str = ""
    api_s: float = 0.0
    closed: bool = False


class _Open:
    """Requests by the block at which they may go on. Of several that wait at one, the last that came goes on: those
    before it may have ended long ago.
    """

    def __init__(self) -> None:
        self._waiting: dict[tuple[str, int], deque[_Request]] = {}
        self._order: deque[tuple[str, int]] = deque()

    def offer(self, place: tuple[str, int], request: _Request) -> None:
        self._waiting.setdefault(place, deque()).append(request)
        self._order.append(place)
        while len(self._order) > _OPEN_REQUESTS:
            oldest = self._order.popleft()
            if waiting := self._waiting.get(oldest):
                waiting.popleft()
                self._tidy(oldest)

    def take(self, place: tuple[str, int], found: _Request) -> _Request | None:
        """The request that `found`, a transfer that begins at `place`, goes on with."""
        waiting = self._waiting.get(place)
        if waiting is None:
            return None
        for at in range(len(waiting) - 1, -1, -1):
            one = waiting[at]
            if found.at_s - one.ended_s > _GAP_S:
                return None
            if one.session == found.session or -1 in (one.session, found.session):
                del waiting[at]
                self._tidy(place)
                return one
        return None

    def _tidy(self, place: tuple[str, int]) -> None:
        if not self._waiting[place]:
            del self._waiting[place]


class _Reading:
    """What is known after some of the rows."""

    def __init__(self) -> None:
        self.chains = Chains()
        self.requests: list[_Request] = []
        self._open = _Open()
        self._sessions: dict[str, int] = {}
        self._last: dict[int, _Request] = {}  # of each session
        self._block_tokens: dict[int, int] = {}
        self._base = 0  # number of the file's first block
        self._shift_s = 0.0  # from the first recording to this one
        self._began_s: float | None = None

    def take(self, row: dict[str, Any]) -> None:
        if MAGIC in row:
            began_s = float(row["began_unix_s"])
            self._began_s = began_s if self._began_s is None else self._began_s
            self._shift_s = began_s - self._began_s
            self._base, self._block_tokens = len(self.chains), {}
            return
        match row["op"]:
            case "blocks":
                self._name(row)
            case "namespace":
                self._block_tokens[row["ns"]] = row["block_tokens"]
            case "request":
                self.requests.append(self._whole(row))
            case "get":
                self._get(row)
            case "put":
                self._put(row)
            case "hint":
                self._hint(row)
            case _:
                pass  # a prefetch asks for nothing; moves and touches are not requests

    def _name(self, row: dict[str, Any]) -> None:
        if row["first"] != len(self.chains) - self._base:
            raise ValueError(f"names block {row['first']}, and the next is {len(self.chains) - self._base}")
        after = -1 if row["after"] == -1 else self._number(row["after"])
        self.chains.add(after, _ids_of(row))

    def _number(self, number: int) -> int:
        if not 0 <= number < len(self.chains) - self._base:
            raise ValueError(f"block {number} has no name")
        return self._base + number

    def _new(self, row: dict[str, Any]) -> _Request:
        seq = row.get("seq")
        session = -1 if seq is None else self._sessions.setdefault(seq, len(self._sessions))
        tip = -1 if row["stop"] == 0 else self._number(row["tip"])
        if self.chains.depth(tip) != row["stop"] - 1:
            raise ValueError(f"block {row['tip']} does not end a chain of {row['stop']}")
        at_s = row["t"] + self._shift_s
        ended_s = at_s + row.get("took", 0.0)
        return _Request(at_s, ended_s, tip, row["stop"], self._block_tokens[row["ns"]], session)

    def _whole(self, row: dict[str, Any]) -> _Request:
        request = self._new(row)
        request.session = row.get("session", -1)
        request.input_tokens, request.output_tokens = row.get("input_tokens", 0), row.get("output_tokens", 0)
        request.why, request.api_s = row.get("why", ""), row.get("api_s", 0.0)
        request.closed = row.get("closed", False)
        return request

    def _get(self, row: dict[str, Any]) -> None:
        if row.get("layers", [0])[0] != 0:
            return  # a read of further layers of blocks that another row has
        found = self._new(row)
        start, stop = row["start"], row["stop"]
        request = self._open.take(("behind", self.chains.id_at(found.tip, start - 1)), found) if start else None
        request = self._go_on(request, found)
        hits = _leading(row["ended"], _TIERS)
        if start + hits < stop:
            self._open.offer(("from", self.chains.id_at(found.tip, start + hits)), request)
        else:
            self._open.offer(("behind", self.chains.id_at(found.tip, stop - 1)), request)

    def _put(self, row: dict[str, Any]) -> None:
        found = self._new(row)
        at = row["start"] + _leading(row["ended"], {"present"})
        request = None
        if at < row["stop"]:
            request = self._open.take(("from", self.chains.id_at(found.tip, at)), found)
        if request is None and at:
            request = self._open.take(("behind", self.chains.id_at(found.tip, at - 1)), found)
        request = self._go_on(request, found)
        self._open.offer(("behind", self.chains.id_at(found.tip, row["stop"] - 1)), request)

    def _hint(self, row: dict[str, Any]) -> None:
        last = self._last.get(self._sessions.get(row["seq"], -1))
        if last is not None and row["kind"] in ("closed", "one_off"):
            last.closed = True

    def _go_on(self, request: _Request | None, found: _Request) -> _Request:
        if found.session != -1:
            self._last[found.session] = request or found
        if request is None:
            self.requests.append(found)
            return found
        request.ended_s = max(request.ended_s, found.ended_s)
        if found.stop > request.stop:
            request.tip, request.stop = found.tip, found.stop
        if request.session == -1:
            request.session = found.session
        return request


def _leading(ended: Iterable[tuple[str, int]], words: Iterable[str]) -> int:
    """How many blocks at the start ended in one of these words."""
    count = 0
    for word, blocks in ended:
        if word not in words:
            break
        count += blocks
    return count


def _ids_of(row: dict[str, Any]) -> npt.NDArray[np.int64]:
    if "ids" in row:
        hashed = np.frombuffer(bytes.fromhex(row["ids"]), "<i8")
        return hashed & np.int64(2**63 - 1)
    runs = row["runs"]
    pairs = zip(runs[::2], runs[1::2], strict=True)
    return np.concatenate([first + np.arange(count, dtype=np.int64) for first, count in pairs])


def read_recorded(path: Path) -> Iterator[TraceRequest]:
    """Requests of a kvterrace trace, in the order of their times. All rows are read first: about 200 B a request, and
    8 B a block.

    Raises:
        ConfigError: a newer format, or a row that cannot be; the message names its line. OSError.
    """
    reading = _Reading()
    for file in trace_files(path):
        try:
            for number, row in enumerate(read_rows(file), 1):
                try:
                    reading.take(row)
                except (ValueError, KeyError, TypeError, IndexError) as error:
                    raise ConfigError(f"{file}, line {number}: not a row of a trace: {error!r}") from error
        except FileNotFoundError:
            if file == path:
                raise
            # the store that records has removed it since, as its oldest
    chains = reading.chains
    for one in sorted(reading.requests, key=lambda one: one.at_s):
        yield TraceRequest(
            one.at_s,
            chains.ids(one.tip),
            one.session,
            one.input_tokens or one.stop * one.block_tokens,
            one.output_tokens,
            one.why,
            one.api_s,
            one.closed,
            one.block_tokens,
        )
