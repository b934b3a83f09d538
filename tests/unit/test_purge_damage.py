"""`purge_store` on stores that are damaged, full, locked, or hold what is not theirs."""

from __future__ import annotations

import contextlib
import errno
import json
import shutil
import struct
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.crash.kit import bytes_of, seal, segments
from tests.crash.purge_kit import ACME, BETA, Name, World, chain, padded
from tests.unit.store_images import PAGE, flip, page_sum, patch, records

from kvterrace import ConfigError, NotAStoreError, StoreLockedError, StoreUnusableError
from kvterrace.format.recovery import SegmentContents, scan_segment
from kvterrace.format.segment import Footer, build_footer
from kvterrace.health.quarantine import BadBlock, BadPlace, decode, encode
from kvterrace.io.base import IoFile
from kvterrace.keys import KeyChain
from kvterrace.maintenance.drive import Drive
from kvterrace.maintenance.purge import purge_store
from kvterrace.maintenance.selection import ByNamespace, BySequence, ByTenant
from kvterrace.observe.medium import MediumFile
from kvterrace.observe.verification import verify_store

A, B, C = chain(ACME, 1, 2, 3), chain(BETA, 4, 5, 6), chain(ACME, 7, 8)


def names_of(*chains: KeyChain) -> set[Name]:
    return {(one.namespace.digest, key) for one in chains for key in one}


@pytest.fixture
def world(tmp_path: Path) -> World:
    """Two sealed segments: a's and b's in the first, c's in the second."""
    world = World(tmp_path / "kv")
    with world.open() as store:
        world.put(store, "main", A, "a")
        world.put(store, "main", B, "b")
        seal(store)
    with world.open() as store:
        world.put(store, "main", C, "c")
        seal(store)
    return world


def place_of(world: World, key: bytes) -> tuple[Path, int]:
    """Where the record of `key` lies: file and offset, by hand."""
    (found,) = (one for path in segments(world.root) for one in records(path) if one.key == key)
    return found.path, found.offset


def test_what_should_stay_and_is_damaged_is_dropped_and_told(world: World) -> None:
    path, offset = place_of(world, A.key(1))
    flip(path, offset + PAGE + 700)
    report = purge_store(world.root, ByTenant("beta"))
    assert report.failures == []
    assert report.partitions[0].damaged_records == 1
    assert report.damaged == [f"main/{path.name}@{offset}"]
    world.absent(names_of(B))
    world.live["main"] -= {(ACME.digest, A.key(1)), (ACME.digest, A.key(2))}  # the second has lost its prefix
    world.served(names_of(B))
    assert verify_store(world.root).faults == []


def test_damage_in_what_has_to_go_does_not_keep_it(world: World) -> None:
    path, offset = place_of(world, B.key(1))
    flip(path, offset + PAGE + 700)  # in its payload
    path, offset = place_of(world, B.key(2))
    flip(path, offset + 60)  # in its header: only the footer names it
    assert purge_store(world.root, BySequence(padded("b"))).failures == []
    world.absent(names_of(B))
    world.served(names_of(B))


@pytest.mark.parametrize("at", [-PAGE + 30, -PAGE - 100], ids=["trailer", "footer"])
def test_a_sealed_segment_without_its_footer(world: World, at: int) -> None:
    path, _ = place_of(world, B.key(0))
    flip(path, path.stat().st_size + at)
    report = purge_store(world.root, ByTenant("beta"))
    assert report.failures == []
    world.absent(names_of(B))
    world.served(names_of(B))
    assert verify_store(world.root).faults == []


def test_without_a_footer_what_is_damaged_and_has_to_go_is_found(world: World) -> None:
    path, offset = place_of(world, B.key(1))
    flip(path, offset + PAGE + 700)
    flip(path, path.stat().st_size - PAGE + 30)
    report = purge_store(world.root, BySequence(padded("b")))
    assert report.partitions[0].records == 3
    assert (
        report.partitions[0].live_records == 2
    )  # the store would not have found the damaged one, nor what hangs on it
    world.absent(names_of(B))
    world.served(names_of(B))


def test_a_segment_without_its_header_is_overwritten_whole(world: World) -> None:
    path, _ = place_of(world, A.key(0))
    flip(path, 20)
    report = purge_store(world.root, BySequence(padded("b")))
    assert report.failures == []
    assert report.partitions[0].unknown_nbytes > 0
    world.absent(names_of(A, B))
    world.served(names_of(A, B))


