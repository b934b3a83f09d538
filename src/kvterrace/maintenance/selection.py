"""Which records a purge is about: by namespace, tenant or sequence, and what hangs on them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvterrace.errors import ConfigError
from kvterrace.format.record import RecordHeader, RecordKind
from kvterrace.format.segment import EntryTable
from kvterrace.keys import Namespace
from kvterrace.maintenance.census import FoundSegment

__all__ = ["ByNamespace", "BySequence", "ByTenant", "Selection", "Target", "select"]

_DIGEST = re.compile(r"[0-9a-f]{1,64}")
_LABEL_NBYTES = 16


@dataclass(frozen=True, slots=True)
class ByNamespace:
    """One namespace: its digest in hexadecimal, or the first digits of it."""

    digest: str

    def __post_init__(self) -> None:
        if not _DIGEST.fullmatch(self.digest):
            raise ConfigError(
                f"namespace {self.digest!r}: give a digest, or its first digits: up to 64 of 0-9 and a-f; "
                "kvterrace inspect lists them"
            )


@dataclass(frozen=True, slots=True)
class ByTenant:
    """Every namespace that its description gives to this tenant."""

    name: str

    def __post_init__(self) -> None:
        if not self.name:
            raise ConfigError("tenant: give a name; what belongs to no tenant is purged by its namespace's digest")


@dataclass(frozen=True, slots=True)
class BySequence:
    """Blocks put under this label, 16 bytes."""

    label: bytes

    def __post_init__(self) -> None:
        if len(self.label) != _LABEL_NBYTES or not any(self.label):
            raise ConfigError(f"sequence: a label has 16 bytes and is not all zeros, this is {self.label.hex()!r}")

    @classmethod
    def parse(cls, text: str) -> BySequence:
        """From text of up to 16 bytes, or `hex:` and up to 32 digits; filled up with zeros, as `Store.put` does.

        Raises:
            ConfigError: it is neither.
        """
        try:
            label = bytes.fromhex(text[4:]) if text.startswith("hex:") else text.encode()
        except ValueError:
            label = b""
        if not 0 < len(label) <= _LABEL_NBYTES:
            raise ConfigError(f"sequence {text!r}: give text of 1 to 16 bytes, or hex: and 2 to 32 hexadecimal digits")
        return cls(label.ljust(_LABEL_NBYTES, b"\0"))


Target = ByNamespace | ByTenant | BySequence


@dataclass(slots=True)
class Selection:
    """What has to go.

    Attributes:
        digests: namespaces, whole.
        label: sequence label, or empty.
        matched: blocks of `label`, as namespace digest and key, 64 B each.
        keys: blocks besides the namespaces', as `matched`, those included: what hangs on them has joined.
        pending: those of `keys` of which some record does not bear `label`: only through the others is it known that
            they have to go.
    """

    digests: set[bytes] = field(default_factory=set)
    label: bytes = b""
    matched: set[bytes] = field(default_factory=set)
    keys: set[bytes] = field(default_factory=set)
    pending: set[bytes] = field(default_factory=set)

    def holds(self, header: RecordHeader) -> bool:
        """Whether this record has to go."""
        if header.namespace in self.digests:
            return True
        if header.kind is not RecordKind.BLOCK:
            return False
        return (bool(self.label) and header.sequence == self.label) or header.namespace + header.key in self.keys

    def names(self, namespace: bytes, key: bytes) -> bool:
        """Whether a tombstone's key is one of a block that has to go."""
        return namespace in self.digests or namespace + key in self.keys

    def rows(self, entries: EntryTable, namespaces: Sequence[bytes]) -> npt.NDArray[np.bool_]:
        """Which block entries have to go. `namespaces`: what an entry's `namespace` counts in."""
        whole = np.array([digest in self.digests for digest in namespaces], bool)
        chosen: npt.NDArray[np.bool_] = np.zeros(len(entries), bool)
        if len(entries):
            chosen |= whole[entries["namespace"]]
            if self.label:
                chosen |= _bears(entries, self.label)
            if self.keys:
                chosen |= np.array([name in self.keys for name in _names(entries, namespaces)], bool)
        chosen &= entries["kind"] == RecordKind.BLOCK
        return chosen


