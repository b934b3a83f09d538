"""The codec registry and the raw codec."""

from __future__ import annotations

import numpy as np

from kvterrace.codecs.base import BadEncoding, Codec
from kvterrace.codecs.raw import RawCodec
from kvterrace.codecs.registry import UnknownCodec, codec_by_id, codec_by_name


def test_raw_is_the_identity() -> None:
    codec: Codec = RawCodec()
    raw = np.arange(200, dtype=np.uint8)
    out = np.zeros(300, dtype=np.uint8)
    assert codec.encoded_nbytes(200) == codec.encode(raw, out) == 200
    again = np.zeros(200, dtype=np.uint8)
    assert codec.decode(out[:200], again) is None
    assert again.tobytes() == raw.tobytes()


def test_raw_of_another_size_is_a_value() -> None:
    assert isinstance(RawCodec().decode(np.zeros(3, np.uint8), np.zeros(4, np.uint8)), BadEncoding)


def test_codecs_are_found_by_id_and_name() -> None:
    assert isinstance(codec_by_id(0), RawCodec)
    assert codec_by_name("raw") is codec_by_id(0)
    assert codec_by_id(65535) == UnknownCodec(65535, ("raw",))
    assert codec_by_name("zip") == UnknownCodec("zip", ("raw",))
