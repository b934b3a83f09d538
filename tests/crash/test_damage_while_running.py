"""C5 on real files, as a table: damage under a running store, what reads answer, what is remembered, and what a
restart and `verify` make of it.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.crash.kit import RECORD_NBYTES, all_hits, chain_of, checked, opened, put, seal, segments, stored, until
from tests.harness import SMALL, Box, kinds
from tests.harness import chain_of as box_chain

from kvterrace import KVLayout, Namespace, Store
from kvterrace.format.record import PAGE_NBYTES
from kvterrace.io.base import IoKind
from kvterrace.io.faults import Short
from kvterrace.observe.inspection import inspect_store
from kvterrace.observe.verification import verify_store

_CHAIN = chain_of(0, 6)
_OTHER = chain_of(1, 3)
#: Of the third record of the chain, which the table damages.
_AT = PAGE_NBYTES + 2 * RECORD_NBYTES
#: A payload of 512 B: the rest of its page is padding.
_SHORT = Namespace("short", KVLayout(layers=1, kv_heads=1, head_dim=8, dtype="float16", block_tokens=16))
_SHORT_CHAIN = chain_of(7, 6, _SHORT)
_COUNTS = {"Hit": "ssd", "Miss": "miss", "Corrupt": "corrupt", "Stale": "stale", "DeviceFailed": "failed"}


def _cut(nbytes: int) -> Callable[[Path], None]:
    def damage(file: Path) -> None:
        with file.open("r+b") as out:
            out.truncate(nbytes)

    return damage


def _zero(at: int) -> Callable[[Path], None]:
    def damage(file: Path) -> None:
        with file.open("r+b") as out:
            out.seek(at)
            out.write(bytes(PAGE_NBYTES))

    return damage


def _flip(at: int) -> Callable[[Path], None]:
    def damage(file: Path) -> None:
        with file.open("r+b") as out:
            out.seek(at)
            byte = out.read(1)[0]
            out.seek(at)
            out.write(bytes([byte ^ 0x10]))

    return damage


def _replace(file: Path) -> None:
    """In place: the store's descriptor is of this file."""
    other = file.parents[3] / "other"
    with opened(other) as store:  # the same blocks, in a segment of another store
        stored(store, _OTHER)
        stored(store, _CHAIN)
    data = segments(other)[0].read_bytes()
    with file.open("r+b") as out:
        out.write(data)
    shutil.rmtree(other)


def _remove(file: Path) -> None:
    file.unlink()


@dataclass(frozen=True)
class _Case:
    """What damage does. Outcomes: one letter for each block of the chain - Hit, Miss, Corrupt, Stale, Failed.

    Attributes:
        reads: while the store runs. others: of the other chain, behind the damage.
        entries: in quarantine after these reads.
        restart: the chain after a restart, nothing having been put again. None: as the second read.
        left_open: the same if the segment was not sealed before: no footer says what was in a record that cannot be
            read, so nothing is known of it, and what hangs on it is not found. None: as after a seal.
        faults: of `verify` after the restart, those in quarantine not counted. Of a file of another store that was
            sealed, the footer is one more.
        warnings: while it runs.
    """

    damage: Callable[[Path], None]
    reads: str
    others: str = "HHH"
    entries: int = 0
    restart: str | None = None
    left_open: str | None = None
    faults: int = 0
    warnings: int = 0
    namespace: Namespace | None = None


