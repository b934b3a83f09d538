"""The recorder's parts: chains by number, files that may be cut off, the ring of files, the queue, sampling."""

from __future__ import annotations

import errno
import logging
import os
import random
import signal
import socket
import stat
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.crash.kit import NAMESPACE, chain_of

from kvterrace import ConfigError, KeyChain, TraceRecorder
from kvterrace.clock import ManualClock
from kvterrace.engine.transfers import Transfer, TransferKind
from kvterrace.tracing import recorder as recorder_module
from kvterrace.tracing.chains import Chains, IdChains, named_prefix
from kvterrace.tracing.files import SUFFIX, header, line, pack, read_rows, trace_files
from kvterrace.types import Hit, Miss, Stored, Tier

MiB = 1 << 20


def chain_from(rng: random.Random, blocks: int, after: KeyChain | None = None) -> KeyChain:
    """A chain of random keys, behind all of `after`."""
    head = b"" if after is None else after.data
    return KeyChain(NAMESPACE, bytes(32), head + rng.randbytes(32 * blocks))


def transfer_of(
    kind: TransferKind,
    chain: KeyChain,
    outcomes: list[Any],
    *,
    start: int = 0,
    sequence: bytes = b"",
    at_s: float = 0.0,
) -> Transfer:
    """A transfer of blocks from `start` on that has ended so."""
    transfer = Transfer(
        kind,
        chain,
        start,
        start + len(outcomes),
        buffers=None,
        submitted_s=at_s,
        deadline_s=None,
        sequence=sequence.ljust(16, b"\0") if sequence else b"",
    )
    for index, outcome in enumerate(outcomes, start):
        transfer.settle(index, outcome)
    return transfer


def started(path: Path, **options: Any) -> tuple[TraceRecorder, ManualClock]:
    recorder, clock = TraceRecorder(path, **options), ManualClock(100.0)
    recorder.start(clock, background=False)
    return recorder, clock


def rows_of(path: Path, op: str | None = None) -> list[dict[str, Any]]:
    rows = [row for file in trace_files(path) for row in read_rows(file)]
    return rows if op is None else [row for row in rows if row.get("op") == op]


def ids_by_file(path: Path) -> list[list[str]]:
    """Of each file, the ids that it names, in order."""
    found = []
    for file in trace_files(path):
        named = "".join(row["ids"] for row in read_rows(file) if row.get("op") == "blocks")
        found.append([named[at : at + 16] for at in range(0, len(named), 16)])
    return found


# -- chains ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("named", range(8))
def test_the_named_prefix_is_found(named: int) -> None:
    assert named_prefix(lambda at: at < named, 7) == min(named, 7)
    assert named_prefix(lambda at: True, 0) == 0


def test_chains_are_what_was_added() -> None:
    rng, chains = random.Random(3), Chains()
    paths: list[list[int]] = []  # by number: ids from the root on
    for _ in range(200):
        after = rng.randrange(-1, len(paths))
        ids = [rng.randrange(2**62) for _ in range(rng.randint(0, 4))]
        base = paths[after] if after >= 0 else []
        assert chains.add(after, np.array(ids, np.int64)) == (len(paths) + len(ids) - 1 if ids else after)
        paths += [base + ids[: count + 1] for count in range(len(ids))]
    assert len(chains) == len(paths)
    for number, path in enumerate(paths):
        assert chains.ids(number).tolist() == path
        assert chains.depth(number) == len(path) - 1
        assert [chains.id_at(number, depth) for depth in range(len(path))] == path
        assert [paths[one][-1] for one in chains.numbers(number).tolist()] == path
    assert chains.ids(-1).tolist() == []
    for bad in (-2, len(paths)):
        with pytest.raises(IndexError):
            chains.add(bad, np.array([1], np.int64))


@pytest.mark.parametrize("second", [[1, 5], [2], [1, 2, 2], [9, 1], [1, 3, 2], [1, 9, 9], [9, 8, 2, 7]])
def test_an_id_that_stands_for_two_prefixes_is_refused(second: list[int]) -> None:
    chains = IdChains()
    assert chains.enter(np.array([1, 2, 5], np.int64)) == (2, 0)
    assert chains.enter(np.array([1, 2, 7], np.int64)) == (3, 2)
    with pytest.raises(ConfigError, match="an id"):
        chains.enter(np.array(second, np.int64))


