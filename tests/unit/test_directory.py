"""A store's folder: made, opened, refused; and left as it was when refused."""

from __future__ import annotations

import json
import os
import stat
import threading
from pathlib import Path

import pytest
from tests.crash.kit import LAYOUT, MiB, all_hits, chain_of, opened, snapshot, stored

from kvterrace import (
    ConfigError,
    FormatVersionError,
    KVTerraceError,
    Namespace,
    NotAStoreError,
    StoreLockedError,
    StoreUnusableError,
)
from kvterrace.tiers.directory import StoreDirectory

_GOOD = {"format_version": 1, "uuid": "00112233445566778899aabbccddeeff", "created_unix_s": 1.5}


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_nobody_else_can_read_a_store(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        with opened(tmp_path / "deep" / "kv") as store:
            stored(store, chain_of(0, 4))
    finally:
        os.umask(before)
    root = tmp_path / "deep" / "kv"
    found = [root, *root.rglob("*")]
    assert len(found) == 9
    for each in found:
        assert stat.S_IMODE(each.stat().st_mode) == (0o700 if each.is_dir() else 0o600), each


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"", NotAStoreError),
        (b"{", NotAStoreError),
        (b"[]", NotAStoreError),
        (b"null", NotAStoreError),
        (b"\xff\xfe", NotAStoreError),
        (b"[" * 100_000, NotAStoreError),
        (b"{}", NotAStoreError),
        (json.dumps(_GOOD | {"uuid": "zz"}).encode(), NotAStoreError),
        (json.dumps(_GOOD | {"uuid": 7}).encode(), NotAStoreError),
        (json.dumps(_GOOD | {"uuid": None}).encode(), NotAStoreError),
        (json.dumps(_GOOD | {"format_version": "x"}).encode(), NotAStoreError),
        (json.dumps(_GOOD | {"format_version": float("inf")}).encode(), NotAStoreError),
        (json.dumps(_GOOD | {"format_version": 0}).encode(), NotAStoreError),
        (json.dumps(_GOOD | {"format_version": 2}).encode(), FormatVersionError),
        (b'{"format_version": 99}', FormatVersionError),
    ],
)
def test_a_store_file_that_cannot_be_believed(tmp_path: Path, content: bytes, kind: type[KVTerraceError]) -> None:
    with opened(tmp_path / "kv") as store:
        stored(store, chain_of(0, 4))
    (tmp_path / "kv" / "store.json").write_bytes(content)
    before = snapshot(tmp_path)
    with pytest.raises(kind) as caught:
        opened(tmp_path / "kv")
    assert "\n" not in str(caught.value)
    assert snapshot(tmp_path) == before


def test_places_that_are_no_store(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "others").mkdir()
    (tmp_path / "others" / "photo.jpg").write_text("x")
    (tmp_path / "lost").mkdir()  # a store whose store.json is gone
    (tmp_path / "lost" / "partitions").mkdir()
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere" / "deep")
    (tmp_path / "marker").mkdir()
    (tmp_path / "marker" / "store.json").mkdir()
    before = snapshot(tmp_path)
    for name in ("file", "others", "lost", "file/below", "dangling", "marker"):
        with pytest.raises(StoreUnusableError) as caught:
            opened(tmp_path / name)
        assert "\n" not in str(caught.value)
        assert name.split("/")[0] in str(caught.value)
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/x", "a\0b", "x" * 65, "-a", "ä", "a\n"])
def test_partition_names_that_cannot_be(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError):
        opened(tmp_path / "kv", partition=name)
    assert list(tmp_path.iterdir()) == []


def test_an_empty_folder_becomes_a_store_and_a_failed_open_gives_the_lock_back(tmp_path: Path) -> None:
    (tmp_path / "kv").mkdir()
    with pytest.raises(ConfigError):
        opened(tmp_path / "kv", dram_bytes=1 << 50)
    with opened(tmp_path / "kv", dram_bytes=MiB):
        pass


