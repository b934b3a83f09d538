"""What a process and a partition take, sampled; and whether it grows."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import statistics
import threading
from collections.abc import Sequence
from pathlib import Path

#: mallopt(3), of malloc.h.
_M_ARENA_MAX = -8
#: Too few points for a slope.
FEWEST = 4


def rss_nbytes() -> int:
    """Resident memory of this process."""
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")


def one_heap() -> None:
    """Have all threads allocate from one heap: each new thread's own would look like growth, and is none. Before any
    thread is made.
    """
    with contextlib.suppress(AttributeError):  # another C library than glibc
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)


def trim() -> None:
    """Free what is garbage, and hand free memory back to the system, so that what stays resident is in use."""
    gc.collect()
    with contextlib.suppress(AttributeError):  # another C library than glibc
        ctypes.CDLL(None).malloc_trim(0)


def descriptors() -> int:
    """Open file descriptors of this process, without the one that the question takes."""
    return sum(1 for _ in Path("/proc/self/fd").iterdir()) - 1


def threads() -> int:
    """Threads of this process, those that Python does not know of included; not the kernel's own for io_uring, which
    come and go with the load.
    """
    count = 0
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # ended since
            count += not (task / "comm").read_text().startswith("iou-")
    return count


def python_threads() -> list[str]:
    """Names, for messages."""
    return sorted(thread.name for thread in threading.enumerate())


def disk_nbytes(folder: Path) -> int:
    """What the files of a partition take of the drive, as `du` counts."""
    total = 0
    with os.scandir(folder) as entries:
        for entry in entries:
            try:
                total += entry.stat(follow_symlinks=False).st_blocks * 512
            except FileNotFoundError:  # removed since
                continue
    return total


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Theil and Sen: the median of the slopes between all pairs of points. A third of the points may be anything."""
    slopes = [(y1 - y0) / (x1 - x0) for at, (x0, y0) in enumerate(points) for x1, y1 in points[at + 1 :] if x1 != x0]
    return statistics.median(slopes) if slopes else 0.0


def after_warm_up(points: Sequence[tuple[float, float]], start_s: float, end_s: float) -> list[tuple[float, float]]:
    """Points of the last two thirds of the time."""
    return [one for one in points if one[0] >= start_s + (end_s - start_s) / 3]


def grown(points: Sequence[tuple[float, float]]) -> float:
    """Growth over the whole span of `points`, by their slope; 0 if there are too few."""
    if len(points) < FEWEST:
        return 0.0
    return slope(points) * (points[-1][0] - points[0][0])
