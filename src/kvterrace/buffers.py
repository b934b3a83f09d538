"""The caller's buffers, seen as blocks and parts.

A caller hands over KV in one of three forms, for `n` consecutive blocks:

* one C-contiguous buffer of `n * layout.block_nbytes` bytes (blocks end to end, parts in order): anything that offers
  the buffer protocol; or
* a sequence of one NumPy array for each part of the layout (or of the chosen layers), each with a leading dimension of
  `n` and any strides, `array[b]` holding the part of block `b` with `part_nbytes` bytes. An engine's own tensors fit
  this through a strided view; or
* `PagedBlocks`: such arrays of a whole pool, and which of its rows the blocks are.

The library borrows these buffers until the transfer that uses them is done; it never keeps them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from kvterrace.errors import LayoutError
from kvterrace.layout import KVLayout

__all__ = ["BlockBuffers", "Bytes", "PagedBlocks"]

Bytes = npt.NDArray[np.uint8]

_Form = tuple[tuple[int, ...], tuple[int, ...], int]

#: Of I/O, as in `kvterrace.io.base`; and the least that is worth an entry of its own in a request.
_PAGE_NBYTES, _RUN_NBYTES = 4096, 8192

#: Steps that one question whether two arrays share memory may take; beyond that they are taken to.
_MAX_WORK = 1000

_HOW_TO_VIEW = (
    "view a torch tensor as tensor.numpy(), one of bfloat16 or float8 as tensor.view(torch.uint16 or uint8).numpy()"
)


@dataclass(frozen=True, slots=True)
class PagedBlocks:
    """Blocks in an engine's pool of pages, in any order: block `b` is row `rows[b]` of every array.

    Attributes:
        parts: one array for each part of the layout (or of the chosen layers), as above; its leading dimension counts
            the rows of the pool.
        rows: one row for each block; to read into them, no row twice.
    """

    parts: Sequence[npt.NDArray[Any]]
    rows: Sequence[int]


class BlockBuffers:
    """`n` blocks of a caller's memory, part by part. Not thread-safe by itself; distinct blocks may be used at once."""

    __slots__ = ("_arrays", "_in_one_piece", "_pieces", "blocks", "parts", "rows")

    def __init__(self, layout: KVLayout, source: Any, blocks: int, *, layers: range | None = None) -> None:
        """View `source` as `blocks` blocks, in place: no byte of it is copied.

        Args:
            layers: the layers that `source` holds; None means all.

        Raises:
            LayoutError: the buffer has another size or shape, is no plain memory, or there are no such layers or rows.
        """
        self.blocks = blocks
        #: Row of `pieces` that each block is; empty: block `b` is row `b`.
        self.rows: tuple[int, ...] = ()
        self.parts = range(layout.parts) if layers is None else _parts_of(layout, layers)
        sizes = layout.part_nbytes[self.parts.start : self.parts.stop]
        paged = isinstance(source, PagedBlocks)
        self._in_one_piece = not paged and (not isinstance(source, Sequence) or _offers_memory(source))
        if paged:
            pool = _pool_rows(source.parts)
            self.rows = _rows(source.rows, blocks, pool)
            self._arrays = _part_arrays(source.parts, pool, sizes)
            self._pieces = _joined(self._arrays)
        elif self._in_one_piece:
            table = _table(source, blocks, sum(sizes))
            edges = itertools.accumulate(sizes, initial=0)
            self._arrays = [table[:, a:b] for a, b in itertools.pairwise(edges)]
            self._pieces = [table]
        else:
            self._arrays = _part_arrays(source, blocks, sizes)
            self._pieces = _joined(self._arrays)

    def require_writable(self) -> Self:
        """These buffers, if every byte of every block is a place of its own that can be written: fit to read into.

        Raises:
            LayoutError: memory is read-only, or one byte of it would stand for two.
        """
        if len(set(self.rows)) < len(self.rows):
            raise LayoutError("paged blocks: a row comes twice; one block would overwrite the other")
        extents: dict[_Form, tuple[int, int]] = {}
        places: list[tuple[int, int, int]] = []
        starts: dict[int, int] = {}
        for number, array in enumerate(self._arrays):
            if not array.flags.writeable:
                raise LayoutError(
                    f"the memory of part {number} is not writable; to read into it, give e.g. a bytearray or an array"
                )
            if self._in_one_piece or not array.size:
                continue
            form = (array.shape, array.strides, array.itemsize)
            if form not in extents and not _is_injective(*form):
                raise LayoutError(
                    f"part array {number} overlaps itself in memory (shape {array.shape}, strides {array.strides} B); "
                    "what is read into it would overwrite itself"
                )
            if form not in extents:
                extents[form] = _extent(*form)
            at = array.__array_interface__["data"][0]
            places.append((at + extents[form][0], at + extents[form][1], number))
            twin = starts.setdefault(at, number)
            if twin != number:
                raise LayoutError(f"part arrays {twin} and {number} are the same memory; one would overwrite the other")
        for group in _touching(places):
            pair = _overlap([self._arrays[number] for number in group])
            if pair is not None:
                one, other = sorted((group[pair[0]], group[pair[1]]))
                raise LayoutError(
                    f"part arrays {one} and {other} overlap in memory, or it cannot be told whether they do; one would "
                    "overwrite the other"
                )
        return self

    @property
    def pieces(self) -> list[npt.NDArray[Any]]:
        """The same memory as few arrays, for one who copies it without us: their first axis counts blocks (or rows of
        the pool, see `rows`), and one behind the other they hold a block's parts in order. One array holds all parts,
        along its second axis or as plain bytes; else there is one for each part. They do not keep that memory alive:
        keep this object as well.
        """
        return list(self._pieces)

    @property
    def in_pages(self) -> bool:
        """Whether each block lies in a few runs of whole pages, so that a drive can read into it: see `runs`."""
        return bool(self.blocks) and all(_in_pages(array) for array in self._runs_of())

    def runs(self, block: int) -> list[Bytes]:
        """The memory of `block`, in order; its parts lie end to end over these. Only if `in_pages`."""
        row = self._row(block)
        return [array[row].reshape(-1).view(np.uint8) for array in self._runs_of()]

    def _runs_of(self) -> list[npt.NDArray[Any]]:
        return self._pieces if self._in_one_piece else self._arrays

    def copy_in(self, block: int, part: int, slot: Bytes) -> None:
        """Copy the caller's part of `block` into `slot` (exactly its bytes). `part` counts from `parts.start`."""
        array = self._arrays[part][self._row(block)]
        np.copyto(slot.view(array.dtype).reshape(array.shape), array)

    def copy_out(self, block: int, payload: Bytes) -> None:
        """Copy the parts of `block`, which lie end to end from the start of `payload`, to the caller. Only after
        `require_writable`. As few copies as the caller's memory allows: one, if its parts lie at even distances.
        """
        at, row = 0, self._row(block)
        for piece in self._pieces:
            view = piece[row]
            np.copyto(view, payload[at : at + view.nbytes].view(view.dtype).reshape(view.shape))
            at += view.nbytes

    def _row(self, block: int) -> int:
        return self.rows[block] if self.rows else block


