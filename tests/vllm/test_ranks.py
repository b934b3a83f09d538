"""Several ranks: what one lacks none loads; keys of their own; look-ups over a socket. And some small parts."""

from __future__ import annotations

import hashlib
import os
import socket
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from tests.vllm.machine import config_for

from kvterrace.errors import ConfigError
from kvterrace.integrations.vllm import lookup
from kvterrace.integrations.vllm.lookup import LookupServer, RemoteLookup, lookup_for
from kvterrace.integrations.vllm.messages import Handshake, WorkerReport
from kvterrace.integrations.vllm.metrics import PromMetrics, SchedulerCounts, Stats, WorkerCounts
from kvterrace.integrations.vllm.namespace import rank_chain, with_epoch
from kvterrace.integrations.vllm.rates import Rates
from kvterrace.keys import Namespace, chain_keys
from kvterrace.layout import KVLayout

LAYOUT = KVLayout(layers=1, kv_heads=1, head_dim=1, dtype="float32", block_tokens=2, parts_per_layer=1, tp_size=2)
SPACE = Namespace("weights", LAYOUT)
OTHER = Namespace("weights", replace(LAYOUT, tp_rank=1))
KEYS = chain_keys(SPACE, range(20)).data


def test_each_rank_has_keys_of_its_own() -> None:
    assert rank_chain(SPACE, KEYS, SPACE.digest).data == KEYS
    other = rank_chain(OTHER, KEYS, SPACE.digest)
    assert other.namespace is OTHER and other.root == OTHER.root_key()
    for index in range(10):
        key = KEYS[32 * index : 32 * index + 32]
        assert other.key(index) == hashlib.sha256(b"kvterrace/rank/1\0" + OTHER.digest + key).digest()


def test_an_epoch_is_a_namespace_that_nobody_else_makes() -> None:
    one, two = with_epoch(SPACE, "1" * 32), with_epoch(SPACE, "2" * 32)
    assert with_epoch(SPACE, "") is SPACE
    assert len({SPACE.digest, one.digest, two.digest}) == 3
    assert (one.epoch, one.model, one.layout, one.tenant) == (1, SPACE.model, SPACE.layout, SPACE.tenant)


class Worker:
    """Has the first `blocks` blocks of every chain, `dram` of them in DRAM."""

    def __init__(self, blocks: int, dram: int) -> None:
        self.blocks, self.dram, self.asked = blocks, dram, list[tuple[str, bytes, int]]()
        self.server = LookupServer(self.match)

    def match(self, epoch: str, made_in: bytes, keys: bytes) -> lookup.Answer:
        self.asked.append((epoch, made_in, len(keys)))
        return self.blocks, self.dram


def answer(remote: RemoteLookup, name: str, keys: bytes = KEYS, epoch: str = "e") -> lookup.Answer:
    until_s = time.monotonic() + 30
    while True:
        found = remote.ask(name, epoch, SPACE.digest, keys)
        if found is not None:
            return found
        assert time.monotonic() < until_s, "no answer"
        time.sleep(0.001)


def test_what_one_rank_lacks_none_loads() -> None:
    workers = [Worker(7, 2), Worker(5, 5), Worker(6, 0)]
    remote = RemoteLookup([one.server.address for one in workers])
    assert answer(remote, "a") == (5, 0)
    for one in workers:
        assert one.asked == [("e", SPACE.digest, len(KEYS))]
        one.server.close()
    remote.close()


def test_a_worker_that_is_killed_leaves_no_socket_behind() -> None:
    worker = Worker(3, 1)
    folder = Path(worker.server.address).parent
    assert folder.stat().st_mode & 0o777 == 0o700
    remote = RemoteLookup([worker.server.address])
    assert answer(remote, "a") == (3, 1)
    assert not folder.exists()
    remote.close()
    worker.server.close()


def test_many_look_ups_are_under_way_at_once_and_one_that_is_forgotten_disturbs_nobody() -> None:
    worker = Worker(3, 1)
    remote = RemoteLookup([worker.server.address])
    names = [str(number) for number in range(200)]
    for name in names:
        remote.ask(name, "", SPACE.digest, KEYS * 20)
    for name in names[::2]:
        remote.forget(name)
    assert [answer(remote, name, KEYS * 20, "") for name in names[1::2]] == [(3, 1)] * 100
    assert len(worker.asked) == 200  # asking again is not asked twice
    assert answer(remote, "1", KEYS, "") == (3, 1)  # of another chain: anew
    assert len(worker.asked) == 201
    remote.close()
    worker.server.close()


def test_a_worker_that_is_gone_counts_as_having_nothing(caplog: pytest.LogCaptureFixture) -> None:
    workers = [Worker(7, 2), Worker(5, 5)]
    remote = RemoteLookup([one.server.address for one in workers])
    assert answer(remote, "a") == (5, 2)
    workers[1].server.close()
    assert answer(remote, "b") == (0, 0)
    assert answer(remote, "c") == (0, 0)
    assert sum("answers no look-ups any more" in one.getMessage() for one in caplog.records) == 1
    workers[0].server.close()
    remote.close()


def test_a_worker_that_does_not_answer_in_time_counts_as_having_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(tmp_path / "s"))
        silent.listen(1)
        remote = RemoteLookup([str(tmp_path / "s")], patience_s=0.01)
        assert remote.ask("a", "", SPACE.digest, KEYS) is None
        assert answer(remote, "a", epoch="") == (0, 0)
        assert answer(remote, "b", epoch="") == (0, 0)
        assert sum("has not answered a look-up" in one.getMessage() for one in caplog.records) == 1
        remote.close()


