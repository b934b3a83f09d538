"""DRAM, taken from the operating system once and in one piece."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os

import numpy as np

from kvterrace.buffers import Bytes
from kvterrace.errors import ConfigError, StoreClosedError

__all__ = ["Arena"]

#: madvise(2), Linux 5.14 and later: fault pages in, writable, with errors reported.
_MADV_POPULATE_WRITE = 23
#: Unit of prefaulting: a multiple of the 2 MiB huge page, small enough to share the work among threads.
_POPULATE_NBYTES = 128 << 20


class Arena:
    """One anonymous, page-aligned, zeroed mapping, with huge pages where the kernel allows them, faulted in when made.

    Prefaulting keeps first-touch page faults out of the first stores: on a virtual machine, memory that the host has
    yet to back comes at 0.2 to 2 GB/s, other memory at 4 to 8 GB/s. It does not hold the GIL.

    Ownership: every view keeps the mapping alive (numpy holds the buffer), so `close` never unmaps memory that somebody
    still uses, or a device. The memory goes back to the system when the arena is closed and its last view is gone.
    """

    def __init__(self, nbytes: int) -> None:
        """Map and fault in `nbytes` (a multiple of the page size). Blocks: seconds per 10 GB.

        Raises:
            ConfigError: the size makes no sense, or the system has not got that much memory.
        """
        if nbytes <= 0 or nbytes % mmap.PAGESIZE:
            raise ConfigError(f"an arena needs a multiple of {mmap.PAGESIZE} B, not {nbytes} B; round the DRAM size")
        physical = os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE
        if nbytes > physical:  # the kernel may promise more than there is, and then kill the process
            raise _too_large(nbytes, f"this machine has {physical} B")
        self.nbytes = nbytes
        try:
            memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            raise _too_large(nbytes, str(error)) from error
        with contextlib.suppress(OSError):  # a kernel without transparent huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
        bytes_: Bytes = np.frombuffer(memory, dtype=np.uint8)
        try:
            _populate(bytes_)
        except OSError as error:
            raise _too_large(nbytes, str(error)) from error
        self._bytes: Bytes | None = bytes_

    def view(self, offset: int, nbytes: int) -> Bytes:
        """Bytes `[offset, offset + nbytes)`, no copy. `offset` is a multiple of the page size; a bad range is a bug.

        Raises:
            StoreClosedError: after `close`.
        """
        if self._bytes is None:
            raise StoreClosedError("the DRAM arena was closed; open the store again")
        if offset % mmap.PAGESIZE or offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise AssertionError(f"view {offset}+{nbytes} is unaligned, or outside an arena of {self.nbytes} B")
        return self._bytes[offset : offset + nbytes]

    def close(self) -> None:
        """Give up the arena's own reference: no new views. Existing views stay valid. Closing twice does nothing."""
        self._bytes = None


def _too_large(nbytes: int, reason: str) -> ConfigError:
    return ConfigError(f"cannot take {nbytes} B of DRAM ({reason}); lower the DRAM size or free memory on this machine")


def _populate(memory: Bytes) -> None:
    """Fault every page in for writing. Raises OSError if there is no memory for it."""
    chunks = [memory[start : start + _POPULATE_NBYTES] for start in range(0, memory.nbytes, _POPULATE_NBYTES)]
    threads = min(len(chunks), os.cpu_count() or 1)
    if threads == 1:
        for chunk in chunks:
            _populate_chunk(chunk)
    else:
        from concurrent.futures import ThreadPoolExecutor  # here: it is not needed before there is an arena

        with ThreadPoolExecutor(threads, thread_name_prefix="kvterrace-populate") as pool:
            list(pool.map(_populate_chunk, chunks))


def _populate_chunk(chunk: Bytes) -> None:
    # Through ctypes because mmap.madvise holds the GIL: a 100 GB arena would stop a serving process for a minute.
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    code = madvise(ctypes.c_void_p(chunk.ctypes.data), ctypes.c_size_t(chunk.nbytes), _MADV_POPULATE_WRITE)
    if code == 0:
        return
    number = ctypes.get_errno()
    if number != errno.EINVAL:
        raise OSError(number, os.strerror(number))
    chunk[:: mmap.PAGESIZE] = 0  # an older kernel: touch the pages; numpy lets go of the GIL meanwhile
