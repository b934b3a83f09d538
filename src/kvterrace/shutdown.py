"""Flushing open stores when the process ends: at exit, and on SIGTERM where nobody else handles it."""

from __future__ import annotations

import atexit
import logging
import os
import signal
import threading
import weakref
from types import FrameType
from typing import Protocol

__all__ = ["flush_at_exit"]

_log = logging.getLogger(__name__)

#: What a container leaves of the usual ten seconds of grace.
_GRACE_S = 8.0


class _Closable(Protocol):
    def close(self, timeout_s: float = ...) -> bool: ...


_open: weakref.WeakSet[_Closable] = weakref.WeakSet()
_installed = False
_lock = threading.Lock()


def flush_at_exit(store: _Closable, *, on_sigterm: bool) -> None:
    """Close `store` when the interpreter ends. With `on_sigterm`, also on SIGTERM, if this is the main thread and the
    signal still has its
    default effect; the process then ends with status 143, as shells report SIGTERM."""
    global _installed
    with _lock:
        _open.add(store)
        if not _installed:
            atexit.register(_close_all)
            _installed = True
    if not on_sigterm or threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _on_sigterm)


def _close_all(timeout_s: float = 30.0) -> None:
    for store in list(_open):
        store.close(timeout_s)


def _on_sigterm(number: int, _frame: FrameType | None) -> None:
    # The handler runs on the main thread between two byte codes, perhaps in the middle of a call that holds the
    # store's lock: so it
    # only starts a thread, which waits for that lock as anybody would, and then ends the process by the same signal.
    threading.Thread(target=_flush_and_end, args=(number,), name="kvterrace-sigterm", daemon=True).start()


def _flush_and_end(number: int) -> None:
    try:
        _close_all(_GRACE_S)
    except Exception as error:  # noqa: BLE001 - the process ends here: say why, and end
        _log.error("flushing on SIGTERM failed", exc_info=error)
    finally:
        os._exit(
            128 + number
        )  # the disposition of a signal can only be changed on the main thread, which may be busy for long