def test_what_a_namespace_stands_for_is_written_down_once(tmp_path: Path) -> None:
    with opened(tmp_path / "kv") as store:
        stored(store, chain_of(0, 2))
        stored(store, chain_of(1, 2))
    (file,) = (tmp_path / "kv" / "namespaces").iterdir()
    namespace = chain_of(0, 1).namespace
    assert file.name == f"{namespace.digest.hex()}.json"
    assert json.loads(file.read_text()) == namespace.describe()


def test_only_so_many_descriptions_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvterrace.tiers.directory._DESCRIPTIONS", 3)
    with opened(tmp_path / "kv") as store:
        for tenant in "abcdef" * 2:
            stored(store, chain_of(0, 1, Namespace("model", LAYOUT, tenant=tenant)))
    assert len(list((tmp_path / "kv" / "namespaces").iterdir())) == 3


def test_nobody_waits_for_a_description_to_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, asked = threading.Event(), threading.Event()
    describe = StoreDirectory.describe

    def hanging(self: StoreDirectory, namespace: Namespace) -> None:
        asked.set()
        assert go_on.wait(60)
        describe(self, namespace)

    monkeypatch.setattr(StoreDirectory, "describe", hanging)
    with opened(tmp_path / "kv") as store:
        try:
            stored(store, chain_of(0, 2))
            all_hits(store, chain_of(0, 2))
            assert asked.wait(60)
            assert list((tmp_path / "kv" / "namespaces").iterdir()) == []
        finally:
            go_on.set()
    assert len(list((tmp_path / "kv" / "namespaces").iterdir())) == 1  # close waits for it


def test_disowning_leaves_the_lock_to_whoever_has_it_too(tmp_path: Path) -> None:
    first = StoreDirectory.open(tmp_path / "kv", "main", created_unix_s=0.0)
    assert first._lock is not None
    others = [os.dup(fd) for fd in first._lock._fds]  # as a forked process has them
    first.disown()
    first.close()
    with pytest.raises(StoreUnusableError):
        StoreDirectory.open(tmp_path / "kv", "main", created_unix_s=0.0)
    for fd in others:
        os.close(fd)
    again = StoreDirectory.open(tmp_path / "kv", "main", created_unix_s=0.0)
    again.close()
    again.close()
    StoreDirectory.open(tmp_path / "kv", "main", created_unix_s=0.0).close()


@pytest.mark.parametrize("how", ["removed", "replaced"])
def test_the_partition_stays_locked_when_its_lock_file_goes(tmp_path: Path, how: str) -> None:
    first = StoreDirectory.open(tmp_path / "kv", "main", created_unix_s=0.0)
    lock = first.partition / "lock"
    lock.unlink()
    if how == "replaced":
        lock.touch(0o600)
    for _ in range(2):
        with pytest.raises(StoreLockedError):
            StoreDirectory.open(tmp_path / "kv", "main", created_unix_s=0.0)
    first.close()
    StoreDirectory.open(tmp_path / "kv", "main", created_unix_s=0.0).close()


def test_a_store_that_this_process_holds_is_told_from_one_of_another(tmp_path: Path) -> None:
    first = StoreDirectory.open(tmp_path / "kv", "main", created_unix_s=0.0)
    with pytest.raises(StoreLockedError, match="a store of this process"):
        StoreDirectory.open(tmp_path / "kv", "main", created_unix_s=0.0)
    first.close()


def test_a_lock_that_leads_out_of_the_store_is_not_written_through(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_bytes(b"precious")
    opened(tmp_path / "kv").close()
    lock = tmp_path / "kv" / "partitions" / "main" / "lock"
    lock.unlink()
    lock.symlink_to(precious)
    with pytest.raises(StoreUnusableError, match="kv"):
        opened(tmp_path / "kv")
    assert precious.read_bytes() == b"precious"