def test_bytes_without_a_record_are_overwritten(tmp_path: Path) -> None:
    """A write that was torn: the payload is there, its header is not."""
    live = World(tmp_path / "live")
    with live.open() as store:
        live.put(store, "main", A, "a")
        live.put(store, "main", B, "b")
        live.crash(tmp_path / "kv")
    (path,) = segments(live.root)
    lost = chain(BETA, 9, 9)
    live.contents |= {(BETA.digest, lost.key(0)): bytes_of(lost, 0, 1)}
    end = max(one.offset + one.nbytes for one in records(path))
    patch(path, end + 2 * PAGE, bytes_of(lost, 0, 1))
    report = purge_store(live.root, BySequence(padded("nobody's")))
    assert report.complete
    assert (report.partitions[0].records, report.partitions[0].unknown_nbytes) == (0, PAGE)
    live.absent({(BETA.digest, lost.key(0))})
    live.served(set())
    assert purge_store(live.root, BySequence(padded("nobody's"))).partitions[0].segments == 0


def leave_out(path: Path, offset: int) -> None:
    """Seal a segment anew without the record at `offset`."""
    data = path.read_bytes()
    found = scan_segment(lambda at, nbytes: np.frombuffer(data[at : at + nbytes], np.uint8), len(data))
    assert isinstance(found, SegmentContents)
    entries = found.entries[found.entries["offset"] != offset]
    footer = build_footer(
        Footer(entries, found.namespaces, found.tombstones),
        nonce=found.header.nonce,
        segment_id=found.header.segment_id,
        data_end=found.data_end,
    )
    path.write_bytes(data[: found.data_end] + footer.tobytes())


@pytest.mark.parametrize("label", ["b", "late"])
def test_a_record_that_a_footer_leaves_out_goes_too(world: World, label: str) -> None:
    """Its write was reported failed, and yet it is there: alone of its label, or with others."""
    late = chain(BETA, 4, 5, 6, 9)
    with world.open() as store:
        world.put(store, "main", late, "late")
    left_out = B.key(2) if label == "b" else late.key(3)
    leave_out(*place_of(world, left_out))
    world.live["main"] -= (
        {(BETA.digest, B.key(2)), (BETA.digest, late.key(3))} if label == "b" else {(BETA.digest, late.key(3))}
    )
    world.served(set())
    report = purge_store(world.root, BySequence(padded(label)))
    done = report.partitions[0]
    assert (done.records, done.live_records) == ((4, 3) if label == "b" else (1, 0))
    world.absent(world.of_label(label))
    world.served(world.of_label(label))


def test_a_record_over_anothers_place_is_not_carried_on(world: World) -> None:
    """A write went astray: where the footer names a block that stays, one lies that has to go."""
    path, offset = place_of(world, A.key(2))
    _, other = place_of(world, B.key(2))
    patch(path, offset, path.read_bytes()[other : other + 2 * PAGE])
    report = purge_store(world.root, BySequence(padded("b")))
    assert report.failures == []
    assert report.damaged == [f"main/{path.name}@{offset}"]
    world.live["main"] -= {(ACME.digest, A.key(2))}
    world.absent(names_of(B))
    world.served(names_of(B))


def test_a_newer_segment_is_left_alone_and_named(world: World) -> None:
    path, _ = place_of(world, C.key(0))
    patch(path, 8, struct.pack("<H", 2))
    page_sum(path, 0, PAGE, 12)
    before = path.read_bytes()
    report = purge_store(world.root, ByTenant("acme"))
    assert not report.complete
    (failure,) = report.failures
    assert failure.where == "main/00000002.seg"
    assert "format 2" in failure.what and "upgrade" in failure.what
    assert path.read_bytes() == before
    assert report.descriptions == []
    assert (world.root / "namespaces" / f"{ACME.digest.hex()}.json").exists()  # the tenant can be asked for again
    world.absent(names_of(A))


