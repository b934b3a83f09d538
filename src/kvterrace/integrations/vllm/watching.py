"""Being told when vLLM calls a method of its own, where it has no hook for that."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["watch"]


@dataclass(frozen=True, slots=True, eq=False)
class _Watch:
    classes: tuple[type, ...]
    names: frozenset[str]
    before: Callable[[Any, str], None] | None
    after: Callable[[Any, Any], None] | None


_watches: list[_Watch] = []
_lock = threading.Lock()


def watch(
    classes: Sequence[type],
    names: Sequence[str],
    *,
    before: Callable[[Any, str], None] | None = None,
    after: Callable[[Any, Any], None] | None = None,
) -> Callable[[], None]:
    """Have `before` told of the object and the method's name, before one of these methods runs, and `after` of the
    object and the result, when it has returned; both on the caller's thread. A class that lacks a method is left alone.

    Methods are wrapped once for each process, and stay so.

    Returns:
        Ends it.
    """
    mine = _Watch(tuple(classes), frozenset(names), before, after)
    with _lock:
        for each in classes:
            for name in names:
                if name in vars(each) and not hasattr(vars(each)[name], "kvterrace_watched"):
                    setattr(each, name, _told(vars(each)[name], name))
        _watches.append(mine)

    def end() -> None:
        with _lock:
            if mine in _watches:
                _watches.remove(mine)

    return end


def _told(method: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(method)
    def told(self: Any, *args: Any, **kwargs: Any) -> Any:
        watches = [one for one in tuple(_watches) if name in one.names and isinstance(self, one.classes)]
        for one in watches:
            if one.before is not None:
                one.before(self, name)
        result = method(self, *args, **kwargs)
        for one in watches:
            if one.after is not None:
                one.after(self, result)
        return result

    told.kvterrace_watched = True  # type: ignore[attr-defined]
    return told