def test_workers_in_this_process_are_asked_without_a_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(lookup.local, "t", lambda epoch, made_in, keys: (len(keys) // 32, 4))
    found = lookup_for([Handshake(SPACE, os.getpid(), "t", "")])
    assert found.ask("a", "", SPACE.digest, KEYS) == (10, 4)
    with pytest.raises(ConfigError, match="must share a host"):  # another process: there is no such socket
        lookup_for([Handshake(SPACE, os.getpid() + 1, "t", "/nowhere")])


def test_of_what_ranks_report_the_lesser_counts() -> None:
    one = WorkerReport({"a": 3}, {"x": 5, "y": 1}, (100, 2.0), [(10, 1.0)])
    two = WorkerReport({"a": 2, "b": 9}, {"x": 4}, (100, 3.0), [(20, 1.0)])
    both = one.aggregate(two)
    assert both.unsaved == {"a": 2, "b": 9} and both.failed == {"x": 4, "y": 1}
    assert both.compute == (100, 3.0) and both.loads == [(10, 1.0), (20, 1.0)]
    assert not WorkerReport() and WorkerReport(failed={"a": 0})


# -- load or recompute -------------------------------------------------------------------------------------------------


def test_what_is_faster_by_what_was_measured() -> None:
    rates = Rates()
    assert rates.worth_loading(1, 1 << 40, 0.0)
    assert [rates.deadline_s(tokens) for tokens in (100, 1000, 10**6)] == [0.5, 4.0, 30.0]  # 250 tokens a second
    rates.computed(1000, 2.0)  # 500 tokens a second
    rates.loaded(100 << 20, 1.0, now_s=7.0)  # 100 MiB a second
    assert rates.worth_loading(500, 99 << 20, now_s=7.0)  # 1 s against 0.99
    assert not rates.worth_loading(500, 101 << 20, now_s=7.0)
    assert not rates.worth_loading(500, 101 << 20, now_s=37.0)
    assert rates.worth_loading(500, 101 << 20, now_s=37.1)  # who refuses does not measure: try again
    assert rates.deadline_s(1000) == 2.0 and rates.deadline_s(1) == 0.5 and rates.deadline_s(10**6) == 30.0


def test_small_steps_and_loads_say_nothing_and_new_ones_weigh_a_quarter() -> None:
    rates = Rates()
    rates.computed(63, 100.0)
    rates.loaded(1000, 0.4, now_s=0.0)
    assert rates.worth_loading(1, 1 << 40, now_s=0.0)
    rates.computed(1000, 1.0)
    rates.computed(2000, 1.0)  # 1000 + (2000 - 1000) / 4
    assert rates.deadline_s(2500) == pytest.approx(2.0)
    rates.loaded(0, 5.0, now_s=0.0)  # nothing of a load had come when it was given up
    assert not rates.worth_loading(1000, 1000, now_s=0.0)


# -- metrics -----------------------------------------------------------------------------------------------------------


def test_counts_add_up_over_ranks_and_steps() -> None:
    counts = WorkerCounts()
    counts.blocks["ssd"] += 2
    counts.loaded_nbytes, counts.load_s = 100, [0.5]
    first = Stats(counts.take())
    assert counts.take() == {}
    total = Stats({"blocks.ssd": 3, "load_s": [1.5], "tokens.ssd": 7}).aggregate(first)
    assert total.data == {"blocks.ssd": 5, "loaded_nbytes": 100, "load_s": [1.5, 0.5], "tokens.ssd": 7}
    assert total.reduce() == {
        "blocks.ssd": 5, "loaded_nbytes": 100, "load_s (count)": 2, "load_s (mean)": 1.0, "tokens.ssd": 7,
    }  # fmt: skip
    total.reset()
    assert total.is_empty()
    scheduler = SchedulerCounts(hit_ssd=4, lost_blocks=1)
    assert scheduler.take() == {"tokens.ssd": 4, "blocks.lost": 1} and scheduler.take() == {}


def test_prometheus(model: Path, extra: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    registry = CollectorRegistry()

    def of(kind: Any) -> Any:
        return lambda **facts: kind(registry=registry, **facts)

    types = {kind: of(kind) for kind in (Counter, Gauge, Histogram)}
    metrics = PromMetrics(config_for(model, extra), types, ["model", "engine"], {3: ["m", "3"]})
    metrics.observe(
        {"blocks.ssd": 5, "tokens.dram": 7, "loaded_nbytes": 100, "save_s": [0.5], "load_s": [0.02, 2.0]}, 3
    )
    metrics.observe({"blocks.ssd": 1}, 3)
    labels = {"model": "m", "engine": "3"}
    assert registry.get_sample_value("vllm:kvterrace_blocks_total", {**labels, "fate": "ssd"}) == 6
    assert registry.get_sample_value("vllm:kvterrace_tokens_total", {**labels, "kind": "dram"}) == 7
    assert registry.get_sample_value("vllm:kvterrace_bytes_total", {**labels, "way": "loaded"}) == 100
    assert registry.get_sample_value("vllm:kvterrace_save_seconds_sum", labels) == 0.5
    assert registry.get_sample_value("vllm:kvterrace_load_seconds_bucket", {**labels, "le": "0.03"}) == 1
    assert registry.get_sample_value("vllm:kvterrace_load_seconds_count", labels) == 2
