"""Bad places and failed blocks: remembered, bounded, and there again after any crash."""

from __future__ import annotations

import errno
import random
import stat
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvterrace.clock import ManualClock
from kvterrace.health import quarantine as module
from kvterrace.health.quarantine import (
    ENTRY_NBYTES,
    FILE_NBYTES,
    MAX_ENTRIES,
    BadBlock,
    BadPlace,
    LogWrite,
    Quarantine,
    decode,
    encode,
    log_name,
)
from kvterrace.health.quarantine_log import LogFile
from kvterrace.io import PAGE_NBYTES, IoEngine, IoKind, PosixEngine
from kvterrace.io.fake import FakeDevice, keep_randomly
from kvterrace.io.faults import Effect, Fail, FaultPlan, FileCall, PretendDone, Short

PAGE = PAGE_NBYTES
UUID, OTHER = b"u" * 16, b"o" * 16
FOLDER = Path("/x")


def key(number: int) -> bytes:
    return number.to_bytes(32, "little")


def nonce(number: int) -> bytes:
    return number.to_bytes(16, "big")


places = st.builds(
    BadPlace,
    st.integers(0, 2**64 - 1),
    st.binary(min_size=16, max_size=16),
    st.integers(0, 2**51).map(lambda n: n * PAGE),
    st.integers(1, 2**32 - 1).map(lambda n: n * PAGE),
)
blocks = st.builds(BadBlock, st.binary(min_size=32, max_size=32), st.integers(1, 2**32 - 1))


# Bytes


def test_the_bytes_are_those_of_the_design() -> None:
    place = encode([BadPlace(7, nonce(1), 3 * PAGE, 2 * PAGE)], UUID).tobytes()
    assert len(place) == PAGE and not any(place[ENTRY_NBYTES:])
    assert (place[:8], place[12:16]) == (b"KVTQ\x01\0\x01\0", b"\x02\0\0\0")
    assert (place[16:24], place[24:32]) == (b"\x07" + bytes(7), b"\0\x30" + bytes(6))
    assert place[32:64] == nonce(1) + bytes(16)
    block = encode([BadBlock(key(5), 3)], UUID).tobytes()
    assert (block[:8], block[12:32], block[32:64]) == (b"KVTQ\x01\0\x02\0", b"\x03" + bytes(19), key(5))


