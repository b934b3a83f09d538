"""Where a purge can end: each call that changes something on the drive, counted; and what a power cut leaves there."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvterrace.maintenance.purge import purge_store
from kvterrace.maintenance.selection import BySequence, ByTenant, Target

#: Calls that change files or folders, or make changes durable.
CHANGES = ("pwritev", "fdatasync", "fsync", "rename", "unlink", "ftruncate", "posix_fallocate", "open")


def target_of(what: str) -> Target:
    kind, name = what.split(":")
    return ByTenant(name) if kind == "tenant" else BySequence.parse(name)


@contextmanager
def watched(
    before: Callable[[str, tuple[Any, ...]], None], after: Callable[[str, tuple[Any, ...], Any], None]
) -> Iterator[None]:
    """Calls `before` each change and `after` it."""
    real = {name: getattr(os, name) for name in CHANGES}

    def wrapper(name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if name == "open" and not (len(arguments) > 1 and arguments[1] & os.O_CREAT):
                result = real[name](*arguments, **options)
                after(name, arguments, result)
                return result
            before(name, arguments)
            result = real[name](*arguments, **options)
            after(name, arguments, result)
            return result

        return call

    for name in CHANGES:
        setattr(os, name, wrapper(name))
    try:
        yield
    finally:
        for name, function in real.items():
            setattr(os, name, function)


def purge_and_die(root: Path | list[Path], what: str, step: int, how: str) -> int:
    """Purge in a child that is killed before change number `step`, or half-way through it if it is a write and `how` is
    "torn". The child's exit status: 0 if it came to the end.
    """
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    count = 0
    pwritev = os.pwritev

    def before(name: str, arguments: tuple[Any, ...]) -> None:
        nonlocal count
        count += 1
        if count == step:
            if how == "torn" and name == "pwritev":
                fd, (buffer,), offset = arguments
                half = len(buffer) // 8192 * 4096
                if half:
                    pwritev(fd, [buffer[:half]], offset)
            os.kill(os.getpid(), signal.SIGKILL)

    try:
        with watched(before, lambda *_: None):
            report = purge_store(root, target_of(what))
        os._exit(0 if report.complete else 3)
    except BaseException as error:  # noqa: BLE001 - the child must not go on as a test
        sys.stderr.write(f"{error!r}\n")
        os._exit(4)


class Shadow:
    """A store's folder as a drive sees it: contents and names as they are, and as they are durable.

    What is in the cache when the power goes may be lost or not, in any order but over an fsync. `image` builds three of
    these ends: nothing that was not synced; all names, no such contents; all contents, no such names.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.names: dict[Path, int] = {}
        self.contents: dict[int, bytearray] = {}
        self.files: dict[int, int] = {}  # descriptor -> file
        self.folders: dict[int, Path] = {}
        for number, path in enumerate(sorted(path for path in root.rglob("*") if path.is_file())):
            self.names[path] = number
            self.contents[number] = bytearray(path.read_bytes())
        self.durable_names = dict(self.names)
        self.durable = {number: bytes(data) for number, data in self.contents.items()}

    def after(self, name: str, arguments: tuple[Any, ...], result: Any) -> None:
        match name, arguments:
            case "open", (path, *_):
                self._opened(Path(path), result)
            case "pwritev", (fd, buffers, offset) if fd in self.files:
                data = b"".join(bytes(buffer) for buffer in buffers)[:result]
                file = self.contents[self.files[fd]]
                file.extend(bytes(max(0, offset + len(data) - len(file))))
                file[offset : offset + len(data)] = data
            case "posix_fallocate", (fd, offset, nbytes):
                file = self.contents[self.files[fd]]
                file.extend(bytes(max(0, offset + nbytes - len(file))))
            case "ftruncate", (fd, nbytes) if fd in self.files:
                del self.contents[self.files[fd]][nbytes:]
            case (("fdatasync" | "fsync"), (fd,)):
                self._synced(fd)
            case "rename", (path, to, *_):
                self.names[Path(to)] = self.names.pop(Path(path))
            case "unlink", (path, *_):
                del self.names[Path(path)]
            case _:
                pass

    def _opened(self, path: Path, fd: int) -> None:
        self.files.pop(fd, None)
        self.folders.pop(fd, None)
        if path.is_dir():
            self.folders[fd] = path
        elif self.root in path.parents:
            if path not in self.names:
                self.names[path] = max(self.contents) + 1
                self.contents[self.names[path]] = bytearray()
                self.durable[self.names[path]] = b""
            self.files[fd] = self.names[path]

    def _synced(self, fd: int) -> None:
        if fd in self.files:
            self.durable[self.files[fd]] = bytes(self.contents[self.files[fd]])
        elif fd in self.folders:
            folder = self.folders[fd]
            self.durable_names = {path: file for path, file in self.durable_names.items() if path.parent != folder}
            self.durable_names |= {path: file for path, file in self.names.items() if path.parent == folder}

    def image(self, which: str, to: Path) -> None:
        """Write down what a power cut at this moment leaves; or, if `which` is "now", what is there."""
        names = self.names if which in ("names", "now") else self.durable_names
        for path, number in names.items():
            place = to / path.relative_to(self.root)
            place.parent.mkdir(parents=True, exist_ok=True)
            data = self.contents[number] if which in ("contents", "now") else self.durable[number]
            place.write_bytes(data)