def test_a_segment_that_cannot_be_read_keeps_the_tombstones(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    with world.open() as store:
        world.invalidate(store, "main", C, 0)
        world.put(store, "main", chain(ACME, 20), "d")
    real = MediumFile.__init__

    def refusing(self: MediumFile, path: Path, **options: object) -> None:
        if path.name == "00000002.seg":
            raise OSError(errno.EIO, "Input/output error", str(path))
        real(self, path, **options)  # type: ignore[arg-type]

    with monkeypatch.context() as patched:
        patched.setattr(MediumFile, "__init__", refusing)
        report = purge_store(world.root, BySequence(padded("d")))
    assert [one.where for one in report.failures] == ["main/00000002.seg"]
    assert "cannot be read" in report.failures[0].what
    gone = {(ACME.digest, chain(ACME, 20).key(0))}
    world.absent(gone)
    world.served(gone)  # c does not come back


def test_another_stores_segment_is_named_if_it_holds_what_has_to_go(world: World, tmp_path: Path) -> None:
    other = World(tmp_path / "other")
    with other.open() as store:
        other.put(store, "main", chain(BETA, 77), "b")
    stray = world.root / "partitions" / "main" / "00000009.seg"
    shutil.copy(segments(other.root)[0], stray)
    assert purge_store(world.root, BySequence(padded("a"))).complete
    report = purge_store(world.root, BySequence(padded("b")))
    (failure,) = report.failures
    assert failure.where == "main/00000009.seg"
    assert "another store" in failure.what and "remove the file" in failure.what
    assert stray.exists()
    world.served(names_of(A, B))


def test_a_namespace_without_description_has_no_tenant(world: World) -> None:
    (world.root / "namespaces" / f"{BETA.digest.hex()}.json").unlink()
    report = purge_store(world.root, ByTenant("beta"))
    assert not report.complete
    assert report.undescribed == {BETA.digest: (3, 3 * 8192)}
    assert report.partitions[0].records == 0
    world.served(set())
    assert purge_store(world.root, ByNamespace(BETA.digest.hex())).complete
    world.absent(names_of(B))
    world.served(names_of(B))
    assert purge_store(world.root, ByTenant("beta")).complete


def test_a_locked_partition_is_refused_with_its_writers_pid(world: World) -> None:
    with world.open("late") as store:
        world.put(store, "late", A, "a")
        with pytest.raises(StoreLockedError, match=r"process \d+: close the store there.*nothing was changed"):
            purge_store(world.root, ByTenant("acme"))
        with pytest.raises(StoreLockedError):
            purge_store(world.root, ByTenant("acme"), dry_run=True)
        assert purge_store(world.root, ByTenant("acme"), partition="main").complete
    world.live["main"] -= names_of(A, C)
    world.served(set())


def test_targets_that_fit_nothing_or_too_much(world: World, tmp_path: Path) -> None:
    wrong = next(digit for digit in "0123456789abcdef" if digit not in (ACME.digest.hex()[0], BETA.digest.hex()[0]))
    with pytest.raises(ConfigError, match="inspect lists them"):
        purge_store(world.root, ByNamespace(wrong))
    with pytest.raises(ConfigError, match="there are: main"):
        purge_store(world.root, ByTenant("acme"), partition="nowhere")
    for text in ("", "x" * 17, "hex:", "hex:1", "hex:" + "00" * 17, "é" * 9):
        with pytest.raises(ConfigError, match="sequence"):
            BySequence.parse(text)
    with pytest.raises(ConfigError, match="not all zeros"):
        BySequence.parse("hex:0000")
    with pytest.raises(ConfigError):
        ByTenant("")
    for text in ("", "xyz", "a" * 65):
        with pytest.raises(ConfigError, match="digest"):
            ByNamespace(text)
    assert BySequence.parse("hex:6B7631") == BySequence.parse("kv1") == BySequence(b"kv1" + bytes(13))
    with pytest.raises(NotAStoreError):
        purge_store(tmp_path / "nowhere", ByTenant("acme"))
    (world.root / "store.json").write_text("{}")
    with pytest.raises(NotAStoreError, match=r"store\.json"):
        purge_store(world.root, ByTenant("acme"))


def test_an_ambiguous_prefix_is_refused(tmp_path: Path) -> None:
    world = World(tmp_path / "kv")
    spaces = [type(ACME)(model=f"model {number}", layout=ACME.layout) for number in range(40)]
    by_first: dict[str, list[bytes]] = {}
    with world.open() as store:
        for one in spaces[:20]:
            world.put(store, "main", chain(one, 1), "x")
            by_first.setdefault(one.digest.hex()[0], []).append(one.digest)
    first, digests = next((first, some) for first, some in by_first.items() if len(some) > 1)
    with pytest.raises(ConfigError, match=f"{len(digests)} begin so") as caught:
        purge_store(world.root, ByNamespace(first))
    assert digests[0].hex() in str(caught.value) or digests[1].hex() in str(caught.value)
    world.served(set())


def test_quarantine_entries_that_name_a_purged_block_are_zeroed(world: World) -> None:
    store_uuid = uuid.UUID(hex=json.loads((world.root / "store.json").read_text())["uuid"]).bytes
    entries: list[BadBlock | BadPlace] = [BadBlock(B.key(1), 1), BadPlace(3, bytes(range(16)), 4096, 8192)]
    entries += [BadBlock(A.key(0), 2), BadBlock(B.key(2), 5)]
    log = world.root / "partitions" / "main" / "quarantine.00000001.log"
    log.write_bytes(encode(entries, store_uuid).tobytes() + bytes(PAGE))
    report = purge_store(world.root, BySequence(padded("b")))
    assert report.complete
    assert report.partitions[0].quarantine_entries == 2
    assert list(decode(log.read_bytes(), store_uuid).entries) == [entries[1], entries[2]]
    assert log.stat().st_size == 2 * PAGE
    world.absent(names_of(B))


def test_a_write_that_fails_loses_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Drive.write
    for failing in range(1, 30):
        count = 0

        def write(self: Drive, file: IoFile, offset: int, data: np.ndarray, *, failing: int = failing) -> None:
            nonlocal count
            count += 1
            if count == failing:
                raise OSError(errno.EIO, "Input/output error", str(file.path))
            real(self, file, offset, data)

        base = world.root
        root = base.with_name(f"failing{failing}")
        shutil.copytree(base, root)
        with monkeypatch.context() as patched:
            patched.setattr(Drive, "write", write)
            report = purge_store(root, ByTenant("beta"))
        if count < failing:
            break
        world.served(names_of(B), root=root, maybe=True)
        # A new segment without its footer is as good; the store seals it.
        told = [one.what for one in report.failures] + report.notes
        assert any("Input/output error" in one for one in told)
        assert purge_store(root, ByTenant("beta")).complete
        world.absent(names_of(B), root=root)
        world.served(names_of(B), root=root)
        shutil.rmtree(root)
    assert failing > 5


@pytest.fixture
def drive(tmp_path: Path) -> Iterator[Path]:
    """A file system of 3 MiB; skipped where this process may not mount one."""
    place = tmp_path / "drive"
    place.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(place)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"may not mount here: {done.stderr.strip()}")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def _fill(path: Path) -> None:
    with path.open("ab", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(4096)):
            pass