def _pool_rows(parts: Sequence[Any]) -> int:
    """Rows of the pool that the first array has; `_part_arrays` holds the others to it."""
    shape = getattr(parts[0], "shape", ()) if len(parts) else ()
    return int(shape[0]) if shape else 0


def _rows(rows: Sequence[int], blocks: int, pool: int) -> tuple[int, ...]:
    if len(rows) != blocks:
        raise LayoutError(f"paged blocks: {len(rows)} rows for {blocks} blocks; give one for each")
    found = tuple(int(row) for row in rows)
    for row in found:
        if not 0 <= row < pool:
            raise LayoutError(f"paged blocks: row {row} is not in a pool of {pool} rows")
    return found


def _in_pages(array: npt.NDArray[Any]) -> bool:
    first = array[0]
    numbers = first.__array_interface__["data"][0], first.nbytes, *(array.strides[:1] if len(array) > 1 else ())
    return first.flags.c_contiguous and first.nbytes >= _RUN_NBYTES and not any(one % _PAGE_NBYTES for one in numbers)


def _parts_of(layout: KVLayout, layers: object) -> range:
    if isinstance(layers, range) and layers.step == 1 and 0 <= layers.start < layers.stop <= layout.layers:
        return range(layers.start * layout.parts_per_layer, layers.stop * layout.parts_per_layer)
    raise LayoutError(f"layers must be a range of step 1 within 0..{layout.layers - 1}, not {layers!r}")


def _offers_memory(source: object) -> bool:
    """Whether `source` offers the buffer protocol (`collections.abc.Buffer`, from Python 3.12 on)."""
    try:
        memoryview(source).release()  # type: ignore[arg-type]  # that is the question
    except TypeError:
        return False
    except (ValueError, BufferError):  # it does, in a format that a memoryview does not know
        return True
    return True