_CASES = {
    "cut to nothing": _Case(_cut(0), "FFFFFF", "MMM", warnings=1),
    "cut in the segment header": _Case(_cut(100), "FFFFFF", "MMM", warnings=1),
    "cut in a record": _Case(_cut(_AT + PAGE_NBYTES + 100), "HHFFFF", "MMM", warnings=1),
    "cut between records": _Case(_cut(_AT), "HHFFFF", "MMM", warnings=1),
    "a header of zeros": _Case(_zero(_AT), "HHCHHH", entries=2, warnings=1, left_open="HHMMMM"),
    "a payload of zeros": _Case(_zero(_AT + PAGE_NBYTES), "HHCHHH", entries=2, warnings=1, left_open="HHMMMM"),
    "a bit of a header": _Case(_flip(_AT + 100), "HHCHHH", entries=2, warnings=1, left_open="HHMMMM"),
    "a bit of a header's unused bytes": _Case(_flip(_AT + 4000), "HHCHHH", entries=2, warnings=1, left_open="HHMMMM"),
    "a bit of a payload": _Case(_flip(_AT + PAGE_NBYTES + 1), "HHCHHH", entries=2, warnings=1, left_open="HHMMMM"),
    "a bit of the padding": _Case(_flip(_AT + PAGE_NBYTES + 3000), "HHHHHH", namespace=_SHORT),
    "a bit of the segment header": _Case(_flip(20), "HHHHHH", restart="MMMMMM", faults=1),
    "another segment in its place": _Case(
        _replace, "SSSSSS", "SSS", entries=18, restart="MMMMMM", faults=1, warnings=9
    ),
    "removed": _Case(_remove, "HHHHHH", restart="MMMMMM"),
}


def _letters(outcomes: list[object]) -> str:
    return "".join("F" if type(one).__name__ == "DeviceFailed" else type(one).__name__[0] for one in outcomes)


def _cool(store: Store) -> None:
    assert store.flush(30.0)
    with store._driver.lock:
        store._core.ledger.evict_idle()


