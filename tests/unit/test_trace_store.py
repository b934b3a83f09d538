"""What a real store records, and what comes of it when it is read as requests."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.crash.kit import LAYOUT, NAMESPACE, ROOT, chain_of, checked, hits, opened, put, stored
from tests.unit.test_tracing import rows_of

from kvterrace import ConfigError, KeyChain, Store, Stored, StoreLockedError, TraceRecorder, chain_keys
from kvterrace.sim.columns import load_trace
from kvterrace.sim.traces import read_trace
from kvterrace.tracing.files import SUFFIX, header, line
from kvterrace.types import Hint

MiB = 1 << 20


class Endless:
    """A cache that keeps everything: the model. Blocks by anything that stands for a whole prefix."""

    def __init__(self) -> None:
        self.kept: set[object] = set()

    def request(self, blocks: Sequence[object]) -> int:
        """Blocks of the prefix that is kept; all are kept from now on."""
        known = next((at for at, one in enumerate(blocks) if one not in self.kept), len(blocks))
        self.kept.update(blocks)
        return known


def prompts(seed: int, count: int) -> list[KeyChain]:
    """Chats that go on and branch, as key chains."""
    rng = random.Random(seed)
    texts: list[list[int]] = []
    for _ in range(count):
        base = list(rng.choice(texts)) if texts and rng.random() < 0.7 else []
        keep = rng.randint(0, len(base))
        texts.append(base[:keep] + [rng.randrange(10**6) for _ in range(16 * rng.randint(1, 5))])
    return [chain_keys(NAMESPACE, text) for text in texts]


def ask_for_all(store: Store, chain: KeyChain, sequence: bytes) -> int:
    """As an engine that gets a whole prompt and puts what was missing."""
    found = hits(checked(store, chain, sequence=sequence))
    known = found.index(False) if False in found else len(found)
    if known < len(chain):
        outcomes = put(store, chain, known, sequence=sequence)
        assert all(isinstance(one, Stored) for one in outcomes)
    return known


def ask_for_what_is_there(store: Store, chain: KeyChain, sequence: bytes) -> int:
    """As an engine that matches first, gets what there is, and puts the rest block by block."""
    known = store.match(chain).blocks
    if known:
        assert hits(checked(store, chain[:known], sequence=sequence)) == [True] * known
    for at in range(known, len(chain)):
        put(store, chain, at, at + 1, sequence=sequence)
    return known


def ask_and_put_all(store: Store, chain: KeyChain, sequence: bytes) -> int:
    """As an engine that puts the whole prompt again."""
    found = hits(checked(store, chain, sequence=sequence))
    put(store, chain, 0, sequence=sequence)
    return found.index(False) if False in found else len(found)


@pytest.mark.parametrize("ask", [ask_for_all, ask_for_what_is_there, ask_and_put_all])
def test_a_recorded_run_read_again_gives_the_same_hits(tmp_path: Path, ask: Any) -> None:
    chains = prompts(5, 120)
    served: list[int] = []
    with opened(tmp_path / "kv", trace=tmp_path / "trace", dram_bytes=16 * MiB) as store:
        served += [ask(store, chain, b"s%d" % number) for number, chain in enumerate(chains)]
    model = Endless()
    wanted = [model.request(list(chain)) for chain in chains]
    assert served == wanted
    replayed = Endless()
    requests = list(read_trace(tmp_path / "trace"))
    assert [len(one.ids) for one in requests] == [len(chain) for chain in chains]
    assert [replayed.request(one.ids.tolist()) for one in requests] == wanted
    assert [one.input_tokens for one in requests] == [16 * len(chain) for chain in chains]
    assert [one.session for one in requests] == list(range(len(chains)))
    times = [one.at_s for one in requests]
    assert times == sorted(times) and times[0] >= 0
    assert all("seq" in row for row in rows_of(tmp_path / "trace", "get"))
    said = sum(count for row in rows_of(tmp_path / "trace", "get") for word, count in row["ended"] if word == "dram")
    assert said >= sum(wanted)
    ids = {
        key: one
        for chain, request in zip(chains, requests, strict=True)
        for key, one in zip(chain, request.ids.tolist(), strict=True)
    }
    assert len(set(ids.values())) == len(ids)
    columns = load_trace(tmp_path / "trace")  # replayed with the store's blocks, not with larger ones
    assert (columns.block_tokens, len(columns.ids)) == (16, sum(map(len, chains)))
    coarse = read_trace(tmp_path / "trace", coarsen=2)
    assert [one.ids.tolist() for one in coarse] == [one.ids[1::2].tolist() for one in requests]


def test_requests_that_overlap_are_told_apart(tmp_path: Path) -> None:
    shared = chain_of(1, 4)
    tokens = np.arange(4 * 16) + 1_000_003
    first, second = (chain_keys(NAMESPACE, np.append(tokens, np.arange(32) + 500 * who)) for who in (1, 2))
    assert first.data[: 4 * 32] == second.data[: 4 * 32] == shared.data
    with opened(tmp_path / "kv", trace=tmp_path / "trace") as store:
        stored(store, shared, sequence=b"system")
        for chain in (first, second):
            assert hits(checked(store, chain)) == [True] * 4 + [False] * 2
        for chain in (second, first):
            put(store, chain, 4)
        for _ in range(2):
            assert hits(checked(store, first)) == [True] * 6
    requests = list(read_trace(tmp_path / "trace"))
    assert [len(one.ids) for one in requests] == [4, 6, 6, 6, 6]
    _, one, two, again, once_more = (tuple(request.ids.tolist()) for request in requests)
    assert one[:4] == two[:4] and one[4] != two[4]
    assert again == once_more == one


def test_reads_layer_by_layer_are_one_request(tmp_path: Path) -> None:
    chain = chain_of(1, 3)
    with opened(tmp_path / "kv", trace=tmp_path / "trace") as store:
        stored(store, chain)
        for layer in range(LAYOUT.layers):
            out = bytearray(3 * LAYOUT.block_nbytes // LAYOUT.layers)
            store.wait(store.get(chain, out, layers=range(layer, layer + 1)), 60.0)
    assert [row["layers"] for row in rows_of(tmp_path / "trace", "get")] == [[0, 1], [1, 2]]
    assert [len(one.ids) for one in read_trace(tmp_path / "trace")] == [3, 3]  # the put, the get


def test_hints_are_recorded_and_close_a_request(tmp_path: Path) -> None:
    chains = {name: chain_of(way, 2) for way, name in enumerate((b"a", b"b", b"c"), 1)}
    with opened(tmp_path / "kv", trace=tmp_path / "trace") as store:
        for name, chain in chains.items():
            put(store, chain, sequence=name)
        store.hint(b"a", Hint.CLOSED)
        store.hint(b"b", Hint.RETURNS, seconds=7.0)
        store.hint(b"never seen", Hint.ONE_OFF)
        store.touch(chains[b"b"], scores=np.array([[1.0, 2.0], [0.5, 0.25]]))
    rows = rows_of(tmp_path / "trace", "hint")
    assert [(row["kind"], row.get("seconds")) for row in rows] == [
        ("closed", None),
        ("returns", 7.0),
        ("one_off", None),
    ]
    assert [row["seq"] for row in rows[:2]] == [row["seq"] for row in rows_of(tmp_path / "trace", "put")][:2]
    assert [one.closed for one in read_trace(tmp_path / "trace")] == [True, False, False]
    (touched,) = rows_of(tmp_path / "trace", "touch")
    assert touched["scores"] == [1.5, 2.25], "over all layer groups"


def test_moves_are_recorded(tmp_path: Path) -> None:
    chain = chain_of(1, 20)
    with opened(tmp_path / "kv", trace=tmp_path / "trace") as store:
        stored(store, chain)
        store.touch(chain, scores=np.full(20, 0.25))
        assert store.flush(60.0)
        with store._driver.lock:
            store._core.ledger.evict_idle()
        assert hits(checked(store, chain)) == [True] * 20
        store.invalidate(chain, start=15)
    moved: dict[tuple[str, str], list[int]] = {}
    for row in rows_of(tmp_path / "trace"):
        if row.get("op") in ("enter", "leave"):
            runs = row["blocks"]
            for first, count in zip(runs[::2], runs[1::2], strict=True):
                moved.setdefault((row["op"], row["tier"]), []).extend(range(first, first + count))
    assert sorted(moved["enter", "ssd"]) == list(range(20))
    assert sorted(moved["leave", "dram"]) == sorted([*range(20), *range(15, 20)])  # evicted, read again, invalidated
    assert sorted(moved["leave", "ssd"]) == list(range(15, 20))
    (got,) = rows_of(tmp_path / "trace", "get")
    assert got["ended"] == [["ssd", 20]] and 0 <= got["took"] < 60
    (touched,) = rows_of(tmp_path / "trace", "touch")
    assert touched["scores"] == [0.25] * 20
    (gone,) = rows_of(tmp_path / "trace", "invalidate")
    assert (gone["start"], gone["stop"]) == (15, 20)


def test_without_a_trace_nothing_is_recorded(tmp_path: Path) -> None:
    with opened(tmp_path / "kv") as store:
        stored(store, chain_of(1, 2))
        assert store._core.ledger.table.on_enter is None
    assert [one.name for one in tmp_path.iterdir()] == ["kv"]


def test_a_store_that_cannot_be_opened_gives_the_folder_back(tmp_path: Path) -> None:
    with opened(tmp_path / "kv"), pytest.raises(StoreLockedError):
        opened(tmp_path / "kv", trace=tmp_path / "trace")
    with opened(tmp_path / "kv", trace=tmp_path / "trace"):
        pass
    with pytest.raises(ConfigError, match="trace"):
        opened(tmp_path / "kv", trace=7)
    with opened(tmp_path / "kv"):
        pass


def test_a_recorder_that_fails_does_not_fail_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = TraceRecorder(tmp_path / "trace")
    with opened(tmp_path / "kv", trace=recorder) as store:
        monkeypatch.setattr("kvterrace.tracing.recorder.Rows.transfer", lambda *_, **__: 1 / 0)
        stored(store, chain_of(1, 3))
        recorder.drain()
        assert "division" in recorder.stats().stopped
        monkeypatch.undo()
        assert hits(checked(store, chain_of(1, 3))) == [True] * 3
    assert list((tmp_path / "trace").iterdir()) == []


CHILD = """
import sys
from pathlib import Path
from tests.crash.kit import chain_of, opened, put
from kvterrace.tracing import recorder
recorder._MEMBER_S = 0.0
one = recorder.TraceRecorder(sys.argv[1] + "/trace")
store = opened(Path(sys.argv[1]) / "kv", trace=one)
for number in range(10**6):
    put(store, chain_of(number, 3), sequence=b"s")
    one.drain()
    print(number, flush=True)