# -- files -------------------------------------------------------------------------------------------------------------


def some_file(path: Path) -> list[list[dict[str, Any]]]:
    """Three members; returns their rows."""
    members = [
        [header(recording="r", number=0, began_unix_s=5)],
        [{"op": "x", "n": number} for number in range(40)],
        [{"op": "y", "n": number} for number in range(3)],
    ]
    path.write_bytes(b"".join(pack(b"".join(map(line, rows))) for rows in members))
    return members


def test_a_file_cut_anywhere_gives_its_whole_members(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / f"a{SUFFIX}"
    members = some_file(path)
    data = path.read_bytes()
    ends = np.cumsum([len(pack(b"".join(map(line, rows)))) for rows in members]).tolist()
    for cut in range(2, len(data) + 1):
        path.write_bytes(data[:cut])
        whole = sum(end <= cut for end in ends)
        caplog.clear()
        assert list(read_rows(path)) == [row for rows in members[:whole] for row in rows]
        assert len(caplog.records) == (0 if cut in ends else 1)


def test_a_flipped_or_zeroed_byte_is_never_read(tmp_path: Path) -> None:
    path = tmp_path / f"a{SUFFIX}"
    rows = [row for rows in some_file(path) for row in rows]
    data = path.read_bytes()
    for at in range(2, len(data)):
        for value in (data[at] ^ 0x10, 0):
            path.write_bytes(data[:at] + bytes([value]) + data[at + 1 :])
            found = list(read_rows(path))
            assert found == rows[: len(found)]


def test_an_unpacked_file_is_read_up_to_its_last_whole_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    rows = [header(recording="r", number=0, began_unix_s=5), *({"op": "x", "n": number} for number in range(30_000))]
    path.write_bytes(b"".join(map(line, rows)) + b'{"op":"x","n')
    assert list(read_rows(path)) == rows


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / f"a{SUFFIX}"
    path.write_bytes(pack(line({**header(recording="r", number=0, began_unix_s=5), "kvterrace_trace": 2})))
    with pytest.raises(ConfigError, match=r"format 2.*upgrade"):
        list(read_rows(path))


# -- the ring ----------------------------------------------------------------------------------------------------------


def test_the_cap_holds_and_the_newest_is_kept_whole(tmp_path: Path) -> None:
    folder, cap, rng = tmp_path / "t", MiB, random.Random(1)
    last: list[KeyChain] = []
    for life in range(2):
        recorder, clock = started(folder, cap_bytes=cap)
        for number in range(45 if life == 0 else 8):
            last = [chain_from(rng, 4000)]
            recorder.transferred(transfer_of(TransferKind.PUT, last[0], [Stored(Tier.DRAM)] * 4000), 100.0)
            clock.advance(11.0)
            recorder.drain()
            taken = sum(one.stat().st_size for one in folder.iterdir())
            assert taken <= cap
            assert recorder.stats().nbytes == taken
            assert number < 35 or taken > cap // 2
        recorder.close()
        assert recorder.stats().stopped == "closed"
    named = ids_by_file(folder)
    assert len(named[-1]) + len(named[-2]) >= 4000
    assert all(stat.S_IMODE(one.stat().st_mode) == 0o600 for one in folder.iterdir())
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    recordings = [next(iter(read_rows(file)))["recording"] for file in trace_files(folder)]
    assert recordings == sorted(recordings, key=recordings.index)  # the files of a recording lie together, in order
    assert len(set(recordings)) == 2


def test_each_file_can_be_read_without_those_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder_module, "_NAMED_BLOCKS", 50)
    recorder, clock = started(tmp_path / "t")
    rng = random.Random(2)
    chains: list[KeyChain] = []
    for _ in range(60):
        base = rng.choice(chains) if chains and rng.random() < 0.8 else None
        chains.append(chain_from(rng, rng.randint(1, 6), base))
        recorder.transferred(transfer_of(TransferKind.GET, chains[-1], [Miss()] * len(chains[-1])), 100.0)
    clock.advance(1.0)
    recorder.drain()
    recorder.close()
    files = trace_files(tmp_path / "t")
    assert len(files) > 4
    ids: dict[bytes, str] = {}
    todo = iter(chains)
    for file in files:
        parents: list[int] = []
        names: list[str] = []
        for row in read_rows(file):
            if row.get("op") == "blocks":
                assert row["first"] == len(names)
                count = len(row["ids"]) // 16
                parents += [row["after"], *range(len(names), len(names) + count - 1)]
                names += [row["ids"][at : at + 16] for at in range(0, len(row["ids"]), 16)]
            elif row.get("op") == "get":
                path, at = [], row["tip"]
                while at != -1:
                    path.append(names[at])
                    at = parents[at]
                chain = next(todo)
                assert len(path) == len(chain) == row["stop"]
                for key, name in zip(chain, reversed(path), strict=True):
                    assert ids.setdefault(key, name) == name  # one id for a key, in every file
    assert next(todo, None) is None
    assert len(set(ids.values())) == len(ids)