def _is_injective(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> bool:
    """Whether no two elements of such an array share a byte.

    Holds where each axis steps over all that the axes of smaller stride span. That is true of every view that slices,
    transposes, splits or merges the axes of an allocation: an engine's blocks may interleave. Of what can be built
    with `as_strided` beyond that, even the few forms that do not overlap are taken to.
    """
    span = itemsize
    for stride, length in sorted((abs(stride), length) for stride, length in zip(strides, shape, strict=True)):
        if length > 1:
            if stride < span:
                return False
            span += stride * (length - 1)
    return True


def _extent(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> tuple[int, int]:
    """First byte of such an array and the one behind its last, from the address of its first element."""
    steps = [stride * (length - 1) for stride, length in zip(strides, shape, strict=True)]
    return sum(step for step in steps if step < 0), sum(step for step in steps if step > 0) + itemsize


def _touching(places: list[tuple[int, int, int]]) -> list[list[int]]:
    """The numbers of `(first byte, byte behind the last, number)`, in groups that share no byte with each other; only
    groups of more than one.
    """
    groups: list[list[int]] = []
    reached = 0
    for first, end, number in sorted(places):
        if groups and first < reached:
            groups[-1].append(number)
        else:
            groups.append([number])
        reached = max(reached, end)
    return [group for group in groups if len(group) > 1]


def _overlap(arrays: list[npt.NDArray[Any]]) -> tuple[int, int] | None:
    """Two of these arrays that share a byte, or may; None if it is certain that no two do. None of them is empty."""
    joined = _joined(arrays)
    if len(joined) == 1 and _is_injective(joined[0].shape, joined[0].strides, joined[0].itemsize):
        return None
    if any(_are_apart(arrays, abs(stride)) for stride in set(arrays[0].strides) - {0}):
        return None
    for (one, a), (other, b) in itertools.combinations(enumerate(arrays), 2):
        try:
            if not np.shares_memory(a, b, max_work=_MAX_WORK):  # type: ignore[arg-type]  # any number of steps may be given
                continue
        except np.exceptions.TooHardError:
            pass
        return one, other
    return None


def _are_apart(arrays: list[npt.NDArray[Any]], period: int) -> bool:
    """Whether no two arrays share a byte, shown by addresses modulo `period`: axes that step by multiples of it stand
    still there, and what the others span is an arc of a circle. True of parts that lie side by side within each block,
    token or page of one allocation, at whatever distances.
    """
    arcs = []
    for array in arrays:
        axes = [(stride, length) for stride, length in zip(array.strides, array.shape, strict=True) if stride % period]
        low, high = _extent(tuple(length for _, length in axes), tuple(stride for stride, _ in axes), array.itemsize)
        first = (array.__array_interface__["data"][0] + low) % period
        arcs.append((first, first + high - low))
    arcs.sort()
    arcs.append((arcs[0][0] + period, 0))  # the first comes round again
    return all(end <= first for (_, end), (first, _) in itertools.pairwise(arcs))


def _table(source: Any, blocks: int, block_nbytes: int) -> Bytes:
    if isinstance(source, np.ndarray):
        _require_plain(source.dtype, "the buffer")
    try:
        flat = np.frombuffer(source, dtype=np.uint8)
        plain = "O" not in memoryview(source).format
    except (ValueError, TypeError, BufferError) as error:
        raise LayoutError(
            f"a block buffer must be C-contiguous and offer the buffer protocol: {error}; {_HOW_TO_VIEW}"
        ) from error
    if not plain:
        raise LayoutError("the buffer holds Python objects, not plain memory")
    want = blocks * block_nbytes
    if flat.nbytes != want:
        raise LayoutError(f"{blocks} blocks of {block_nbytes} B need a buffer of {want} B, not {flat.nbytes} B")
    return flat.reshape(blocks, block_nbytes)


def _joined(arrays: list[npt.NDArray[Any]]) -> list[npt.NDArray[Any]]:
    """The part arrays as one array `(blocks, parts, ...)` if they are alike and lie at even distances, as the layers of
    one allocation do; else as they are.
    """
    first = arrays[0]
    if any((one.shape, one.strides, one.dtype) != (first.shape, first.strides, first.dtype) for one in arrays):
        return arrays
    starts = [one.__array_interface__["data"][0] for one in arrays]
    steps = {b - a for a, b in itertools.pairwise(starts)}
    if len(steps) != 1:
        return arrays
    shape, strides = (len(first), len(arrays), *first.shape[1:]), (first.strides[0], steps.pop(), *first.strides[1:])
    return [np.lib.stride_tricks.as_strided(first, shape, strides)]


def _part_arrays(source: Sequence[Any], blocks: int, sizes: Sequence[int]) -> list[npt.NDArray[Any]]:
    if len(source) != len(sizes):
        raise LayoutError(f"{len(source)} part arrays given, the layout asks for {len(sizes)}")
    arrays = []
    for number, (item, nbytes) in enumerate(zip(source, sizes, strict=True)):
        # Anything else would be converted to an array of its own: what is read into that is lost.
        if not isinstance(item, np.ndarray):
            raise LayoutError(f"part array {number} is a {type(item).__name__}, not a NumPy array; {_HOW_TO_VIEW}")
        array = np.asarray(item)  # the same memory without the manners of a subclass
        _require_plain(array.dtype, f"part array {number}")
        if array.ndim < 2 or array.shape[0] != blocks:
            raise LayoutError(
                f"part array {number} has shape {array.shape}; its first dimension must be {blocks} blocks"
            )
        if blocks and array[0].nbytes != nbytes:
            raise LayoutError(f"part array {number} holds {array[0].nbytes} B a block, the layout asks for {nbytes} B")
        arrays.append(array)
    return arrays


def _require_plain(dtype: np.dtype[Any], what: str) -> None:
    """Refuse elements that are not their bytes: references, and structures, whose padding NumPy does not copy."""
    if dtype.hasobject or dtype.names is not None:
        raise LayoutError(f"{what} has dtype {dtype}; give numbers, e.g. a view as float16 or uint8")
