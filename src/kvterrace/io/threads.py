"""Starting the threads of an engine: all of them, or an error that says what to do."""

from __future__ import annotations

import errno
import threading
from collections.abc import Sequence

__all__ = ["start_all"]


def start_all(threads: Sequence[threading.Thread]) -> None:
    """Start them in order. Raises OSError (EAGAIN) where one cannot be started; those before it run."""
    for number, thread in enumerate(threads):
        try:
            thread.start()
        except RuntimeError as error:
            raise OSError(
                errno.EAGAIN,
                f"no thread can be started after {number} of {len(threads)}; allow the process more of them "
                "(RLIMIT_NPROC, pids.max of its control group)",
            ) from error