def test_a_folder_that_is_not_its_own_is_refused(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir(mode=0o755)
    with pytest.raises(ConfigError, match="chmod 700"):
        TraceRecorder(shared).start()
    with pytest.raises(ConfigError, match="folder that you can write to"):
        TraceRecorder(tmp_path / "no" / "such").start()
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match="folder that you can write to"):
        TraceRecorder(tmp_path / "file").start()
    first, _ = started(tmp_path / "t")
    with pytest.raises(ConfigError, match="another store"):
        TraceRecorder(tmp_path / "t").start()
    with pytest.raises(ConfigError, match="once"):
        first.start()
    first.close()
    again, _ = started(tmp_path / "t")
    again.close()
    assert list((tmp_path / "t").iterdir()) == []  # nothing happened, so nothing was written


@pytest.mark.parametrize(
    "options",
    [{"sample": 0}, {"sample": 1.5}, {"sample": "all"}, {"sample": float("nan")}, {"cap_bytes": "1KiB"}, {"path": ""}],
)
def test_options_that_cannot_work(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="trace"):
        TraceRecorder(**{"path": tmp_path / "t", **options})


# -- the queue and the drive -------------------------------------------------------------------------------------------


def test_a_full_queue_loses_events_and_says_so(tmp_path: Path) -> None:
    recorder, clock = started(tmp_path / "t")
    chain = chain_of(1, 3)
    transfer = transfer_of(TransferKind.GET, chain, [Hit(Tier.DRAM)] * 3)
    for _ in range(20_000):
        recorder.transferred(transfer, 100.0)
    assert recorder.stats().lost_events == 20_000 - 16_384
    recorder.drain()
    recorder.transferred(transfer, 100.0)
    clock.advance(11.0)
    recorder.close()
    assert len(rows_of(tmp_path / "t", "get")) == 16_384 + 1
    assert rows_of(tmp_path / "t", "lost") == [{"op": "lost", "events": 20_000 - 16_384}]


def test_long_chains_fill_the_queue_too(tmp_path: Path) -> None:
    recorder, _ = started(tmp_path / "t")
    chain = chain_from(random.Random(1), 100_000)
    for _ in range(20):
        recorder.touched(chain, None, 100.0)
    assert recorder.stats().lost_events == 20 - 11  # 2**20 blocks wait, and those of the last that was let in
    recorder.drain()
    recorder.touched(chain, None, 100.0)
    assert recorder.stats().lost_events == 20 - 11
    recorder.close()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS])
