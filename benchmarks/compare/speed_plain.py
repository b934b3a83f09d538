"""Plain files beside which the sides of the speed comparison can be seen: one file, a block at a time by `pwrite` and
`pread`, O_DIRECT, one thread. No index, no copy, no checksum.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from speed_side import BLOCK_NBYTES, Bytes, serve


class Plain:
    """A file that is made anew for each store."""

    def __init__(self, kind: str, folder: Path, blocks: int) -> None:  # noqa: ARG002 - as for all sides
        self._path = folder / "file"
        self.helpers: list[int] = []
        self.facts: dict[str, Any] = {"mode": "pread and pwrite of 2 MiB, O_DIRECT, one thread"}

    def fresh(self) -> None:
        self._path.unlink(missing_ok=True)

    def store(self, memory: Bytes) -> None:
        fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o600)
        for number, block in enumerate(memory):
            assert os.pwrite(fd, block, number * BLOCK_NBYTES) == BLOCK_NBYTES
        os.fdatasync(fd)
        os.close(fd)

    def cool(self) -> None:
        pass

    def restore(self, memory: Bytes) -> None:
        fd = os.open(self._path, os.O_RDONLY | os.O_DIRECT)
        for number, block in enumerate(memory):
            assert os.preadv(fd, [block], number * BLOCK_NBYTES) == BLOCK_NBYTES
        os.close(fd)

    def dram_put(self, memory: Bytes) -> None:
        raise NotImplementedError

    def dram_get(self, memory: Bytes) -> None:
        raise NotImplementedError

    def close(self) -> None:
        pass


if __name__ == "__main__":
    serve(Plain, ["plain"])
