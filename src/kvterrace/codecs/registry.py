"""Codecs by id (from a record's header) and by name (from a namespace)."""

from __future__ import annotations

from dataclasses import dataclass

from kvterrace.codecs.base import Codec
from kvterrace.codecs.raw import RawCodec

__all__ = ["UnknownCodec", "codec_by_id", "codec_by_name"]


@dataclass(frozen=True, slots=True)
class UnknownCodec:
    """No such codec in this build. `wanted` is the id or the name; `known` names those there are."""

    wanted: int | str
    known: tuple[str, ...]


_CODECS: tuple[Codec, ...] = (RawCodec(),)
_BY_ID = {codec.codec_id: codec for codec in _CODECS}
_BY_NAME = {codec.name: codec for codec in _CODECS}
assert len(_BY_ID) == len(_BY_NAME) == len(_CODECS)


def codec_by_id(codec_id: int) -> Codec | UnknownCodec:
    """The codec that a record's header names."""
    return _BY_ID.get(codec_id) or UnknownCodec(codec_id, tuple(_BY_NAME))


def codec_by_name(name: str) -> Codec | UnknownCodec:
    """The codec that a namespace names."""
    return _BY_NAME.get(name) or UnknownCodec(name, tuple(_BY_NAME))