@pytest.mark.parametrize("end", ["sealed", "left open"])
@pytest.mark.parametrize("again", ["put again", "restarted as it is"])
@pytest.mark.parametrize("name", _CASES)
def test_damage_while_the_store_runs(
    tmp_path: Path, name: str, again: str, end: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The segment is the open one; a close leaves it open, since it is less than half full."""
    case = _CASES[name]
    chain = _CHAIN if case.namespace is None else _SHORT_CHAIN
    path = tmp_path / "deep" / "kv"
    caplog.set_level(logging.WARNING, "kvterrace.engine")
    with opened(path) as store:
        stored(store, chain)
        _cool(store)
        stored(store, _OTHER)
        _cool(store)
        (file,) = segments(path)
        case.damage(file)
        first = checked(store, chain)
        assert _letters(first) == case.reads  # type: ignore[arg-type]
        second = case.reads.replace("F", "M").replace("C", "M").replace("S", "M")
        until(lambda: store.match(_OTHER).blocks == 0 or case.others[0] != "M")
        assert _letters(checked(store, _OTHER)) == case.others  # type: ignore[arg-type]
        read = store.stats().ssd_read_requests
        assert _letters(checked(store, chain)) == second  # type: ignore[arg-type]
        stats = store.stats()
        assert stats.ssd_read_requests == read  # what is lost is not asked for again, the rest is in DRAM
        for letter, count in (
            ("C", stats.get_corrupt_blocks),
            ("S", stats.get_stale_blocks),
            ("F", stats.get_failed_blocks),
        ):
            assert count == (case.reads + case.others).count(letter)
        assert stats.ssd_quarantined == case.entries
        assert len(caplog.records) == case.warnings, [one.message for one in caplog.records]
        if again == "put again":
            words = {"Hit": "Present", "Miss": "Stored"}
            outcomes = put(store, chain)
            assert [type(one).__name__ for one in outcomes] == [
                words["Hit" if one == "H" else "Miss"] for one in second
            ]
            stored(store, _OTHER)
            _cool(store)
            all_hits(store, chain)
            all_hits(store, _OTHER)
        if end == "sealed":
            seal(store)
    inspected = inspect_store(path).partitions[0]
    assert inspected.failed_blocks == case.entries // 2
    with opened(path) as store:
        if again == "put again" and case.restart is None:
            all_hits(store, chain)
            all_hits(store, _OTHER)
        elif again == "restarted as it is":
            found = _letters(checked(store, chain))  # type: ignore[arg-type]
            known = None if end == "sealed" else case.left_open
            assert found == (known or case.restart or second)
            assert store.stats().get_corrupt_blocks == store.stats().get_stale_blocks == 0
        stored(store, chain)
        stored(store, _OTHER)
        _cool(store)
        all_hits(store, chain)
    verified = verify_store(path)
    footers = name == "another segment in its place" and end == "sealed"
    assert len(verified.faults) == case.faults + footers, verified.faults
    assert (verified.bad_places, verified.failed_blocks) == (case.entries // 2, case.entries // 2)
    listed = [note.where for note in verified.notes if note.what.startswith("in quarantine")]
    seen = case.entries == 2 and (end == "sealed" or name != "a header of zeros")  # else there is no record to be seen
    assert listed == ([f"partitions/main/00000001.seg@{_AT}"] if seen else [])


@pytest.mark.usefixtures("python_engine")  # its files can be told to let go of theirs
def test_a_file_removed_while_it_has_no_descriptor(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """More segments than descriptors: a removed file is noticed at the next read. Told of once, its room comes back."""
    path = tmp_path / "kv"
    caplog.set_level(logging.WARNING, "kvterrace")
    with opened(path, ssd_bytes="8MiB") as store:
        stored(store, _CHAIN)
        _cool(store)
        before = store.stats()
        with store._driver.lock:
            assert store._core.volumes[0].files.file(1).park()  # type: ignore[attr-defined]
        segments(path)[0].unlink()
        assert set(_letters(checked(store, _CHAIN))) == {"M"}  # type: ignore[arg-type]
        until(lambda: store.stats().ssd_segments == 0)
        assert store.match(_CHAIN).blocks == 0
        after = store.stats()
        assert before.ssd_file_nbytes - after.ssd_file_nbytes == ((8 << 20) - (32 << 10)) // 16 // 4096 * 4096
        assert after.ssd_quarantined == 0 and after.ssd_writable
        stored(store, _CHAIN)
        _cool(store)
        all_hits(store, _CHAIN)
    assert len([one for one in caplog.records if "removed" in one.message]) == len(caplog.records) == 1
    with opened(path, ssd_bytes="8MiB") as store:
        all_hits(store, _CHAIN)


def test_a_cut_through_the_last_record_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "kv"
    caplog.set_level(logging.WARNING, "kvterrace")
    with opened(path) as store:
        stored(store, _CHAIN)
        _cool(store)
        _cut(PAGE_NBYTES + 6 * RECORD_NBYTES - 100)(segments(path)[0])
        assert _letters(checked(store, _CHAIN)) == "HHHHHF"  # type: ignore[arg-type]
        until(lambda: len(caplog.records) == 1)
        assert "was cut to 53148 B" in caplog.records[0].message and "the 1 blocks" in caplog.records[0].message
        assert store.stats().ssd_quarantined == 0
        stored(store, _CHAIN)
        assert store.flush(30.0)
    with opened(path) as store:
        all_hits(store, _CHAIN)


def test_a_read_that_is_short_of_a_whole_file_condemns_the_place(tmp_path: Path) -> None:
    """The file is as long as it should be: the drive did not bring what it has."""
    box = Box(tmp_path / "store")
    chain = box_chain(SMALL, [1, 2, 3])
    box.put_now(chain)
    box.cool()
    box.faults.add(Short(4096), IoKind.READ, when=lambda op: op.offset == 4096 + 2 * 8192, nth=1)
    assert kinds(box.get_now(chain, 2, 3)) == ["DeviceFailed"]
    box.rest()
    assert box.store.stats().ssd_quarantined == 2
    assert kinds(box.get_now(chain)) == ["Hit", "Hit", "Miss"]
    box.check()


def test_a_removed_file_is_noticed_without_a_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it is open it serves on, but it would not outlive a restart: what DRAM has of it is written anew."""
    monkeypatch.setattr("kvterrace.engine.missing._LOOK_S", 0.05)
    path = tmp_path / "kv"
    with opened(path) as store:
        stored(store, _CHAIN)
        assert store.flush(30.0)
        segments(path)[0].unlink()
        until(lambda: [one.name for one in segments(path)] == ["00000002.seg"])
        assert store.flush(30.0)
    with opened(path) as store:
        all_hits(store, _CHAIN)
