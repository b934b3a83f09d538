"""What went wrong, counted and kept in order; and the log of the library, which must say nothing unexpected."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter

_MOST_KEPT = 60


class Verdict:
    """Failures of the library. Thread-safe. `say` is told of each at once, by whoever found it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._start_s = time.monotonic()
        self.failures: list[str] = []
        self.count = 0
        self.kinds: Counter[str] = Counter()

    def fail(self, kind: str, text: str) -> None:
        """Something that may not happen has happened."""
        with self._lock:
            self.count += 1
            self.kinds[kind] += 1
            if len(self.failures) < _MOST_KEPT:
                self.failures.append(f"{time.monotonic() - self._start_s:8.1f} s  {kind}: {text}")
        self.say(kind, text)

    def say(self, kind: str, text: str) -> None:
        """For whoever wants to hear it at once."""


class LogTap(logging.Handler):
    """Takes in what the library logs: discarded copies, warnings by message, and errors, which are failures."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(logging.INFO)
        self._verdict = verdict
        self.warnings: Counter[str] = Counter()
        #: `file@offset` of each copy that was given up in this life.
        self.discards: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.ERROR:
            fault = record.exc_info[1] if record.exc_info else None
            self._verdict.fail("error logged", f"{record.getMessage()} {fault!r}")
        elif record.levelno >= logging.WARNING:
            self.warnings[f"{record.name}: {record.msg}"] += 1
        if "copy is discarded" in str(record.msg) and isinstance(record.args, tuple):
            self.discards.append(str(record.args[0]))

    def new_life(self) -> None:
        """Forget the discards of the life before."""
        self.discards = []