def test_a_full_drive(drive: Path) -> None:
    world = World(drive / "kv")
    with world.open() as store:
        world.put(store, "main", A, "a")
        world.put(store, "main", B, "b")
        seal(store)
    with world.open() as store:
        world.put(store, "main", chain(BETA, 30, 31), "only")  # a segment of its own: nothing stays of it
    filler = drive / "filler"
    _fill(filler)
    report = purge_store(world.root, BySequence(padded("only")))
    assert report.complete
    _fill(filler)  # what that has freed
    report = purge_store(world.root, BySequence(padded("b")))
    (failure,) = report.failures
    # header, three records of two pages, one page of footer, trailer
    assert f"it takes {4096 * (1 + 6 + 1 + 1)} B for a while, 0 B are free" in failure.what
    filler.unlink()
    gone = names_of(chain(BETA, 30, 31))
    world.served(gone)
    assert purge_store(world.root, BySequence(padded("b"))).complete
    world.absent(gone | names_of(B))
    world.served(gone | names_of(B))


@pytest.mark.parametrize("head", ["copied", "zeros"])
def test_a_file_larger_than_any_segment_is_told_and_not_read_to_its_end(world: World, head: str) -> None:
    """A sparse file of 1 TiB: read whole, at 10 GB/s, that would take two minutes."""
    (first, *_) = segments(world.root)
    strange = first.with_name("00000009.seg")
    if head == "copied":
        shutil.copy(first, strange)
    strange.touch()
    with strange.open("r+b") as file:
        file.truncate(1 << 40)
    told = []

    def count(done: int, _total: int) -> None:
        told.append(done)  # of each piece, of 4 MiB
        assert len(told) < 1000, "on and on"

    report = purge_store([world.root], ByTenant("acme"))
    assert [failure for failure in report.failures if strange.name in failure.where and "larger" in failure.what]
    found = verify_store(world.root, count)
    assert [fault for fault in found.faults if strange.name in fault.where and "larger" in fault.what]


@pytest.mark.parametrize("name", ["purge.pending", "partitions/main/quarantine.00000001.log"])
def test_logs_that_are_far_too_long_are_refused_and_not_read(world: World, name: str) -> None:
    path = world.root / name
    path.touch()
    with path.open("r+b") as file:
        file.truncate(1 << 40)
    with pytest.raises(StoreUnusableError, match=path.name):
        purge_store([world.root], ByTenant("acme"))
