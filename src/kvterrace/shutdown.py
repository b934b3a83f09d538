"""Flushing open stores when the process ends: at exit, and on SIGTERM where nobody else handles it."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import signal
import threading
import time
from types import FrameType
from typing import Protocol

__all__ = ["closed", "flush_at_exit"]

_log = logging.getLogger(__name__)

#: What a container leaves of the usual ten seconds of grace.
_GRACE_S = 8.0


class _Closable(Protocol):
    def close(self, timeout_s: float = ...) -> bool: ...


#: Held strongly: a store that its owner has dropped without closing it still has blocks to write.
_open: set[_Closable] = set()
_installed = False
_lock = threading.Lock()


def flush_at_exit(store: _Closable, *, on_sigterm: bool) -> None:
    """Close `store` when the interpreter ends. With `on_sigterm`, also on SIGTERM, if this is the main thread and the
    signal still has its default effect; the process then ends with status 143, as shells report SIGTERM, by `os._exit`:
    not by the signal, and without running what else waits for its end.
    """
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


def closed(store: _Closable) -> None:
    """`store` is closed and needs nothing more."""
    with _lock:
        _open.discard(store)


def _forget_in_child() -> None:
    # The stores, their threads and their locks belong to the parent: a forked process neither flushes nor closes them.
    global _lock
    _lock = threading.Lock()  # whoever held it is not in this process
    _open.clear()
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is _on_sigterm:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


os.register_at_fork(after_in_child=_forget_in_child)


def _close_all(timeout_s: float = 30.0) -> None:
    limit_s = time.monotonic() + timeout_s
    for store in list(_open):
        try:
            store.close(max(0.1, limit_s - time.monotonic()))
        except Exception as error:  # noqa: BLE001 - the process ends: the other stores still have blocks to write
            _log.error("closing a store at the end of the process failed", exc_info=error)


def _on_sigterm(number: int, _frame: FrameType | None) -> None:
    # The handler runs on the main thread between two byte codes, perhaps in the middle of a call that holds the
    # store's lock: so it only starts a thread, which waits for that lock as anybody would, and then ends the process
    # with the status that shells give this signal.
    with contextlib.suppress(RuntimeError):  # no thread starts once the interpreter is ending, and closes the stores
        threading.Thread(target=_flush_and_end, args=(number,), name="kvterrace-sigterm", daemon=True).start()


def _flush_and_end(number: int) -> None:
    try:
        _close_all(_GRACE_S)
    finally:
        # Not by the signal: its disposition can only be changed on the main thread, which may be busy for long.
        os._exit(128 + number)