"""


def test_a_killed_process_leaves_what_it_had_written(tmp_path: Path) -> None:
    command = [sys.executable, "-c", CHILD, str(tmp_path)]
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"}
    with subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        for text in child.stdout:
            if int(text) >= 20:
                break
        child.send_signal(signal.SIGKILL)
        said = [int(text), *map(int, child.stdout.read().split())]
    requests = list(read_trace(tmp_path / "trace"))
    assert len(requests) >= said[-1]  # the last may not have been written yet
    assert all(len(one.ids) == 3 for one in requests)
    assert len({one.ids.tobytes() for one in requests}) == len(requests)
    with opened(tmp_path / "kv", trace=tmp_path / "trace") as store:  # its lock is gone with it
        put(store, chain_of(0, 3))
    again = list(read_trace(tmp_path / "trace"))
    assert len(again) == len(requests) + 1
    assert again[-1].at_s > requests[-1].at_s  # times go on


@pytest.mark.parametrize(
    "row",
    [
        {"op": "blocks", "first": 5, "after": -1, "ids": "00" * 8},
        {"op": "blocks", "first": 2, "after": 2, "ids": "00" * 8},
        {"op": "blocks", "first": 2, "after": -1, "ids": "00" * 7},
        {"op": "blocks", "first": 2, "after": -1},
        {"op": "get", "t": 1.0, "ns": 0, "tip": 2, "start": 0, "stop": 3, "ended": [["miss", 3]]},
        {"op": "get", "t": 1.0, "ns": 0, "tip": 1, "start": 0, "stop": 1, "ended": [["miss", 1]]},
        {"op": "get", "t": 1.0, "ns": 1, "tip": 1, "start": 0, "stop": 2, "ended": [["miss", 2]]},
        {"op": "put", "ns": 0},
        {"what": 1},
        {"op": "request", "t": "soon", "ns": 0, "tip": 1, "stop": 2},
    ],
)
def test_a_row_that_cannot_be_is_named(tmp_path: Path, row: dict[str, Any]) -> None:
    path = tmp_path / "a.jsonl"
    rows = [
        header(recording="r", number=0, began_unix_s=5),
        {"op": "namespace", "ns": 0, "block_tokens": 16},
        {"op": "blocks", "first": 0, "after": -1, "ids": "00" * 15 + "01"},
    ]
    path.write_bytes(b"".join(map(line, [*rows, {"op": "something new"}])))
    assert list(read_trace(path)) == []
    path.write_bytes(b"".join(map(line, [*rows, row])))
    with pytest.raises(ConfigError, match="line 4"):
        list(read_trace(path))


def test_what_comes_much_later_is_another_request(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    put_row = {"op": "put", "took": 1.0, "ns": 0, "ended": [["stored", 1]]}
    rows = [
        header(recording="r", number=0, began_unix_s=5),
        {"op": "namespace", "ns": 0, "block_tokens": 16},
        {"op": "blocks", "first": 0, "after": -1, "ids": "".join(f"{one:02x}{'00' * 7}" for one in (7, 8, 9, 10))},
        {**put_row, "t": 10.0, "tip": 0, "start": 0, "stop": 1, "seq": "aa"},
        {**put_row, "t": 40.5, "tip": 1, "start": 1, "stop": 2, "seq": "aa"},
        {**put_row, "t": 41.0, "tip": 2, "start": 2, "stop": 3, "seq": "bb"},
        {**put_row, "t": 72.0, "tip": 2, "start": 2, "stop": 3},
        {**put_row, "t": 80.0, "tip": 3, "start": 3, "stop": 4, "seq": "aa"},
    ]
    path.write_bytes(b"".join(map(line, rows)))
    found = [(one.at_s, one.ids.tolist(), one.session) for one in read_trace(path)]
    assert found == [(10.0, [7, 8], 0), (41.0, [7, 8, 9], 1), (72.0, [7, 8, 9, 10], 0)]


def test_times_go_on_over_recordings_and_files(tmp_path: Path) -> None:
    folder = tmp_path / "trace"
    folder.mkdir()
    get = {"op": "get", "took": 0.5, "ns": 0, "tip": 1, "start": 0, "stop": 2, "ended": [["miss", 2]]}
    for number, (recording, began_unix_s, block_tokens) in enumerate(
        [("a", 1000, 16), ("a", 1000, 16), ("b", 1060, 32)]
    ):
        rows = [
            header(recording=recording, number=number, began_unix_s=began_unix_s),
            {"op": "namespace", "ns": 0, "block_tokens": block_tokens},
            {"op": "blocks", "first": 0, "after": -1, "ids": f"{number:02x}{'00' * 7}{number + 16:02x}{'ff' * 7}"},
            {**get, "t": 1.0 + number},
        ]
        (folder / f"{number}{SUFFIX}").write_bytes(b"".join(map(line, rows)))
    found = [(one.at_s, one.ids.tolist(), one.input_tokens) for one in read_trace(folder)]
    # as little-endian numbers, without the highest bit
    want_ids = [[number, int.from_bytes(bytes([number + 16]) + b"\xff" * 6 + b"\x7f", "little")] for number in range(3)]
    assert found == [(1.0, want_ids[0], 32), (2.0, want_ids[1], 32), (63.0, want_ids[2], 64)]


def test_a_reader_records_too(tmp_path: Path) -> None:
    chain = chain_of(1, 5)
    with opened(tmp_path / "kv") as writer:
        stored(writer, chain)
    with opened(tmp_path / "kv", read_only=True, trace=tmp_path / "trace") as reader:
        assert hits(checked(reader, chain)) == [True] * 5
    (got,) = rows_of(tmp_path / "trace", "get")
    assert got["ended"] == [["ssd", 5]]


def test_a_file_that_the_recorder_removes_meanwhile_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for life in range(2):
        with opened(tmp_path / f"kv{life}", trace=tmp_path / "trace") as store:
            put(store, chain_of(life, 3 + life))
    files = sorted((tmp_path / "trace").iterdir())
    gone = files[0].with_name("0" + files[0].name)
    monkeypatch.setattr("kvterrace.sim.recorded.trace_files", lambda _: [gone, *files])
    assert [len(one.ids) for one in read_trace(tmp_path / "trace")] == [3, 4]
    with pytest.raises(ConfigError, match="No such file"):
        list(read_trace(gone))
