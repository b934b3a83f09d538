"""Saves with vLLM's own scheduler: what is kept, when it is kept, and what of it is not believed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.vllm.machine import machine, plain_seed, prompt, reference
from tests.vllm.stores import between
from vllm.v1.request import RequestStatus
from vllm.v1.worker import kv_connector_model_runner_mixin as mixin

from kvterrace.types import Busy

PLAIN = plain_seed()
FIRST, SECOND = prompt(1, 200), prompt(2, 200)  # 12 whole blocks of 16, and 8 tokens

Extra = dict[str, object]


def test_blocks_without_room_are_handed_over_again(model: Path, extra: Extra, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvterrace.integrations.vllm.scheduler_side._RETRY_S", (0.0, 0.0))
    with machine(model, extra, blocks=40) as engine:
        store = between(engine)
        full = iter([Busy()] * 3)
        store.put_outcome = lambda start, stop: next(full, None)
        engine.ask(FIRST, answer=20)
        assert engine.counts["blocks.saved"] == 219 // 16
        assert engine.counts["blocks.unsaved"] > 0 and "blocks.lost" not in engine.counts
    with machine(model, extra, blocks=40) as engine:
        assert engine.ask(FIRST) == (reference(FIRST, 4, PLAIN), 8 + 3)


def test_when_a_step_ends_nothing_reads_the_pool_any_more(model: Path, extra: Extra) -> None:
    with machine(model, extra, blocks=14) as engine:
        store = between(engine)
        engine.add("one", FIRST)
        while engine.scheduler.has_requests():
            engine.step()
            assert all(put.done for put in store.puts)
        assert len(store.puts) > 1
        engine.ask(SECOND)
        assert engine.ask(FIRST) == (reference(FIRST, 4, PLAIN), 8 + 3)


def test_a_save_that_hangs_is_given_up_and_nothing_of_it_is_found(
    model: Path, extra: Extra, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its rows are others' after the step: what is copied from them then must not be served, nor kept."""
    monkeypatch.setattr("kvterrace.integrations.vllm.saving._SETTLE_S", 0.05)
    monkeypatch.setattr("kvterrace.integrations.vllm.scheduler_side._RETRY_S", (0.0, 0.0))
    with machine(model, extra, blocks=40) as engine:
        store = between(engine)
        store.stuck = True
        assert engine.ask(FIRST)[0] == reference(FIRST, 4, PLAIN)
        assert [put.given_up for put in store.puts] == [True]  # each try would hold up a step
        assert engine.counts["blocks.stuck"] == 8 and engine.counts["blocks.lost"] == 12
        assert store.asked[-1] == "invalidate"
        assert sum("saving hangs" in one.getMessage() for one in caplog.records) == 1
        store.stuck = False
    with machine(model, extra, blocks=40) as engine:
        assert engine.ask(FIRST) == (reference(FIRST, 4, PLAIN), 200 + 3)


def test_a_copy_that_goes_on_after_it_was_given_up_is_not_found(
    model: Path, extra: Extra, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvterrace.integrations.vllm.saving._SETTLE_S", 0.05)
    monkeypatch.setattr("kvterrace.integrations.vllm.saving._REST_S", 0.0)
    with machine(model, extra, blocks=40) as engine:
        store = between(engine)
        chains: list[Any] = []
        invalidate = store.invalidate

        def late(chain: Any, *, start: int = 0) -> None:
            """The copy ends between the last look and this: with the store's own, of rows that are others' by now."""
            store.puts[-1].let_go()
            store.store.wait(store.puts[-1]._inner)
            assert store.store.match(chain).blocks > start
            invalidate(chain, start=start)
            chains.append(chain)
            store.stuck = False

        store.invalidate = late  # type: ignore[method-assign]
        store.stuck = True
        engine.add("one", FIRST)
        engine.step()
        assert len(chains) == 1 and store.store.match(chains[0]).blocks == 0
        engine.run()
        assert engine.answers["one"] == reference(FIRST, 4, PLAIN)


def test_a_block_whose_chain_was_given_up_meanwhile_is_stored_with_those_before_it(
    model: Path, extra: Extra, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvterrace.integrations.vllm.scheduler_side._RETRY_S", (0.0, 0.0))
    with machine(model, extra, blocks=40) as engine:
        store = between(engine)
        engine.add("one", FIRST, answer=60)
        engine.step()
        engine.step()
        keys = engine.scheduler.connector._scheduler._tracked["one"].keys.upto(12)
        store.store.invalidate(keys, start=3)
        engine.run()
        assert engine.answers["one"] == reference(FIRST, 60, PLAIN)
        whole = 259 // 16  # the last token has no KV
        assert engine.counts["blocks.saved"] == whole + 9  # of the first twelve, nine once more


def test_work_for_a_block_does_not_grow_with_what_it_hangs_on(model: Path, extra: Extra) -> None:
    """A look-up walks the whole chain: none is made where blocks are taken."""
    with machine(model, extra, blocks=40) as engine:
        store = between(engine)
        engine.add("one", FIRST, answer=60)
        engine.step()
        store.asked.clear()
        engine.run()
        assert store.asked.count("match") == 0 and store.asked.count("put") == 1 + 4


@pytest.mark.parametrize("error", [SystemExit, RuntimeError])
def test_a_step_that_fails_keeps_nothing(
    model: Path, extra: Extra, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    """vLLM's model runner waits for saves in a `finally`; a worker's SIGTERM raises SystemExit wherever it is."""
    with machine(model, extra) as engine:
        engine.add("dies", FIRST)
        engine.step()  # 128 of 200 tokens
        planned = engine.scheduler.schedule()
        monkeypatch.setattr(mixin, "get_kv_transfer_group", lambda: engine.worker)
        monkeypatch.setattr(mixin, "get_forward_context", lambda: None)
        with (
            pytest.raises(error),
            mixin.KVConnectorModelRunnerMixin._get_kv_connector_output(planned),
        ):
            raise error
        # Whoever goes on with such an engine computes on what vLLM took for computed.
        engine.scheduler.finish_requests("dies", RequestStatus.FINISHED_ABORTED)
        engine.scheduler.reset_prefix_cache()
        engine.ask(SECOND)
    with machine(model, extra) as engine:
        assert engine.ask(FIRST) == (reference(FIRST, 4, PLAIN), 200 - 128 + 3)
        assert engine.ask(SECOND) == (reference(SECOND, 4, PLAIN), 200 + 3)


def test_a_step_within_the_handling_of_an_exception_has_not_failed(model: Path, extra: Extra) -> None:
    with machine(model, extra) as engine:
        try:
            raise ValueError("of the caller's")
        except ValueError:
            engine.ask(FIRST)
        assert engine.counts["blocks.saved"] == 12


def test_blocks_that_never_find_room_are_counted_as_lost(model: Path, extra: Extra) -> None:
    with machine(model, extra, blocks=40) as engine:
        between(engine).put_outcome = lambda start, stop: Busy()
        engine.ask(FIRST, answer=20)
        engine.ask(SECOND, answer=1)
        assert engine.counts["blocks.lost"] >= 219 // 16
        assert "blocks.saved" not in engine.counts
