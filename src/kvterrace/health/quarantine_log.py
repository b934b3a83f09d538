"""The quarantine's file: carries writes out through an I/O engine, step by step, without a thread of its own."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

from kvterrace.buffers import Bytes
from kvterrace.health.quarantine import FILE_NBYTES, LogWrite, aligned_zeros, log_generation
from kvterrace.io.base import PAGE_NBYTES, FileInfo, IoClass, IoEngine, IoFile, IoKind, IoRequest, IoResult

__all__ = ["LogFile", "read_log"]

_log = logging.getLogger(__name__)


def read_log(engine: IoEngine, folder: Path, info: FileInfo) -> Bytes:
    """What a log file of `folder` holds. Blocks. Raises OSError."""
    memory = aligned_zeros(-(-min(info.nbytes, FILE_NBYTES) // PAGE_NBYTES) * PAGE_NBYTES)
    file = engine.open(folder / info.name)
    try:
        return memory[: engine.read_now(file, 0, memory)]
    finally:
        engine.close_file(file)


class LogFile:
    """Carries `LogWrite`s out through an engine: each step is a request whose tag is called with its result.

    `start` and the tags run under the store's lock; nothing here blocks.
    """

    def __init__(
        self,
        engine: IoEngine,
        folder: Path,
        ended: Callable[[LogWrite, str | None], None],
        *,
        file_nbytes: int = FILE_NBYTES,
    ) -> None:
        """`ended(write, fault)` is called once for each write; `fault` is None if all of it is durable. `file_nbytes`
        is reserved for each file.
        """
        self._file_nbytes = file_nbytes
        self._taken: dict[str, int] = {}
        self._engine = engine
        self._folder = folder
        self._ended = ended
        self._file: IoFile | None = None

    @property
    def nbytes(self) -> int:
        """What the log files take of the drive, those being made and removed included."""
        return sum(self._taken.values())

    def read(self) -> list[tuple[str, Bytes]]:
        """The log files of the folder, for `Quarantine.recover`. Blocks. What cannot be read is left out, with a
        line.
        """
        found = []
        for info in self._engine.list(self._folder):
            if log_generation(info.name) is None:
                continue
            self._taken[info.name] = max(info.nbytes, info.allocated_nbytes)
            data = aligned_zeros(0)
            try:
                data = read_log(self._engine, self._folder, info)
            except OSError as error:
                _log.warning("%s cannot be read (%s); bad places may be tried again", self._folder / info.name, error)
            found.append((info.name, data))
        return found

    def start(self, write: LogWrite) -> None:
        """Begin a write; `Quarantine`'s `writer`."""
        if write.create:
            self.close()
            self._taken[write.name] = self._nbytes_of(write)
            self._call(write, partial(self._create, write), self._created)
        else:
            self._write(write)

    def close(self) -> None:
        """Close the log file. No write may be under way."""
        file, self._file = self._file, None
        if file is not None:
            self._engine.close_file(file)

    def _create(self, write: LogWrite, _: IoResult) -> IoFile:
        path = self._folder / write.name
        file = self._engine.create(path, self._nbytes_of(write))
        try:
            self._engine.sync_folder(self._folder)
        except OSError:  # nobody would know of it, nor count it
            self._engine.close_file(file)
            self._engine.unlink(path)
            raise
        return file

    def _nbytes_of(self, write: LogWrite) -> int:
        return max(self._file_nbytes, write.pages.nbytes)

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
            call = IoRequest(IoKind.CALL, IoClass.DEMOTION, finish=partial(self._unlink, write.unlink))
            call.tag = self._unlinked
            self._engine.submit([call])
        self._ended(write, None)

    def _unlink(self, names: tuple[str, ...], _: IoResult) -> list[str]:
        gone = []
        for name in names:
            try:
                self._engine.unlink(self._folder / name)
            except FileNotFoundError:
                pass
            except OSError as error:
                _log.warning("%s cannot be removed: %s", self._folder / name, error)
                continue
            gone.append(name)
        return gone

    def _unlinked(self, result: IoResult) -> None:
        gone: list[str] = result.value or []  # type: ignore[assignment] # what _unlink returned
        for name in gone:
            self._taken.pop(name, None)

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
            if result.request.kind is IoKind.CALL:  # the file was not made
                self._taken.pop(write.name, None)
            self._ended(write, str(fault) if fault is not None else f"short write: {result.nbytes} B")

        request.tag = on_result
        self._engine.submit([request])