@given(st.lists(places | blocks, max_size=150), st.data())
def test_every_undamaged_entry_comes_back(entries: list[BadPlace | BadBlock], data: st.DataObject) -> None:
    pages = encode(entries, UUID)
    assert decode(pages, UUID) == module.Decoded(tuple(entries), 0)
    assert pages.nbytes == -(-len(entries) * ENTRY_NBYTES // PAGE) * PAGE
    assert decode(pages, OTHER).entries == ()
    if not entries:
        return
    cut = data.draw(st.integers(0, pages.nbytes))
    assert decode(pages[:cut], UUID).entries == tuple(entries[: cut // ENTRY_NBYTES])  # a torn tail
    at = data.draw(st.integers(0, len(entries) * ENTRY_NBYTES - 1))
    pages[at] ^= data.draw(st.integers(1, 255))
    harmed = at // ENTRY_NBYTES
    assert decode(pages, UUID).entries == (*entries[:harmed], *entries[harmed + 1 :])


@given(st.binary(max_size=300))
def test_any_bytes_can_be_decoded(data: bytes) -> None:
    assert decode(data, UUID).entries == ()


def test_what_does_not_fit_is_refused() -> None:
    for entry in (
        BadPlace(1, b"short", 0, PAGE),
        BadPlace(1, nonce(1), 5, PAGE),
        BadPlace(1, nonce(1), 0, 0),
        BadPlace(2**64, nonce(1), 0, PAGE),
        BadBlock(b"short", 1),
        BadBlock(key(1), 0),
        BadBlock(key(1), 2**32),
    ):
        with pytest.raises(ValueError, match=r"."):
            encode([entry], UUID)


def of_a_newer_version(entry: BadBlock) -> bytes:
    image = bytearray(encode([entry], UUID)[:ENTRY_NBYTES].tobytes())
    image[4] = 2
    image[8:12] = bytes(4)
    module._CRC.pack_into(image, 8, module._crc_of(bytes(image), UUID))
    return bytes(image).ljust(PAGE, b"\0")


# Memory


class Bench:
    """A quarantine whose writes end when told to."""

    def __init__(self, max_strikes: int = 1) -> None:
        self.writes: list[LogWrite] = []
        self.quarantine = Quarantine(UUID, self.writes.append, max_strikes=max_strikes)

    def add(self, number: int, segment: int = 1) -> None:
        self.quarantine.add(key(number), segment=segment, nonce=nonce(segment), offset=number * PAGE, nbytes=PAGE)

    def finish(self, *, durable: bool = True) -> LogWrite:
        self.quarantine.pump()
        write = self.writes[-1]
        self.quarantine.ended(write, durable=durable)
        return write


def test_a_failed_place_and_its_block_are_remembered() -> None:
    bench = Bench()
    bench.quarantine.add(key(1), segment=4, nonce=nonce(4), offset=2 * PAGE, nbytes=3 * PAGE)
    quarantine = bench.quarantine
    assert not quarantine.may_store(key(1)) and quarantine.may_store(key(2))
    touched = [quarantine.is_bad(nonce(4), page * PAGE, PAGE) for page in range(6)]
    assert touched == [False, False, True, True, True, False]
    assert quarantine.is_bad(nonce(4), 0, 100 * PAGE) and not quarantine.is_bad(nonce(5), 2 * PAGE, PAGE)


def test_one_place_is_one_strike_however_many_readers_meet_it() -> None:
    bench = Bench(max_strikes=2)
    for _ in range(5):
        bench.quarantine.add(key(1), segment=1, nonce=nonce(1), offset=0, nbytes=PAGE)
    assert (bench.quarantine.strikes(key(1)), bench.quarantine.may_store(key(1))) == (1, True)
    bench.quarantine.add(key(1), segment=1, nonce=nonce(1), offset=PAGE, nbytes=PAGE)
    assert not bench.quarantine.may_store(key(1))
    bench.quarantine.add_place(segment=1, nonce=nonce(1), offset=2 * PAGE, nbytes=PAGE)
    assert len(bench.quarantine) == 4


def test_writes_are_one_at_a_time_and_append_whole_pages() -> None:
    bench = Bench()
    bench.quarantine.pump()
    assert bench.writes == []
    bench.add(1)
    bench.quarantine.pump()
    bench.add(2)
    bench.quarantine.pump()
    assert len(bench.writes) == 1 and bench.quarantine.pending
    first = bench.writes[0]
    assert (first.name, first.create, first.offset, first.unlink) == (log_name(1), True, 0, ())
    bench.quarantine.ended(first, durable=True)
    second = bench.finish()
    assert (second.name, second.create, second.offset, second.pages.nbytes) == (log_name(1), False, PAGE, PAGE)
    assert len(decode(second.pages, UUID).entries) == 2
    assert not bench.quarantine.pending


def test_a_full_log_is_rewritten_and_the_old_one_removed() -> None:
    bench = Bench()
    bench.add(0)
    bench.finish()
    for n in range(1, FILE_NBYTES // PAGE):
        bench.add(n)
        assert not bench.finish().create
    bench.quarantine.forget_segment(nonce(1))
    bench.add(9999, segment=2)
    write = bench.finish()
    assert (write.name, write.create, write.unlink) == (log_name(2), True, (log_name(1),))
    found = decode(write.pages, UUID).entries
    assert [one.nonce for one in found if isinstance(one, BadPlace)] == [nonce(2)]
    assert sum(isinstance(one, BadBlock) for one in found) == FILE_NBYTES // PAGE + 1
    bench.add(10000, segment=2)
    assert bench.finish().offset == 2 * PAGE


def test_after_a_failed_write_all_goes_into_a_new_log() -> None:
    bench = Bench()
    bench.add(1)
    assert bench.finish(durable=False).name == log_name(1)
    again = bench.finish(durable=False)
    assert (again.name, again.create, again.unlink) == (log_name(2), True, (log_name(1),))
    last = bench.finish()
    assert (last.name, last.unlink) == (log_name(3), (log_name(1), log_name(2)))
    assert len(decode(last.pages, UUID).entries) == 2
    bench.add(2)
    bench.finish(durable=False)
    assert bench.finish().unlink == (log_name(3),)


def test_memory_and_files_are_bounded() -> None:
    bench = Bench()
    for n in range(3 * MAX_ENTRIES):
        bench.add(n, segment=n % 7)
        assert len(bench.quarantine) <= MAX_ENTRIES
        assert len(bench.quarantine._fresh) <= MAX_ENTRIES
    assert bench.quarantine.full
    write = bench.finish()
    assert write.pages.nbytes <= FILE_NBYTES // 2
    assert not bench.quarantine.pending
    quarantine = bench.quarantine
    last = 3 * MAX_ENTRIES - 1
    assert quarantine.is_bad(nonce(last % 7), last * PAGE, PAGE)


def test_recovery_is_a_union_and_forgets_what_is_gone() -> None:
    files = [
        (log_name(3), encode([BadBlock(key(1), 2), BadPlace(1, nonce(1), 0, PAGE)], UUID)),
        (log_name(7), encode([BadBlock(key(1), 1), BadPlace(2, nonce(2), 0, PAGE), BadBlock(key(2), 1)], UUID)),
        ("something.else", encode([BadBlock(key(9), 9)], UUID)),
        (log_name(8), np.frombuffer(of_a_newer_version(BadBlock(key(3), 1)), np.uint8)),
    ]
    bench = Bench()
    bench.quarantine.recover(files, {nonce(2)})
    quarantine = bench.quarantine
    assert [quarantine.strikes(key(n)) for n in (1, 2, 3, 9)] == [2, 1, 0, 0]
    assert quarantine.is_bad(nonce(2), 0, PAGE) and not quarantine.is_bad(nonce(1), 0, PAGE)
    bench.add(5)
    write = bench.finish()
    assert (write.name, write.create) == (log_name(9), True)
    assert write.unlink == (log_name(3), log_name(7))  # not the newer one


# Through an engine


class Drive:
    """A quarantine that writes itself through an engine."""

    def __init__(self, engine: IoEngine, folder: Path, segments: range = range(1000)) -> None:
        self.engine = engine
        self.faults: list[str | None] = []
        self.log = LogFile(engine, folder, self._ended)
        self.quarantine = Quarantine(UUID, self.log.start)
        self.quarantine.recover(self.log.read(), {nonce(n) for n in segments})

    def _ended(self, write: LogWrite, fault: str | None) -> None:
        self.faults.append(fault)
        self.quarantine.ended(write, durable=fault is None)

    def add(self, number: int) -> None:
        self.quarantine.add(key(number), segment=number, nonce=nonce(number), offset=PAGE, nbytes=PAGE)

    def settle(self) -> None:
        self.quarantine.pump()
        for _ in range(100):
            if not self.engine.in_flight:
                return
            for result in self.engine.poll(10.0):
                if callable(result.request.tag):
                    result.request.tag(result)

    def knows(self, numbers: range) -> list[int]:
        return [n for n in numbers if self.quarantine.is_bad(nonce(n), PAGE, PAGE) and self.quarantine.strikes(key(n))]


def test_it_survives_restarts_on_real_files(tmp_path: Path) -> None:
    for turn in range(3):
        engine = PosixEngine(threads=1)
        drive = Drive(engine, tmp_path)
        assert drive.knows(range(10)) == list(range(2 * turn))
        for number in (2 * turn, 2 * turn + 1):
            drive.add(number)
            drive.settle()
        assert drive.faults == [None, None]
        drive.log.close()
        assert engine.close(10.0)
        (path,) = tmp_path.iterdir()  # the log of the run before is gone
        assert path.name == log_name(turn + 1)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("seed", range(20))
def test_what_was_durable_survives_a_power_cut_at_any_moment(seed: int) -> None:
    rng = random.Random(seed)
    engine = FakeDevice(ManualClock())
    told, durable = 0, set[int]()
    drive = Drive(engine, FOLDER)
    for _ in range(12):
        for _ in range(rng.randrange(1, 90)):
            drive.add(told)
            told += 1
        drive.quarantine.pump()
        for _ in range(rng.randrange(6)):
            for result in engine.poll(10.0):
                if callable(result.request.tag):
                    result.request.tag(result)
            drive.quarantine.pump()
        if not drive.quarantine.pending and drive.quarantine._writing is None:
            durable = set(drive.knows(range(told)))
        if rng.random() < 0.4:
            engine = engine.crash_image(keep_randomly(rng, names=0.5))
            drive = Drive(engine, FOLDER, range(2000))
            known = drive.knows(range(told))
            assert durable <= set(known)
            durable = set(known)
    drive.add(told)
    drive.settle()
    assert len(list(engine.list(FOLDER))) == 1


@pytest.mark.parametrize("kind", [IoKind.WRITE, IoKind.SYNC, "create"])
@pytest.mark.parametrize("effect", [Fail(errno.ENOSPC), Short(0)])
def test_a_drive_that_refuses_is_tried_again(kind: IoKind | FileCall, effect: Effect) -> None:
    if isinstance(effect, Short) and kind is not IoKind.WRITE:
        return
    plan = FaultPlan().add(effect, kind, nth=1)
    engine = FakeDevice(ManualClock(), faults=plan)
    drive = Drive(engine, FOLDER)
    drive.add(1)
    drive.settle()
    (fault,) = drive.faults
    assert fault is not None
    assert (drive.quarantine.pending, drive.knows(range(3))) == (True, [1])
    drive.settle()
    assert drive.faults[1:] == [None] and not drive.quarantine.pending
    assert [info.name for info in engine.list(FOLDER)] == [log_name(2)]
    again = Drive(engine.crash_image(lambda _: False), FOLDER)
    assert again.knows(range(3)) == [1]


def test_a_log_that_cannot_be_read_is_left_out() -> None:
    plan = FaultPlan()
    engine = FakeDevice(ManualClock(), faults=plan)
    drive = Drive(engine, FOLDER)
    drive.add(1)
    drive.settle()
    plan.add(Fail(errno.EIO), IoKind.READ)
    again = Drive(engine, FOLDER)
    assert again.knows(range(3)) == []
    again.add(2)
    again.settle()
    assert again.knows(range(3)) == [2]


def test_a_lost_flush_costs_entries_and_no_more() -> None:
    engine = FakeDevice(ManualClock(), faults=FaultPlan().add(PretendDone(), IoKind.SYNC))
    drive = Drive(engine, FOLDER)
    drive.add(1)
    drive.settle()
    assert Drive(engine.crash_image(lambda change: change.what == "name"), FOLDER).knows(range(3)) == []
