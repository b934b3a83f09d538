"""A caller's memory is read and written in place, bit by bit, whatever its strides; what does not fit is refused."""

import array
import ctypes
import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvterrace.buffers import BlockBuffers, Bytes, PagedBlocks
from kvterrace.errors import LayoutError
from kvterrace.layout import KVLayout

LAYOUT = KVLayout(layers=3, kv_heads=2, head_dim=4, dtype="float16", block_tokens=2, value_head_dim=8)
BLOCKS = 5


def random_bytes(nbytes: int, seed: int = 0) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def slot(nbytes: int) -> Bytes:
    return np.zeros(nbytes, np.uint8)


def read(buffers: BlockBuffers, layout: KVLayout, block: int) -> bytes:
    """The block's bytes as the store sees them, parts in order."""
    found = b""
    for index, part in enumerate(buffers.parts):
        target = slot(layout.part_nbytes[part])
        buffers.copy_in(block, index, target)
        found += target.tobytes()
    return found


def write(buffers: BlockBuffers, _: KVLayout, block: int, data: Bytes) -> None:
    buffers.copy_out(block, data)


def engine_cache(layout: KVLayout, *, layers: range | None = None) -> list[npt.NDArray[Any]]:
    """Parts the way an engine holds them: `(heads, tokens of all blocks and some more, dim)`, seen block by block.

    Nothing in a view is contiguous but single rows.
    """
    parts = []
    for layer in layers or range(layout.layers):
        for shape in layout.part_shapes:
            heads, tokens, dim = shape
            cache = np.zeros((heads, BLOCKS * tokens + 3, dim), np.float16)
            seen = cache[:, : BLOCKS * tokens].reshape(heads, BLOCKS, tokens, dim, copy=False).transpose(1, 0, 2, 3)
            assert seen.base is not None
            assert not seen[0].flags.c_contiguous, layer
            parts.append(seen)
    return parts


def test_contiguous_blocks_lie_end_to_end_parts_in_order() -> None:
    size = LAYOUT.block_nbytes
    data = random_bytes(BLOCKS * size)
    buffers = BlockBuffers(LAYOUT, data, BLOCKS)
    assert buffers.parts == range(LAYOUT.parts)
    for block in range(BLOCKS):
        assert read(buffers, LAYOUT, block) == data[block * size : (block + 1) * size].tobytes()