def test_a_drive_that_takes_no_writes_ends_the_recording(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    recorder, clock = started(tmp_path / "t")
    rng = random.Random(1)

    def get() -> None:
        chain = chain_from(rng, 50)
        recorder.transferred(transfer_of(TransferKind.GET, chain, [Miss()] * 50), 100.0)
        recorder.drain()
        clock.advance(11.0)
        recorder.drain()

    get()
    (file,) = trace_files(tmp_path / "t")
    before = file.read_bytes()
    write, left = os.write, [100]

    def failing(fd: int, data: Any) -> int:
        if not left[0]:
            raise OSError(code, os.strerror(code))
        taken, left[0] = write(fd, bytes(data)[: left[0]]), 0
        return taken

    with caplog.at_level(logging.WARNING, "kvterrace"):
        monkeypatch.setattr(os, "write", failing)
        for _ in range(5):
            get()
        monkeypatch.setattr(os, "write", write)
        get()
        recorder.close()
    assert len(caplog.records) == 1
    assert os.strerror(code) in caplog.records[0].getMessage()
    assert file.read_bytes() == before
    assert recorder.stats().lost_events == 5
    assert os.strerror(code) in recorder.stats().stopped


def test_what_waits_for_ten_seconds_is_in_the_file(tmp_path: Path) -> None:
    recorder, clock = started(tmp_path / "t")
    recorder.transferred(transfer_of(TransferKind.GET, chain_of(1, 3), [Miss()] * 3), 100.0)
    recorder.drain()
    clock.advance(9.9)
    recorder.drain()
    assert list((tmp_path / "t").iterdir()) == []
    clock.advance(0.2)
    recorder.drain()
    assert len(rows_of(tmp_path / "t", "get")) == 1  # without a close: as a crash would leave it
    recorder.close()


# -- what is written, and what is not ----------------------------------------------------------------------------------


def test_nothing_that_leads_to_a_prompt_is_written(tmp_path: Path) -> None:
    chain, name = chain_of(7, 12), b"chat-of-alice"
    named = []
    for life in ("one", "two"):
        recorder, _ = started(tmp_path / life)
        recorder.transferred(transfer_of(TransferKind.GET, chain, [Miss()] * 12, sequence=name), 100.0)
        recorder.transferred(transfer_of(TransferKind.PUT, chain, [Stored(Tier.DRAM)] * 12, sequence=name), 100.0)
        recorder.touched(chain, np.ones(12, np.float32), 100.0)
        recorder.entered(Tier.SSD, chain.data)
        recorder.close()
        (file,) = trace_files(tmp_path / life)
        text = zlib.decompress(file.read_bytes(), 31) + b"".join(
            bytes.fromhex(row["ids"]) for row in rows_of(tmp_path / life, "blocks")
        )
        for secret in (*chain, chain.root, NAMESPACE.digest, name):
            for form in (secret, secret.hex().encode()):
                assert form[:8] not in text
        assert NAMESPACE.model.encode() + b'"' not in text
        named.append((ids_by_file(tmp_path / life)[0], rows_of(tmp_path / life, "get")[0]["seq"]))
    (one, one_seq), (two, two_seq) = named
    assert len(one) == len(two) == 12
    assert not set(one) & set(two)
    assert one_seq != two_seq


@pytest.mark.parametrize("by_name", [True, False])
def test_a_sequence_is_recorded_whole_or_not_at_all(tmp_path: Path, by_name: bool) -> None:
    recorder, clock = started(tmp_path / "t", sample=0.3)
    rng = random.Random(4)
    shared = chain_from(rng, 5)
    turns: dict[int, KeyChain] = {}
    for _ in range(3):
        for who in range(300):
            base = shared if by_name else None  # without a name, the chain's first key tells sequences apart
            chain = chain_from(rng, 4, turns.get(who, base))
            start = len(chain) - 4
            sequence = b"s%d" % who if by_name else b""
            found = [Hit(Tier.SSD)] * start + [Miss()] * 4
            recorder.transferred(transfer_of(TransferKind.GET, chain, found, sequence=sequence), 100.0)
            stored = [Stored(Tier.DRAM)] * 4
            put = transfer_of(TransferKind.PUT, chain, stored, start=start, sequence=sequence, at_s=200.0 + who)
            recorder.transferred(put, 300.0 + who)
            turns[who] = chain
        clock.advance(1.0)
        recorder.drain()
    recorder.close()
    seen = [0] * 300
    for row in rows_of(tmp_path / "t", "put"):
        seen[round(row["t"]) - 100] += 1
    assert set(seen) == {0, 3}
    assert 50 <= seen.count(3) <= 130  # 90 expected, standard deviation 8
    assert len(rows_of(tmp_path / "t", "get")) == 3 * seen.count(3)


def test_moves_touches_and_invalidations_of_what_is_named(tmp_path: Path) -> None:
    recorder, _ = started(tmp_path / "t")
    chain, stranger = chain_of(1, 6), chain_of(2, 6)
    recorder.transferred(transfer_of(TransferKind.PUT, chain[:4], [Stored(Tier.DRAM)] * 4, at_s=101.5), 101.75)
    recorder.entered(Tier.SSD, chain.data)
    recorder.left(Tier.DRAM, chain.key(3) + chain.key(1) + stranger.data)
    recorder.left(Tier.DRAM, stranger.data)
    recorder.touched(chain, np.array([0.5, 1.23456, 0, 1e9, 4, 5], np.float32), 102.0)
    recorder.touched(stranger, None, 103.0)
    recorder.invalidated(chain, 2, 104.0)
    recorder.invalidated(chain, 5, 104.0)
    recorder.transferred(transfer_of(TransferKind.PREFETCH, chain, [Hit(Tier.SSD)] * 5 + [Miss()]), 105.0)
    recorder.transferred(transfer_of(TransferKind.PREFETCH, stranger, [Miss()] * 6), 105.0)
    recorder.close()
    rows = [row for row in rows_of(tmp_path / "t") if row.get("op") not in (None, "blocks", "namespace")]
    assert rows == [
        {
            "op": "put",
            "t": 1.5,
            "took": 0.25,
            "ns": 0,
            "tip": 3,
            "start": 0,
            "stop": 4,
            "ended": [["stored", 4]],
        },
        {"op": "enter", "t": 0.0, "tier": "ssd", "blocks": [0, 4]},
        {"op": "leave", "t": 0.0, "tier": "dram", "blocks": [1, 1, 3, 1]},
        {"op": "touch", "t": 2.0, "tip": 3, "stop": 4, "scores": [0.5, 1.235, 0.0, 1e9]},
        {"op": "invalidate", "t": 4.0, "tip": 3, "start": 2, "stop": 4},
        {"op": "prefetch", "t": -100.0, "took": 105.0, "ns": 0, "tip": 3, "start": 0, "stop": 4, "ended": [["ssd", 4]]},
    ]
    assert rows_of(tmp_path / "t", "namespace") == [
        {"op": "namespace", "ns": 0, "block_tokens": 16, "block_nbytes": 4096}
    ]


@pytest.mark.parametrize("dies", [False, True])
def test_a_forked_process_does_not_keep_the_folder(tmp_path: Path, dies: bool) -> None:
    recorder, _ = started(tmp_path / "t")
    here, there = socket.socketpair()
    child = os.fork()
    if not child:
        try:
            signal.alarm(60)
            here.close()
            there.send(b"x")
            there.recv(1)  # until the parent is done with it
        finally:
            os._exit(0)
    there.close()
    try:
        if dies:
            here.recv(1)
            assert recorder._ring is not None
            recorder._ring.disown()  # as its end would
        else:
            recorder.close()  # however far the child has come
        again, _ = started(tmp_path / "t")
        again.close()
    finally:
        here.close()
        os.waitpid(child, 0)


def test_what_was_queued_when_recording_stopped_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder, _ = started(tmp_path / "t")
    chain = chain_of(1, 3)
    for _ in range(5):
        recorder.transferred(transfer_of(TransferKind.GET, chain, [Miss()] * 3), 100.0)
    monkeypatch.setattr("kvterrace.tracing.rows.Rows.transfer", lambda *_, **__: 1 / 0)
    recorder.drain()
    recorder.touched(chain, None, 100.0)
    assert recorder.stats().lost_events == 4 + 1  # the fifth was being made a row of
    recorder.close()
