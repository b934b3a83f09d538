"""What a client of a trace could have said of its sessions, right, and now and then wrong."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvterrace.errors import ConfigError
from kvterrace.sim.columns import TraceColumns
from kvterrace.types import Hint

__all__ = ["WRONG_SHARE", "Said", "said_in"]

#: Of the hints of a client that is often wrong.
WRONG_SHARE = 0.3
_SEED = 7
#: Why an answer ended -> what a client then says, and the seconds: the medians of claude-code-a from there to the next
#: request.
_SAID: dict[str, tuple[Hint, float | None]] = {
    "tool_use": (Hint.RETURNS, 9.0),
    "end_turn": (Hint.RETURNS, 186.0),
}
_OVER: tuple[Hint, float | None] = (Hint.CLOSED, None)


@dataclass(frozen=True, slots=True)
class Said:
    """At `at_s`, of a session."""

    at_s: float
    session: int
    kind: Hint
    seconds: float | None


def said_in(trace: TraceColumns, *, wrong_share: float = 0.0) -> list[Said]:
    """Hints for `trace`, in order of time: at the end of each answer when the session comes back, by why the answer
    ended; after the last one that it is over. No hint uses what comes later, but for that one: a client knows when a
    conversation is closed.

    Args:
        wrong_share: of the hints, drawn by a fixed seed, say one of the other two things.

    Raises:
        ConfigError: the trace does not say why answers ended.
    """
    if not set(trace.stop) & set(_SAID) or not (trace.session >= 0).any():
        raise ConfigError(f"{trace.path}: no `stop` and `session` of requests: nothing that a client could hint at")
    last = {session: number for number, session in enumerate(trace.session.tolist())}
    kinds = [*_SAID.values(), _OVER]
    draw = np.random.default_rng(_SEED)
    found = []
    ended_s = (trace.at_s + trace.api_s).tolist()
    for number, (session, stop) in enumerate(zip(trace.session.tolist(), trace.stop, strict=True)):
        if session < 0:
            continue
        what = _OVER if last[session] == number else _SAID.get(stop)
        if what is None:
            continue
        if draw.random() < wrong_share:
            what = [other for other in kinds if other != what][draw.integers(2)]
        found.append(Said(ended_s[number], session, *what))
    return sorted(found, key=lambda said: said.at_s)
