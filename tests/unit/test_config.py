"""A size is bytes, exactly; what is no size is refused, naming the option."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvterrace.config import parse_nbytes
from kvterrace.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("0", 0),
        ("4096", 4096),
        ("4096B", 4096),
        ("4GiB", 4 * 2**30),
        ("4GB", 4 * 10**9),
        ("4G", 4 * 2**30),
        ("4Gi", 4 * 2**30),
        ("512MiB", 512 * 2**20),
        (" 1.5 kib ", 1536),
        ("0.1kB", 100),
        ("2tb", 2 * 10**12),
        ("1P", 2**50),
    ],
)
def test_sizes_as_people_write_them(text: str, nbytes: int) -> None:
    assert parse_nbytes(text, "dram_bytes") == nbytes


@given(st.integers(0, 2**63 - 1))
def test_a_whole_number_of_bytes_is_itself(nbytes: int) -> None:
    assert parse_nbytes(nbytes, "dram_bytes") == nbytes
    assert parse_nbytes(str(nbytes), "dram_bytes") == nbytes  # not by way of a float
    assert parse_nbytes(f"{nbytes} B", "dram_bytes") == nbytes


def test_a_whole_number_of_numpy_becomes_plain() -> None:
    value: Any = np.int64(4096)
    assert type(parse_nbytes(value, "dram_bytes")) is int


@pytest.mark.parametrize(
    "value",
    [
        "",
        "four",
        "GiB",
        "4XB",
        "4iB",
        "4i",
        "-4",
        "1e9",
        "4 G iB",
        "\u0664GiB",  # Arabic digits
        "4\u212aB",  # the Kelvin sign, which is a K to a pattern that ignores case
        "9" * 20,
        "9" * 400 + "G",
        "9" * 5000,
        "9223372036854775807P",
        -1,
        2**63,
        1.5,
        4096.0,
        True,
        None,
        b"4GiB",
        float("inf"),
    ],
)
def test_what_is_no_size_is_refused_naming_the_option(value: Any) -> None:
    with pytest.raises(ConfigError, match="dram_bytes"):
        parse_nbytes(value, "dram_bytes")