@pytest.mark.parametrize(
    "form",
    [
        bytearray,
        memoryview,
        lambda data: data.view(np.float16).reshape(BLOCKS, -1),
        lambda data: array.array("B", data.tobytes()),
        lambda data: (ctypes.c_uint16 * (data.size // 2)).from_buffer(data),
    ],
)
def test_contiguous_memory_of_any_kind_is_written_in_place(form: Any) -> None:
    source = form(random_bytes(BLOCKS * LAYOUT.block_nbytes))
    fresh = random_bytes(LAYOUT.block_nbytes, seed=1)
    before = np.frombuffer(source, np.uint8).copy()
    write(BlockBuffers(LAYOUT, source, BLOCKS), LAYOUT, 2, fresh)
    after = np.frombuffer(source, np.uint8).reshape(BLOCKS, -1)
    assert np.array_equal(after[2], fresh)
    untouched = [0, 1, 3, 4]
    assert np.array_equal(after[untouched], before.reshape(BLOCKS, -1)[untouched])


def test_read_only_memory_can_be_stored() -> None:
    data = random_bytes(BLOCKS * LAYOUT.block_nbytes)
    assert read(BlockBuffers(LAYOUT, data.tobytes(), BLOCKS), LAYOUT, 0) == data[: LAYOUT.block_nbytes].tobytes()


def test_strided_parts_of_an_engine_round_trip() -> None:
    arrays = engine_cache(LAYOUT)
    buffers = BlockBuffers(LAYOUT, arrays, BLOCKS)
    blocks = [random_bytes(LAYOUT.block_nbytes, seed=block) for block in range(BLOCKS)]
    for block, data in enumerate(blocks):
        write(buffers, LAYOUT, block, data)
    for block, data in enumerate(blocks):
        assert b"".join(array[block].tobytes() for array in arrays) == data.tobytes()
        assert read(buffers, LAYOUT, block) == data.tobytes()


def test_strided_and_contiguous_sources_give_the_same_bytes() -> None:
    arrays = engine_cache(LAYOUT)
    strided = BlockBuffers(LAYOUT, arrays, BLOCKS)
    flat = random_bytes(BLOCKS * LAYOUT.block_nbytes)
    contiguous = BlockBuffers(LAYOUT, flat, BLOCKS)
    for block in range(BLOCKS):
        strided.copy_out(block, np.frombuffer(read(contiguous, LAYOUT, block), np.uint8))
        assert read(strided, LAYOUT, block) == read(contiguous, LAYOUT, block)


@pytest.mark.parametrize(
    "places", [range(6), range(5, -1, -1), range(0, 12, 2), [0, 1, 2, 3, 4, 6], [1, 0, 2, 3, 5, 4]]
)
def test_parts_of_one_allocation_at_any_distances(places: Sequence[int]) -> None:
    """Alike parts at even distances are copied at once, at others one by one: the bytes are the same."""
    layout = KVLayout(layers=3, kv_heads=2, head_dim=4, dtype="float16", block_tokens=3)
    memory = np.zeros((12, BLOCKS, 2, 3, 4), np.float16)
    buffers = BlockBuffers(layout, [memory[place] for place in places], BLOCKS).require_writable()
    data = random_bytes(BLOCKS * layout.block_nbytes).reshape(BLOCKS, 6, 48)
    for block in range(BLOCKS):
        buffers.copy_out(block, data[block].reshape(-1))
    for part, place in enumerate(places):
        assert memory[place].tobytes() == data[:, part].tobytes()
    untouched = sorted(set(range(12)) - set(places))
    assert not memory[untouched].any()


def test_some_layers_only() -> None:
    layers = range(1, 3)
    arrays = engine_cache(LAYOUT, layers=layers)
    buffers = BlockBuffers(LAYOUT, arrays, BLOCKS, layers=layers)
    assert buffers.parts == range(2, 6)
    data = random_bytes(sum(LAYOUT.part_nbytes[2:6]))
    write(buffers, LAYOUT, 4, data)
    assert b"".join(array[4].tobytes() for array in arrays) == data.tobytes()


@given(
    heads=st.integers(1, 3),
    tokens=st.integers(1, 4),
    dim=st.integers(1, 5),
    blocks=st.integers(1, 4),
    axes=st.permutations([0, 1, 2, 3]),
    steps=st.tuples(*[st.sampled_from([1, 2, -1])] * 4),
    dtype=st.sampled_from(["float32", "float16", "int8"]),
)
def test_any_strides_round_trip_every_bit_and_touch_no_other(
    heads: int, tokens: int, dim: int, blocks: int, axes: list[int], steps: tuple[int, ...], dtype: str
) -> None:
    layout = KVLayout(1, heads, dim, dtype, tokens)
    shape = (blocks, heads, tokens, dim)
    arrays, memories = [], []
    for _ in range(2):
        stored = np.full([shape[axis] * abs(steps[axis]) for axis in axes], 7, dtype)
        view = stored.transpose(np.argsort(axes))[tuple(slice(None, None, step) for step in steps)]
        assert view.shape == shape
        arrays.append(view)
        memories.append(stored)
    buffers = BlockBuffers(layout, arrays, blocks).require_writable()
    for block in range(blocks):
        data = random_bytes(layout.block_nbytes, seed=block)  # holds NaNs of every kind
        write(buffers, layout, block, data)
        assert read(buffers, layout, block) == data.tobytes()
    for stored, view in zip(memories, arrays, strict=True):
        view[...] = 7
        assert np.all(stored == 7)


@pytest.mark.parametrize("off_by", [-1, 1])
def test_a_contiguous_buffer_of_another_size_is_refused(off_by: int) -> None:
    with pytest.raises(LayoutError, match=f"{BLOCKS * LAYOUT.block_nbytes} B"):
        BlockBuffers(LAYOUT, slot(BLOCKS * LAYOUT.block_nbytes + off_by), BLOCKS)


@pytest.mark.parametrize("source", [7, object(), None, slot(2 * BLOCKS * LAYOUT.block_nbytes)[::2]])
def test_what_is_no_contiguous_buffer_is_refused(source: Any) -> None:
    with pytest.raises(LayoutError, match="contiguous"):
        BlockBuffers(LAYOUT, source, BLOCKS)


def test_parts_of_another_number_shape_or_size_are_refused() -> None:
    arrays = engine_cache(LAYOUT)
    with pytest.raises(LayoutError, match="5 part arrays given, the layout asks for 6"):
        BlockBuffers(LAYOUT, arrays[:-1], BLOCKS)
    with pytest.raises(LayoutError, match="first dimension must be 4 blocks"):
        BlockBuffers(LAYOUT, arrays, 4)
    with pytest.raises(LayoutError, match="part array 0"):
        BlockBuffers(LAYOUT, [array.reshape(-1) for array in arrays], BLOCKS)
    with pytest.raises(LayoutError, match="part array 1 holds 32 B a block, the layout asks for 64 B"):
        BlockBuffers(LAYOUT, [arrays[0], arrays[0], *arrays[2:]], BLOCKS)


@pytest.mark.parametrize("layers", [range(0), range(2, 4), range(-1, 2), range(0, 3, 2), (0,), [0, 1], 1, slice(0, 1)])
def test_layers_that_the_layout_lacks_are_refused(layers: Any) -> None:
    with pytest.raises(LayoutError, match="layers"):
        BlockBuffers(LAYOUT, engine_cache(LAYOUT), BLOCKS, layers=layers)


def test_no_blocks_need_no_memory() -> None:
    assert BlockBuffers(LAYOUT, b"", 0).blocks == 0
    assert BlockBuffers(LAYOUT, [array[:0] for array in engine_cache(LAYOUT)], 0).blocks == 0


def test_memory_of_a_map_is_contiguous() -> None:
    with mmap.mmap(-1, BLOCKS * LAYOUT.block_nbytes) as memory:
        buffers = BlockBuffers(LAYOUT, memory, BLOCKS).require_writable()
        fresh = random_bytes(LAYOUT.block_nbytes)
        write(buffers, LAYOUT, 4, fresh)
        assert memory[4 * LAYOUT.block_nbytes :] == fresh.tobytes()
        del buffers


class LooksLikeATensor:
    """What `numpy.asarray` would make a copy of."""

    def __init__(self, data: npt.NDArray[Any]) -> None:
        self._data = data

    def __array__(self, dtype: Any = None, copy: Any = None) -> npt.NDArray[Any]:
        return self._data.copy()


@pytest.mark.parametrize("convert", [lambda part: part.tolist(), LooksLikeATensor, lambda part: part.tobytes()])
def test_parts_that_would_be_copied_are_refused_saying_how_to_view_them(convert: Any) -> None:
    arrays: list[Any] = list(engine_cache(LAYOUT))
    arrays[2] = convert(arrays[2])
    with pytest.raises(LayoutError, match=r"part array 2 is a \w+, not a NumPy array; .*numpy\(\).*bfloat16.*uint16"):
        BlockBuffers(LAYOUT, arrays, BLOCKS)


def test_a_bare_tensor_is_refused_saying_how_to_view_it() -> None:
    with pytest.raises(LayoutError, match=r"numpy\(\).*bfloat16.*uint16"):
        BlockBuffers(LAYOUT, LooksLikeATensor(slot(BLOCKS * LAYOUT.block_nbytes)), BLOCKS)


def test_a_subclass_is_taken_for_its_memory() -> None:
    arrays = engine_cache(LAYOUT)
    masked = [np.ma.MaskedArray(part, mask=True) for part in arrays]
    data = random_bytes(LAYOUT.block_nbytes)
    write(BlockBuffers(LAYOUT, masked, BLOCKS).require_writable(), LAYOUT, 1, data)
    assert b"".join(part[1].tobytes() for part in arrays) == data.tobytes()


#: Their elements are not their bytes: references, and structures whose padding a copy leaves out.
NOT_PLAIN = [np.dtype(object), np.dtype([("a", object)]), np.dtype([("a", "u1"), ("b", "u4")], align=True)]


@pytest.mark.parametrize("dtype", NOT_PLAIN, ids=str)
def test_elements_that_are_not_their_bytes_are_refused(dtype: np.dtype[Any]) -> None:
    layout = KVLayout(1, 1, 16, "int8", 1, parts_per_layer=1)
    count = 16 // dtype.itemsize
    with pytest.raises(LayoutError, match=r"part array 0 has dtype"):
        BlockBuffers(layout, [np.zeros((BLOCKS, count), dtype)], BLOCKS)
    with pytest.raises(LayoutError, match="buffer has dtype"):
        BlockBuffers(layout, np.zeros((BLOCKS, count), dtype), BLOCKS)
    if dtype.hasobject:
        with pytest.raises(LayoutError, match="Python objects"):
            BlockBuffers(layout, np.zeros((BLOCKS, count), dtype).data, BLOCKS)


def test_fortran_order_is_not_contiguous() -> None:
    shape = (BLOCKS, LAYOUT.block_nbytes)
    with pytest.raises(LayoutError, match="contiguous"):
        BlockBuffers(LAYOUT, np.zeros(shape, np.uint8, order="F"), BLOCKS)


def test_to_read_into_memory_it_must_be_writable() -> None:
    data = bytes(BLOCKS * LAYOUT.block_nbytes)
    buffers = BlockBuffers(LAYOUT, bytearray(data), BLOCKS)
    assert buffers.require_writable() is buffers
    with pytest.raises(LayoutError, match="part 0 is not writable"):
        BlockBuffers(LAYOUT, data, BLOCKS).require_writable()
    arrays = engine_cache(LAYOUT)
    BlockBuffers(LAYOUT, arrays, BLOCKS).require_writable()
    arrays[3].flags.writeable = False
    with pytest.raises(LayoutError, match="part 3 is not writable"):
        BlockBuffers(LAYOUT, arrays, BLOCKS).require_writable()


ONE_PART = KVLayout(1, 2, 4, "float16", 2, parts_per_layer=1)
AS_STRIDED = np.lib.stride_tricks.as_strided


@pytest.mark.parametrize(
    "strides",
    [
        (0, 16, 8, 2),  # all blocks in one place
        (16, 16, 8, 2),  # a block begins inside the one before
        (30, 16, 8, 2),  # ... by one element
        (32, 16, 8, 0),  # a row of one element
        (32, 16, 8, 1),  # elements overlap by a byte
        (-16, 16, 8, 2),  # backwards
        (8, 80, 8, 2),  # blocks interleave, a token apart
    ],
)
def test_memory_that_stands_for_two_places_can_be_stored_but_not_read_into(strides: tuple[int, ...]) -> None:
    memory = np.zeros(4096, np.uint8)[2048:].view(np.float16)
    array = AS_STRIDED(memory, (BLOCKS, 2, 2, 4), strides)
    buffers = BlockBuffers(ONE_PART, [array], BLOCKS)
    assert len(read(buffers, ONE_PART, 0)) == ONE_PART.block_nbytes
    with pytest.raises(LayoutError, match="part array 0 overlaps itself"):
        buffers.require_writable()


def test_a_stride_that_no_element_follows_does_not_matter() -> None:
    array = AS_STRIDED(np.zeros(64, np.float16), (1, 2, 2, 4), (0, 16, 8, 2))
    BlockBuffers(ONE_PART, [array], 1).require_writable()


def test_blocks_may_interleave_in_an_engines_memory() -> None:
    heads, tokens, dim = 2, BLOCKS * 2 + 3, 4
    cache = np.zeros((heads, tokens, dim), np.float16)
    view = AS_STRIDED(cache, (BLOCKS, heads, 2, dim), (2 * dim * 2, tokens * dim * 2, dim * 2, 2))
    BlockBuffers(ONE_PART, [view], BLOCKS).require_writable()
    both = np.zeros((BLOCKS, 2, heads, 2, dim), np.float16)  # K and V of a block side by side
    two_parts = KVLayout(1, heads, dim, "float16", 2)
    BlockBuffers(two_parts, [both[:, 0], both[:, 1]], BLOCKS).require_writable()


def test_one_array_for_two_parts_can_be_stored_but_not_read_into() -> None:
    layout = KVLayout(1, 2, 4, "float16", 2)
    array = np.zeros((BLOCKS, 2, 2, 4), np.float16)
    buffers = BlockBuffers(layout, [array, array[:]], BLOCKS)
    with pytest.raises(LayoutError, match="part arrays 0 and 1 are the same memory"):
        buffers.require_writable()


def test_parts_that_overlap_in_part_can_be_stored_but_not_read_into() -> None:
    layout = KVLayout(2, 1, 8, "float16", 4)
    nbytes = layout.part_nbytes[0]
    memory = np.zeros(16 * nbytes, np.uint8)

    def at(*places: int) -> BlockBuffers:
        return BlockBuffers(layout, [memory[one : one + 2 * nbytes].reshape(2, nbytes) for one in places], 2)

    at(0, 2 * nbytes, 6 * nbytes, 9 * nbytes).require_writable()
    for second in (nbytes, 1, 2 * nbytes - 1):  # inside what part 0 takes
        with pytest.raises(LayoutError, match="part arrays 0 and 1 overlap"):
            at(0, second, 6 * nbytes, 9 * nbytes).require_writable()
    with pytest.raises(LayoutError, match="part arrays 0 and 3 overlap"):
        at(9 * nbytes, 2 * nbytes, 6 * nbytes, 8 * nbytes).require_writable()


@pytest.mark.parametrize("order", [range(6), [0, 1, 2, 3, 5, 4], [4, 0, 5, 1, 3, 2]])
@pytest.mark.parametrize("axis", [1, 2, 3])
def test_parts_may_interleave_by_block_head_or_token(order: Sequence[int], axis: int) -> None:
    layout = KVLayout(layers=3, kv_heads=2, head_dim=4, dtype="float16", block_tokens=3)
    shape = [BLOCKS, 2, 3, 4]
    shape.insert(axis, 8)
    memory = np.zeros(shape, np.float16)
    views = [np.moveaxis(memory, axis, 0)[place] for place in order]
    BlockBuffers(layout, views, BLOCKS).require_writable()
    with pytest.raises(LayoutError, match="part arrays"):
        BlockBuffers(layout, [*views[:5], views[0][::-1]], BLOCKS).require_writable()


@given(data=st.data())
def test_no_parts_that_overlap_are_read_into(data: st.DataObject) -> None:
    """Against the definition: the addresses of all bytes."""
    layout = KVLayout(3, 1, 6, "float16", 1, parts_per_layer=1)
    memory = np.zeros(2000, np.uint8)[1000:].view(np.uint16)
    arrays, touched = [], []
    for _ in range(3):
        start = data.draw(st.integers(0, 40))
        strides = [2 * data.draw(st.integers(-9, 9)) for _ in range(3)]
        arrays.append(AS_STRIDED(memory[start:], (2, 2, 3), strides))
        places = np.full(1, 2 * start, np.int64)
        for length, stride in zip((2, 2, 3), strides, strict=True):
            places = np.add.outer(places, np.arange(length) * stride).ravel()
        touched.append(np.add.outer(places, np.arange(2)).ravel())
    every = np.concatenate(touched)
    try:
        BlockBuffers(layout, arrays, 2).require_writable()
    except LayoutError:
        return
    assert len(np.unique(every)) == len(every)


@given(
    shape=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    strides=st.lists(st.integers(-12, 12), min_size=3, max_size=3),
    blocks=st.integers(1, 3),
    block_stride=st.integers(-40, 40),
)
def test_nothing_that_overlaps_is_read_into(
    shape: list[int], strides: list[int], blocks: int, block_stride: int
) -> None:
    """Against the definition: the addresses of all bytes."""
    elements = int(np.prod(shape))
    layout = KVLayout(1, 1, elements, "float16", 1, parts_per_layer=1)
    memory = np.zeros(1000, np.uint8)[500:].view(np.uint16)
    array = AS_STRIDED(memory, (blocks, *shape), (block_stride, *strides[: len(shape)]))
    places = np.zeros(1, np.int64)
    for length, stride in zip(array.shape, array.strides, strict=True):
        places = np.add.outer(places, np.arange(length) * stride).ravel()
    touched = np.add.outer(places, np.arange(2)).ravel()
    overlaps = len(np.unique(touched)) < len(touched)
    try:
        BlockBuffers(layout, [array], blocks).require_writable()
    except LayoutError:
        return
    assert not overlaps


def test_no_blocks_overlap_nothing() -> None:
    empty = np.zeros((0, 2, 2, 4), np.float16)
    BlockBuffers(KVLayout(1, 2, 4, "float16", 2), [empty, empty], 0).require_writable()


# -- memory that a drive can read into ---------------------------------------------------------------------------------

#: Four parts of 8 KiB.
PAGED = KVLayout(layers=2, kv_heads=4, head_dim=64, dtype="float16", block_tokens=16)


def pages(nbytes: int, off: int = 0) -> Bytes:
    """Random bytes from `off` bytes behind a page boundary on."""
    memory = random_bytes(nbytes + 2 * 4096)
    start = -memory.ctypes.data % 4096 + off
    return memory[start : start + nbytes]


def test_blocks_in_pages_are_few_runs_of_the_callers_own_memory() -> None:
    one = pages(3 * 32768)
    buffers = BlockBuffers(PAGED, one, 3)
    assert buffers.in_pages
    (run,) = buffers.runs(2)
    assert (run.ctypes.data, run.nbytes) == (one.ctypes.data + 2 * 32768, 32768)

    arrays = [pages(3 * 8192 * 2).view(np.uint16).reshape(6, 4, 16, 64)[::2] for _ in range(4)]
    parted = BlockBuffers(PAGED, arrays, 3)
    assert parted.in_pages
    assert [run.ctypes.data for run in parted.runs(1)] == [array.ctypes.data + 2 * 8192 for array in arrays]
    assert b"".join(run.tobytes() for run in parted.runs(1)) == b"".join(array[1].tobytes() for array in arrays)


@pytest.mark.parametrize(
    "source",
    [
        pages(3 * 32768, 64),
        [pages(3 * 8192).reshape(3, 8192)] * 3 + [pages(3 * 8192, 512).reshape(3, 8192)],
        [pages(3 * 8256).reshape(3, 8256)[:, :8192]] * 4,
        [pages(3 * 8192).view(np.uint16).reshape(3, 64, 64).transpose(0, 2, 1)] * 4,
    ],
    ids=["off a boundary", "one part off", "blocks at odd distances", "elements apart"],
)
def test_other_memory_does_not_lie_in_pages(source: Any) -> None:
    assert not BlockBuffers(PAGED, source, 3).in_pages


def test_blocks_that_end_within_a_page_and_no_blocks_do_not_lie_in_pages() -> None:
    layout = KVLayout(layers=1, kv_heads=1, head_dim=64, dtype="float16", block_tokens=40)  # 10,240 B
    assert not BlockBuffers(layout, pages(2 * 10240), 2).in_pages
    assert not BlockBuffers(PAGED, b"", 0).in_pages


def test_runs_of_paged_blocks_are_their_rows() -> None:
    parts = [pages(8 * 8192).reshape(8, 8192) for _ in range(4)]
    buffers = BlockBuffers(PAGED, PagedBlocks(parts, [6, 0, 3]), 3)
    assert buffers.in_pages
    for block, row in enumerate([6, 0, 3]):
        assert [run.ctypes.data for run in buffers.runs(block)] == [part.ctypes.data + row * 8192 for part in parts]


POOL_ROWS = [6, 0, 3, 7, 2]


def pool(seed: int | None = None) -> list[npt.NDArray[Any]]:
    """Part arrays of a pool of eight rows, with a gap behind each row."""
    made = []
    for part, nbytes in enumerate(LAYOUT.part_nbytes):
        rows = random_bytes(8 * (nbytes + 8), seed + part) if seed is not None else slot(8 * (nbytes + 8))
        made.append(rows.reshape(8, nbytes + 8)[:, :nbytes])
    return made


def test_paged_blocks_are_read_from_their_rows() -> None:
    parts = pool(seed=3)
    buffers = BlockBuffers(LAYOUT, PagedBlocks(parts, POOL_ROWS), BLOCKS)
    for block, row in enumerate(POOL_ROWS):
        assert read(buffers, LAYOUT, block) == b"".join(part[row].tobytes() for part in parts)


def test_paged_blocks_are_written_to_their_rows_and_no_other() -> None:
    parts = pool()
    buffers = BlockBuffers(LAYOUT, PagedBlocks(parts, POOL_ROWS), BLOCKS).require_writable()
    blocks = [random_bytes(LAYOUT.block_nbytes, seed) for seed in range(BLOCKS)]
    for block, data in enumerate(blocks):
        write(buffers, LAYOUT, block, data)
    for row in range(8):
        want = blocks[POOL_ROWS.index(row)].tobytes() if row in POOL_ROWS else bytes(LAYOUT.block_nbytes)
        assert b"".join(part[row].tobytes() for part in parts) == want


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([0, 1, 2, 3], "4 rows for 5 blocks"),
        ([0, 1, 2, 3, 8], "row 8 is not in a pool of 8 rows"),
        ([-1, 1, 2, 3, 4], "row -1 is not in a pool"),
    ],
)
def test_rows_that_the_pool_has_not_are_refused(rows: list[int], words: str) -> None:
    with pytest.raises(LayoutError, match=words):
        BlockBuffers(LAYOUT, PagedBlocks(pool(), rows), BLOCKS)


def test_a_pool_of_unequal_arrays_is_refused() -> None:
    parts = pool()
    with pytest.raises(LayoutError, match="first dimension must be 8"):
        BlockBuffers(LAYOUT, PagedBlocks([*parts[:-1], parts[-1][:7]], POOL_ROWS), BLOCKS)


def test_a_row_may_be_stored_twice_but_not_read_into_twice() -> None:
    buffers = BlockBuffers(LAYOUT, PagedBlocks(pool(seed=3), [1, 1, 2, 3, 4]), BLOCKS)
    assert read(buffers, LAYOUT, 0) == read(buffers, LAYOUT, 1)
    with pytest.raises(LayoutError, match="a row comes twice"):
        buffers.require_writable()
