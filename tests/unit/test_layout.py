"""Sizes follow from geometry (R1); what cannot be is refused, naming the field."""

import copy
import pickle
from dataclasses import asdict, fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvterrace.errors import LayoutError
from kvterrace.layout import DTYPE_NBYTES, KVLayout

GIB = 2**30


def test_70b_without_gqa() -> None:
    layout = KVLayout(layers=80, kv_heads=64, head_dim=128, dtype="float16", block_tokens=256)
    assert layout.nbytes_per_token == 2_621_440
    assert layout.nbytes_per_token * 32 * 1024 == 80 * GIB


def test_70b_with_gqa() -> None:
    layout = KVLayout(layers=80, kv_heads=8, head_dim=128, dtype="bfloat16", block_tokens=256)
    assert layout.nbytes_per_token == 327_680
    assert layout.nbytes_per_token * 128 * 1024 == 40 * GIB


def test_smollm2_135m_in_float32() -> None:
    layout = KVLayout(layers=30, kv_heads=3, head_dim=64, dtype="float32", block_tokens=16)
    assert layout.nbytes_per_token == 46_080
    assert layout.block_nbytes == 16 * 46_080
    assert layout.parts == 60
    assert layout.part_nbytes == (3 * 16 * 64 * 4,) * 60


def test_the_latent_of_mla_is_one_part_a_layer() -> None:
    layout = KVLayout(61, 1, 512 + 64, "bfloat16", 64, parts_per_layer=1, attention="mla")
    assert layout.part_shapes == ((1, 64, 576),)
    assert layout.nbytes_per_token == 61 * 576 * 2
    assert list(layout.layer_parts(60)) == [60]


def test_values_may_be_narrower_than_keys() -> None:
    layout = KVLayout(2, 4, 192, "float16", 8, value_head_dim=128)
    assert layout.part_shapes == ((4, 8, 192), (4, 8, 128))
    assert layout.part_nbytes == (4 * 8 * 192 * 2, 4 * 8 * 128 * 2) * 2
    assert layout.nbytes_per_token == 2 * 4 * (192 + 128) * 2


def test_the_parts_of_a_layer() -> None:
    layout = KVLayout(3, 1, 8, "float32", 4)
    assert [list(layout.layer_parts(layer)) for layer in range(3)] == [[0, 1], [2, 3], [4, 5]]
    for outside in (-1, 3):
        with pytest.raises(LayoutError, match=f"layer {outside}"):
            layout.layer_parts(outside)


dimensions = st.integers(1, 300)


@given(
    layers=dimensions,
    heads=dimensions,
    dim=dimensions,
    dtype=st.sampled_from(sorted(DTYPE_NBYTES)),
    tokens=dimensions,
    value_dim=st.integers(0, 300),
)
def test_sizes_add_up(layers: int, heads: int, dim: int, dtype: str, tokens: int, value_dim: int) -> None:
    layout = KVLayout(layers, heads, dim, dtype, tokens, value_head_dim=value_dim)
    assert layout.nbytes_per_token == layers * heads * (dim + (value_dim or dim)) * DTYPE_NBYTES[dtype]
    assert layout.block_nbytes == sum(layout.part_nbytes) == tokens * layout.nbytes_per_token
    assert len(layout.part_nbytes) == layout.parts == 2 * layers


GOOD: dict[str, Any] = {"layers": 2, "kv_heads": 2, "head_dim": 8, "dtype": "float16", "block_tokens": 4}


NOT_WHOLE: list[Any] = [-1, 2.0, 0.5, True, None, "1", [1], 2**32, 1j, np.float64(2), np.bool_(True), np.int8(-1)]
NOT_TEXT: list[Any] = [None, 1, b"full", ["float16"], {}]
WHOLE_NUMBERS = [field.name for field in fields(KVLayout) if field.type == "int"]
TEXTS = [field.name for field in fields(KVLayout) if field.type == "str"]


def test_every_field_is_a_whole_number_or_text() -> None:
    assert len(WHOLE_NUMBERS) + len(TEXTS) == len(fields(KVLayout))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *((field, value) for field in WHOLE_NUMBERS for value in NOT_WHOLE),
        *((field, 0) for field in ("layers", "kv_heads", "head_dim", "block_tokens", "parts_per_layer", "tp_size")),
        *((field, value) for field in TEXTS for value in NOT_TEXT),
        ("dtype", "float7"),
        ("dtype", ""),
        ("parts_per_layer", 3),
        ("tp_rank", 1),
    ],
)
def test_a_layout_that_cannot_be_is_refused_naming_the_field(field: str, value: object) -> None:
    KVLayout(**GOOD)
    with pytest.raises(LayoutError, match=field):
        KVLayout(**{**GOOD, field: value})


def test_a_fused_part_has_no_value_dimension() -> None:
    with pytest.raises(LayoutError, match="value_head_dim"):
        KVLayout(**GOOD, parts_per_layer=1, value_head_dim=8)


def test_a_block_has_a_bounded_number_of_parts() -> None:
    assert KVLayout(**{**GOOD, "layers": 2048}).parts == 4096
    with pytest.raises(LayoutError, match="4096"):
        KVLayout(**{**GOOD, "layers": 2049})


@pytest.mark.parametrize("kind", [np.int64, np.int32, np.uint8])
def test_whole_numbers_of_numpy_become_plain(kind: type[np.integer[Any]]) -> None:
    values: dict[str, Any] = {"value_head_dim": 4, "parts_per_layer": 2, "tp_rank": 1, "tp_size": 2, **GOOD}
    plain = KVLayout(**values)
    converted: dict[str, Any] = {name: value if name == "dtype" else kind(value) for name, value in values.items()}
    layout = KVLayout(**converted)
    assert layout == plain
    assert all(type(getattr(layout, name)) is int for name in WHOLE_NUMBERS)
    assert type(layout.block_nbytes) is int


def test_values_as_wide_as_keys_are_one_layout_however_they_are_written() -> None:
    assert KVLayout(**GOOD, value_head_dim=8) == KVLayout(**GOOD)
    assert KVLayout(**GOOD, value_head_dim=8).value_head_dim == 0


def test_sizes_are_worked_out_once_and_are_no_part_of_the_identity() -> None:
    layout, fresh = KVLayout(**GOOD), KVLayout(**GOOD)
    assert layout.part_nbytes is layout.part_nbytes
    assert layout.block_nbytes is layout.block_nbytes
    assert layout == fresh and hash(layout) == hash(fresh) and repr(layout) == repr(fresh)
    assert asdict(layout) == asdict(fresh)
    assert set(asdict(layout)) == {field.name for field in fields(KVLayout)}
    for again in (copy.copy(layout), copy.deepcopy(fresh), pickle.loads(pickle.dumps(layout))):
        assert again == layout and again.part_nbytes == layout.part_nbytes
    wider = replace(layout, head_dim=16)
    assert wider.block_nbytes == sum(wider.part_nbytes) == 2 * layout.block_nbytes
