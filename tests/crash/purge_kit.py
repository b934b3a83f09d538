"""Stores for the purge tests, with a model of what lies in them: dicts and lists, and nothing of the library's."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from tests.crash.kit import LAYOUT, MiB, bytes_of, checked, hits, opened, put

from kvterrace import KeyChain, Namespace, Store, Stored, chain_keys

ACME = Namespace(model="model", layout=LAYOUT, tenant="acme")
BETA = Namespace(model="model", layout=LAYOUT, tenant="beta")
#: 126 KiB a segment: a dozen records of two pages.
CAP = 2 * MiB

Name = tuple[bytes, bytes]  # namespace digest, key


def chain(namespace: Namespace, *path: int) -> KeyChain:
    """One block for each step; chains share as many blocks as their paths share steps."""
    return chain_keys(namespace, np.repeat(np.array(path, np.int64), LAYOUT.block_tokens))


def padded(label: str) -> bytes:
    return label.encode() + b"\0" * (16 - len(label))


@dataclass
class World:
    """What was put where. `records`: every one on the drive, as (partition, name, parent's key, label). `drives`: the
    folders in `root` that the store is striped over; none: it is `root` itself.
    """

    root: Path
    records: list[tuple[str, Name, bytes, bytes]] = field(default_factory=list)
    live: dict[str, set[Name]] = field(default_factory=dict)
    chains: dict[str, list[KeyChain]] = field(default_factory=dict)
    contents: dict[Name, bytes] = field(default_factory=dict)
    drives: tuple[str, ...] = ()

    def folders(self, root: Path | None = None) -> list[Path]:
        """The folder on each drive."""
        return [(root or self.root) / name for name in self.drives] or [root or self.root]

    def opened(self, partition: str, root: Path | None = None) -> Store:
        """The store, with room for as many segments on each drive."""
        cap = CAP * max(1, len(self.drives))
        return opened(self.folders(root), partition=partition, ssd_bytes=cap, dram_bytes=MiB, write_behind_s=0.01)

    def forget(self, gone: set[Name]) -> None:
        """A purge has removed `gone`."""
        self.records = [one for one in self.records if one[1] not in gone]
        self.live = {partition: names - gone for partition, names in self.live.items()}

    def open(self, partition: str = "main") -> Store:
        self.live.setdefault(partition, set())
        self.chains.setdefault(partition, [])
        return self.opened(partition)

    def put(self, store: Store, partition: str, keys: KeyChain, label: str = "") -> None:
        """Store a chain durably."""
        digest = keys.namespace.digest
        self.chains[partition].append(keys)
        for index, outcome in enumerate(put(store, keys, sequence=label.encode())):
            name = (digest, keys.key(index))
            self.contents[name] = bytes_of(keys, index, index + 1)
            if isinstance(outcome, Stored):
                self.records.append((partition, name, keys.key(index - 1), padded(label)))
                self.live[partition].add(name)
        assert store.flush(60.0)

    def invalidate(self, store: Store, partition: str, keys: KeyChain, start: int) -> None:
        """Give up a chain's end, durably, and all that hangs on it."""
        gone = {(keys.namespace.digest, keys.key(index)) for index in range(start, len(keys))}
        gone = self.below(gone) & self.live[partition]
        store.invalidate(keys, start=start)
        assert store.flush(60.0)
        self.live[partition] -= gone

    def below(self, names: set[Name]) -> set[Name]:
        """`names` and all that hangs on them, in any partition."""
        names = set(names)
        while True:
            more = {name for _, name, parent, _ in self.records if (name[0], parent) in names} - names
            if not more:
                return names
            names |= more

    def of_label(self, label: str) -> set[Name]:
        """What purging a sequence must take."""
        return self.below({name for _, name, _, found in self.records if found == padded(label)})

    def of_namespace(self, namespace: Namespace) -> set[Name]:
        return {name for _, name, _, _ in self.records if name[0] == namespace.digest}

    def served(self, gone: set[Name], *, root: Path | None = None, maybe: bool = False) -> None:
        """A store opened now serves every live block bit for bit but those `gone`. `maybe`: those may be there yet."""
        for partition, chains in self.chains.items():
            with self.opened(partition, root) as store:
                for keys in chains:
                    names = [(keys.namespace.digest, key) for key in keys]
                    found = hits(checked(store, keys))
                    left = [name in self.live[partition] - gone for name in names]
                    most = [name in self.live[partition] for name in names] if maybe else left
                    for index in range(len(names)):
                        assert not left[index] or found[index], f"{partition}: block {index} is lost"
                        assert most[index] or not found[index], f"{partition}: block {index} is back"
                assert store.stats().get_corrupt_blocks == 0

    def absent(self, gone: set[Name], *, root: Path | None = None) -> None:
        """Neither content nor key of what is `gone` lies anywhere in the store's folder."""
        raw = b"\n".join(path.read_bytes() for path in sorted((root or self.root).rglob("*")) if path.is_file())
        for name in gone:
            for at in range(0, len(self.contents[name]), 512):
                assert self.contents[name][at : at + 32] not in raw, f"content of {name[1].hex()} is there, from {at}"
            assert name[1] not in raw, f"key {name[1].hex()} is there"

    def present(self, names: set[Name]) -> None:
        """The test can fail: contents and keys are there before the purge."""
        raw = b"\n".join(path.read_bytes() for path in sorted(self.root.rglob("*.seg")))
        for name in names:
            assert self.contents[name] in raw and name[1] in raw

    def crash(self, to: Path) -> None:
        """Go on with the folder as it is at this moment, under another name."""
        shutil.copytree(self.root, to)
        self.root = to


def rich_world(root: Path, drives: tuple[str, ...] = ()) -> World:
    """Two partitions, two tenants, forks, dead copies, tombstones, several segments; the last segments unsealed."""
    world = World(root.with_name(root.name + "-live"), drives=drives)
    with world.open() as store:
        world.put(store, "main", chain(ACME, 1, 2, 3, 4, 5), "a")
        world.put(store, "main", chain(ACME, 1, 2, 3, 9, 9, 9), "b")  # forks off a
        world.put(store, "main", chain(BETA, 1, 2, 3, 4, 5), "a")  # the same tokens of another tenant
        world.put(store, "main", chain(ACME, 7, 7, 7), "c")
        world.invalidate(store, "main", chain(ACME, 7, 7, 7), 1)
        world.put(store, "main", chain(ACME, 7, 7, 7), "d")  # dead copies of c lie below
        world.put(store, "main", chain(BETA, 8, 8, 8, 8), "e")
        world.invalidate(store, "main", chain(BETA, 8, 8, 8, 8), 2)
        for number in range(100, 110):
            world.put(store, "main", chain(ACME if number % 2 else BETA, number, 1, 2, 3), f"f{number % 3}")
    with world.open() as store, world.open("other") as other:
        world.put(other, "other", chain(ACME, 1, 2, 3, 9, 1), "g")  # copies of a under another label, and what forks
        world.put(other, "other", chain(BETA, 50, 51), "")
        world.put(store, "main", chain(ACME, 1, 2, 3, 4, 6), "h")  # hangs on a
        world.put(store, "main", chain(BETA, 60, 61, 62), "i")
        world.invalidate(store, "main", chain(ACME, 1, 2, 3, 9, 9, 9), 4)
        world.crash(root)
    shutil.rmtree(root.with_name(root.name + "-live"))
    return world
