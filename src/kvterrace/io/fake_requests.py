"""What a fake drive does to one request."""

from __future__ import annotations

import errno
from pathlib import Path

from kvterrace.io.base import PAGE_NBYTES, IoRequest, IoResult
from kvterrace.io.fake_medium import Content, os_error
from kvterrace.io.faults import Effect, FlipBit, Short

__all__ = ["carry_out_read", "check_alignment", "finished", "written"]


def carry_out_read(result: IoResult, content: Content, effect: Effect | None) -> None:
    """Move the bytes of a READ into its buffers, as far as the effect lets them."""
    offset = result.request.offset
    limit = effect.nbytes if isinstance(effect, Short) else result.wanted_nbytes
    data = content.current[offset : offset + min(limit, result.wanted_nbytes)]
    if isinstance(effect, FlipBit) and effect.byte < data.nbytes:
        data = data.copy()
        data[effect.byte] ^= 1 << effect.bit
    result.nbytes = data.nbytes
    for buffer in result.request.buffers:
        buffer[: data.nbytes] = data[: buffer.nbytes]
        data = data[buffer.nbytes :]


def finished(result: IoResult) -> IoResult:
    """The result, once its `finish` was run."""
    if result.request.finish is not None and not result.lent:
        try:
            result.value = result.request.finish(result)
        except BaseException as error:  # noqa: BLE001 - handed to the submitter
            result.crash = error
    return result


def written(request: IoRequest) -> bytes:
    """What a WRITE brings."""
    return b"".join(buffer.tobytes() for buffer in request.buffers)


def check_alignment(request: IoRequest, path: Path) -> None:
    """Raises OSError (EINVAL) where O_DIRECT would."""
    for buffer in request.buffers:
        if buffer.nbytes % PAGE_NBYTES or buffer.__array_interface__["data"][0] % PAGE_NBYTES:
            raise os_error(errno.EINVAL, path)
    if request.offset % PAGE_NBYTES:
        raise os_error(errno.EINVAL, path)