def select(
    target: Target,
    found: Iterable[FoundSegment],
    described: Mapping[bytes, Namespace | str],
    pending: Iterable[bytes] = (),
) -> Selection:
    """What `target` means in a store. `pending`: blocks that an interrupted purge still has to remove.

    Raises:
        ConfigError: a namespace's first digits fit none, or several.
    """
    segments = list(found)
    selection = Selection(keys=set(pending), pending=set(pending))
    match target:
        case ByNamespace(text):
            selection.digests = {_namespace(text, _digests(segments) | set(described))}
        case ByTenant(name):
            selection.digests = {
                digest for digest, one in described.items() if isinstance(one, Namespace) and one.tenant == name
            }
        case BySequence(label):
            selection.label = label
            _close(selection, segments)
    return selection


def _namespace(text: str, known: set[bytes]) -> bytes:
    if len(text) == 64:
        return bytes.fromhex(text)
    fitting = sorted(digest.hex() for digest in known if digest.hex().startswith(text))
    if len(fitting) == 1:
        return bytes.fromhex(fitting[0])
    if fitting:
        raise ConfigError(f"namespace {text}: {len(fitting)} begin so, e.g. {fitting[0]} and {fitting[1]}: give more")
    raise ConfigError(f"namespace {text}: none here begins so; kvterrace inspect lists them")


def _digests(segments: Iterable[FoundSegment]) -> set[bytes]:
    found = {digest for one in segments if one.contents is not None for digest in one.contents.namespaces}
    return found | {stray.header.namespace for one in segments for stray in one.strays}


def _close(selection: Selection, segments: Sequence[FoundSegment]) -> None:
    """Add to the blocks of the label all other records of the same keys, and what hangs on them. A parent's depth is
    one less than its child's, so that one pass from the roots down finds everything.
    """
    keys, matched, others = selection.keys, selection.matched, set()
    children: list[tuple[int, bytes, bytes]] = []  # depth, parent, itself
    for parent, itself, depth, sequence in _blocks(segments):
        if sequence == selection.label:
            matched.add(itself)
        else:
            others.add(itself)
        children.append((depth, parent, itself))
    keys |= matched
    for depth, parent, itself in sorted(children):
        if depth and parent in keys:
            keys.add(itself)
    selection.pending |= keys & others


def _blocks(segments: Iterable[FoundSegment]) -> Iterator[tuple[bytes, bytes, int, bytes]]:
    """Of every block record: namespace and parent, namespace and key, depth, sequence."""
    for one in segments:
        if one.contents is not None:
            entries = one.contents.entries[one.contents.entries["kind"] == RecordKind.BLOCK]
            digests = [one.contents.namespaces[number] for number in entries["namespace"].tolist()]
            for row, digest in zip(entries, digests, strict=True):
                sequence = row["sequence"].tobytes()
                yield digest + row["parent"].tobytes(), digest + row["key"].tobytes(), int(row["depth"]), sequence
        for stray in one.strays:
            header = stray.header
            if header.kind is RecordKind.BLOCK:
                yield header.namespace + header.parent, header.namespace + header.key, header.depth, header.sequence


def _bears(entries: EntryTable, label: bytes) -> npt.NDArray[np.bool_]:
    words = np.ascontiguousarray(entries["sequence"]).view("<u8").reshape(-1, 2)
    same: npt.NDArray[np.bool_] = (words == np.frombuffer(label, "<u8")).all(axis=1)
    return same


def _names(entries: EntryTable, namespaces: Sequence[bytes]) -> Iterator[bytes]:
    """Namespace and key of each entry."""
    raw = np.ascontiguousarray(entries["key"]).tobytes()
    for at, number in enumerate(entries["namespace"].tolist()):
        yield namespaces[number] + raw[at * 32 : at * 32 + 32]
