"""The quarantine's file: carries writes out through an I/O engine, step by step, without a thread of its own."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

from kvterrace.buffers import Bytes
from kvterrace.health.quarantine import FILE_NBYTES, LogWrite, aligned_zeros, log_generation
from kvterrace.io.base import PAGE_NBYTES, IoClass, IoEngine, IoFile, IoKind, IoRequest, IoResult

__all__ = ["LogFile"]

_log = logging.getLogger(__name__)


class LogFile:
    """Carries `LogWrite`s out through an engine: each step is a request whose tag is called with its result.

    `start` and the tags run under the store's lock; nothing here blocks.
    """

    def __init__(self, engine: IoEngine, folder: Path, ended: Callable[[LogWrite, str | None], None]) -> None:
        """`ended(write, fault)` is called once for each write; `fault` is None if all of it is durable."""
        self._engine = engine
        self._folder = folder
        self._ended = ended
        self._file: IoFile | None = None

    def read(self) -> list[tuple[str, Bytes]]:
        """The log files of the folder, for `Quarantine.recover`. Blocks. What cannot be read is left out, with a
        line.
        """
        found = []
        for info in self._engine.list(self._folder):
            if log_generation(info.name) is None:
                continue
            memory = aligned_zeros(-(-min(info.nbytes, FILE_NBYTES) // PAGE_NBYTES) * PAGE_NBYTES)
            try:
                file = self._engine.open(self._folder / info.name)
                try:
                    nbytes = self._engine.read_now(file, 0, memory)
                finally:
                    self._engine.close_file(file)
            except OSError as error:
                _log.warning("%s cannot be read (%s); bad places may be tried again", self._folder / info.name, error)
                nbytes = 0
            found.append((info.name, memory[:nbytes]))
        return found

    def start(self, write: LogWrite) -> None:
        """Begin a write; `Quarantine`'s `writer`."""
        if write.create:
            self.close()
            self._call(write, partial(self._create, write), self._created)
        else:
            self._write(write)

    def close(self) -> None:
        """Close the log file. No write may be under way."""
        file, self._file = self._file, None
        if file is not None:
            self._engine.close_file(file)

    def _create(self, write: LogWrite, _: IoResult) -> IoFile:
        file = self._engine.create(self._folder / write.name, max(FILE_NBYTES, write.pages.nbytes))
        self._engine.sync_folder(self._folder)
        return file

    def _created(self, write: LogWrite, result: IoResult) -> None:
        file: IoFile = result.value  # type: ignore[assignment] # what _create returned
        self._file = file
        self._write(write)

    def _write(self, write: LogWrite) -> None:
        assert self._file is not None, "a log is appended to by the process that made it"
        request = IoRequest(IoKind.WRITE, IoClass.DEMOTION, self._file, write.offset, (write.pages,))
        self._submit(write, request, self._written)

    def _written(self, write: LogWrite, _: IoResult) -> None:
        self._submit(write, IoRequest(IoKind.SYNC, IoClass.DEMOTION, self._file), self._synced)

    def _synced(self, write: LogWrite, _: IoResult) -> None:
        if write.unlink:
            # Durable by now. A file that will not go away is read again at the next open, and does no harm.
            self._engine.submit([IoRequest(IoKind.CALL, IoClass.DEMOTION, finish=partial(self._unlink, write.unlink))])
        self._ended(write, None)

    def _unlink(self, names: tuple[str, ...], _: IoResult) -> None:
        for name in names:
            try:
                self._engine.unlink(self._folder / name)
            except FileNotFoundError:
                pass
            except OSError as error:
                _log.warning("%s cannot be removed: %s", self._folder / name, error)

    def _call(
        self, write: LogWrite, do: Callable[[IoResult], object], then: Callable[[LogWrite, IoResult], None]
    ) -> None:
        self._submit(write, IoRequest(IoKind.CALL, IoClass.DEMOTION, finish=do), then)

    def _submit(self, write: LogWrite, request: IoRequest, then: Callable[[LogWrite, IoResult], None]) -> None:
        def on_result(result: IoResult) -> None:
            if result.complete and result.crash is None:
                then(write, result)
                return
            fault = result.error or result.crash
            self._ended(write, str(fault) if fault is not None else f"short write: {result.nbytes} B")

        request.tag = on_result
        self._engine.submit([request])
