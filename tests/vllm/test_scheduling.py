"""Loads and saves with vLLM's own scheduler, against arithmetic in place of a model."""

from __future__ import annotations

import contextlib
import random
import time
from pathlib import Path
from typing import Any

import pytest
from tests.vllm.machine import BLOCK, Machine, machine, model_folder, plain_seed, prompt, reference
from tests.vllm.stores import between
from vllm.v1.request import RequestStatus

from kvterrace import opening
from kvterrace.errors import StoreClosedError
from kvterrace.integrations.vllm.rates import Rates
from kvterrace.io.base import IoKind
from kvterrace.testing.faults import FaultPlan, FaultyEngine, Hang
from kvterrace.types import Busy, Corrupt, Expired, Miss

PLAIN = plain_seed()
FIRST, SECOND = prompt(1, 200), prompt(2, 200)  # 12 whole blocks of 16, and 8 tokens

Extra = dict[str, object]


def test_what_was_computed_is_loaded_after_eviction_and_after_a_restart(model: Path, extra: Extra) -> None:
    with machine(model, extra, blocks=14) as engine:  # room for one of them
        assert engine.ask(FIRST) == (reference(FIRST, 4, PLAIN), 200 + 3)
        assert engine.ask(SECOND) == (reference(SECOND, 4, PLAIN), 200 + 3)
        assert engine.ask(FIRST) == (reference(FIRST, 4, PLAIN), 200 - 192 + 3)
        assert engine.counts["blocks.dram"] == 12
    with machine(model, extra, blocks=14) as engine:
        assert engine.ask(SECOND) == (reference(SECOND, 4, PLAIN), 8 + 3)
        assert engine.counts["blocks.ssd"] == 12
        assert engine.counts["tokens.ssd"] == 192


def test_a_prompt_of_whole_blocks_leaves_its_last_block_to_compute(model: Path, extra: Extra) -> None:
    tokens = prompt(1, 6 * BLOCK)
    with machine(model, extra) as engine:
        engine.ask(tokens)
    with machine(model, extra) as engine:
        assert engine.ask(tokens) == (reference(tokens, 4, PLAIN), BLOCK + 3)


def test_answers_are_kept_too_and_a_next_turn_loads_them(model: Path, extra: Extra) -> None:
    with machine(model, extra) as engine:
        answer, _ = engine.ask(FIRST, answer=40)  # 240 tokens, of which the last has no KV: 14 whole blocks
    turn = FIRST + answer + prompt(3, 20)
    with machine(model, extra) as engine:
        assert engine.ask(turn) == (reference(turn, 4, PLAIN), 260 - 14 * BLOCK + 3)


def test_what_follows_on_blocks_that_are_there_is_kept_from_its_own_rows(model: Path, extra: Extra) -> None:
    with machine(model, extra, blocks=40) as engine:
        answer, _ = engine.ask(FIRST)
        turn = FIRST + answer + prompt(3, 60)
        engine.ask(turn)  # vLLM still has the first twelve blocks, and so has the store
        assert engine.counts["blocks.present"] >= 12
    with machine(model, extra, blocks=40) as engine:
        assert engine.ask(turn) == (reference(turn, 4, PLAIN), 264 - 16 * BLOCK + 3)


def test_what_vllm_holds_itself_is_not_loaded(model: Path, extra: Extra) -> None:
    with machine(model, extra) as engine:
        engine.ask(FIRST)
        assert engine.ask(FIRST)[1] == 8 + 3
        assert "tokens.dram" not in engine.counts and "blocks.dram" not in engine.counts


def test_a_hit_behind_what_vllm_holds_is_loaded_from_there_on(model: Path, extra: Extra) -> None:
    with machine(model, extra, blocks=14) as engine:
        engine.ask(FIRST)
        engine.ask(prompt(2, 100))  # takes seven of thirteen rows, last used first
        before = engine.counts.get("blocks.dram", 0)
        assert engine.ask(FIRST) == (reference(FIRST, 4, PLAIN), 8 + 3)
        assert 0 < engine.counts["blocks.dram"] - before < 12


@pytest.mark.parametrize("batched_tokens", [16, 50, 512])
def test_prompts_cut_into_chunks(model: Path, extra: Extra, batched_tokens: int) -> None:
    prompts = [FIRST[: 16 * shared] + prompt(seed, 90) for seed, shared in enumerate((0, 3, 7, 12))]
    for _ in range(2):
        with machine(model, extra, blocks=60, batched_tokens=batched_tokens) as engine:
            for number, tokens in enumerate(prompts):
                engine.add(str(number), tokens)
            engine.run()
            for number, tokens in enumerate(prompts):
                assert engine.answers[str(number)] == reference(tokens, 4, PLAIN)
    assert engine.counts["blocks.ssd"] > 0


def test_preempted_requests_go_on_with_what_was_kept_of_them(model: Path, extra: Extra) -> None:
    with machine(model, extra, blocks=20) as engine:
        requests = [engine.add(str(seed), prompt(seed, 60), answer=100) for seed in range(4)]  # 40 blocks in the end
        engine.run()
        for seed in range(4):
            assert engine.answers[str(seed)] == reference(prompt(seed, 60), 100, PLAIN)
        assert sum(request.num_preemptions for request in requests) > 0
        assert engine.counts["blocks.dram"] > 0
        # Each token once, but for the rest of a block after a preemption.
        preempted = sum(request.num_preemptions for request in requests)
        assert engine.computed_tokens <= 4 * 159 + preempted * BLOCK


@pytest.mark.parametrize("when", ["before it came", "after"])
def test_a_request_aborted_in_mid_load(model: Path, extra: Extra, when: str) -> None:
    with machine(model, extra, blocks=14) as engine:
        engine.ask(FIRST)
        engine.ask(SECOND)
        store = between(engine)
        store.holding = True
        engine.add("aborted", FIRST)
        for _ in range(3):
            engine.step()
        assert len(store.held) == 1
        free = engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        engine.scheduler.finish_requests("aborted", RequestStatus.FINISHED_ABORTED)
        if when == "before it came":
            engine.step()
            # Its rows are still written to: nobody else gets them.
            assert engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == free
        store.let_go()
        engine.run()
        assert engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == 13
        assert engine.ask(SECOND) == (reference(SECOND, 4, PLAIN), 8 + 3)
        assert engine.ask(FIRST) == (reference(FIRST, 4, PLAIN), 8 + 3)


@pytest.mark.parametrize("bad", [{0}, {5}, {11}, {3, 4, 9}, set(range(12))])
@pytest.mark.parametrize(
    "outcome", [Corrupt("f@0", "crc"), Expired(), Miss(), Busy()], ids=lambda one: type(one).__name__
)
def test_blocks_that_do_not_arrive_are_computed(model: Path, extra: Extra, bad: set[int], outcome: Any) -> None:
    with machine(model, extra, blocks=14) as engine:
        engine.ask(FIRST)
        engine.ask(SECOND)
        store = between(engine)
        store.spoil = lambda start, stop: dict.fromkeys(bad, outcome)
        kept = 16 * min(bad)
        assert engine.ask(FIRST) == (reference(FIRST, 4, PLAIN), 200 - kept + 3)
        assert store.asked.count("get") == 1  # not again for this request, whatever the store says it has
        assert engine.counts[f"blocks.{type(outcome).__name__.lower()}"] == len(bad)
        store.spoil = lambda start, stop: {}
        engine.ask(SECOND)
        assert engine.ask(FIRST) == (reference(FIRST, 4, PLAIN), 8 + 3)


def test_each_kind_of_fault_is_told_once(model: Path, extra: Extra, caplog: pytest.LogCaptureFixture) -> None:
    with machine(model, extra, blocks=14) as engine:
        engine.ask(FIRST)
        engine.ask(SECOND)
        store = between(engine)
        store.spoil = lambda start, stop: {block: Corrupt("f@0", "crc") for block in (3, 4, 5)}
        engine.ask(FIRST)
        engine.ask(SECOND)
        told = [one for one in caplog.records if one.name == "kvterrace.vllm" and "did not arrive" in one.getMessage()]
        assert len(told) == 1
        assert engine.counts["blocks.corrupt"] == 6


def test_a_store_that_is_gone_costs_the_cache_and_no_answer(
    model: Path, extra: Extra, caplog: pytest.LogCaptureFixture
) -> None:
    with machine(model, extra, blocks=14) as engine:
        engine.ask(FIRST)
        engine.ask(SECOND)
        between(engine).refuse = lambda what: StoreClosedError("closed")
        assert engine.ask(FIRST) == (reference(FIRST, 4, PLAIN), 200 + 3)
        assert engine.counts["blocks.match_error"] >= 1 and engine.counts["blocks.save_error"] >= 1
        assert sum("cannot be used" in one.getMessage() for one in caplog.records) == 2  # asking, and saving


def test_a_drive_that_hangs_costs_a_deadline_and_no_answer(
    model: Path, extra: Extra, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, best = FaultPlan(), opening.best_engine  # type: ignore[attr-defined]
    engines: list[FaultyEngine] = []

    def faulty(name: str) -> Any:
        inner, *rest = best(name)
        engines.append(FaultyEngine(inner, plan))
        return engines[-1], *rest

    monkeypatch.setattr(opening, "best_engine", faulty)
    with machine(model, extra) as engine:
        engine.ask(FIRST)
    with machine(model, extra) as engine:
        plan.add(Hang(), IoKind.READ)
        assert engine.ask(FIRST) == (reference(FIRST, 4, PLAIN), 200 + 3)
        assert engine.counts["blocks.expired"] == 12
        assert engine.counts["load_s"][0] >= 0.5  # the least deadline: computing 192 tokens takes less
        plan.clear()
        engines[-1].release()


@pytest.mark.parametrize("busy", [True, False])
def test_the_length_of_a_step_is_not_taken_for_that_of_a_load(
    model: Path, extra: Extra, monkeypatch: pytest.MonkeyPatch, busy: bool
) -> None:
    told: list[float] = []
    monkeypatch.setattr(Rates, "loaded", lambda self, nbytes, elapsed_s, now_s: told.append(elapsed_s))
    with machine(model, extra, blocks=40) as engine:
        engine.ask(FIRST)
        engine.scheduler.reset_prefix_cache()
        store = between(engine)
        store.holding = True
        engine.add("loads", FIRST)
        engine.step()
        if busy:
            engine.add("runs", SECOND)
            store.let_go()
            time.sleep(0.2)  # a long step, at the end of which the load is seen to have ended at some time
        else:
            until_s = time.monotonic() + 0.2
            while time.monotonic() < until_s:
                engine.step()
            store.let_go()
        engine.run()
        assert engine.answers["loads"] == reference(FIRST, 4, PLAIN)
        assert told == [] if busy else 0.2 <= told[0] < 10.0


def test_a_load_that_cannot_begin_is_computed(model: Path, extra: Extra) -> None:
    with machine(model, extra, blocks=14) as engine:
        engine.ask(FIRST)
        engine.ask(SECOND)
        between(engine).refuse = lambda what: OSError("no") if what == "get" else None
        assert engine.ask(FIRST) == (reference(FIRST, 4, PLAIN), 200 + 3)
        assert engine.counts["blocks.load_error"] == 1


def test_a_request_that_waits_for_room_is_looked_up_once(model: Path, extra: Extra) -> None:
    with machine(model, extra, blocks=14) as engine:
        engine.ask(FIRST)
        engine.add("runs", SECOND, answer=8)
        engine.step()
        asked: list[str] = []
        lookup = engine.scheduler.connector._scheduler._lookup
        ask = lookup.ask

        def counted(name: str, *what: Any) -> Any:
            asked.append(name)
            return ask(name, *what)

        lookup.ask = counted
        engine.add("waits", prompt(3, 150))
        for _ in range(4):
            engine.step()
        assert asked == ["waits"]


def test_what_waits_for_room_is_counted_once(model: Path, extra: Extra, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvterrace.integrations.vllm.scheduler_side._ANSWER_S", 0.0)  # asked anew at each step
    with machine(model, extra, blocks=14) as engine:
        engine.ask(FIRST)
        engine.counts.clear()
        monkeypatch.setattr(Rates, "worth_loading", lambda *_: False)
        engine.add("runs", SECOND, answer=8)
        engine.step()
        engine.add("waits", FIRST)
        engine.run()
        assert engine.answers["waits"] == reference(FIRST, 4, PLAIN)
        assert engine.counts["tokens.queried"] == 2 * 192
        assert engine.counts["tokens.cheaper_computed"] == 192


def test_a_request_for_the_logits_of_its_prompt_loads_nothing(model: Path, extra: Extra) -> None:
    with machine(model, extra, blocks=14) as engine:
        engine.ask(FIRST)
        engine.ask(SECOND)
        request = engine.add("logits", FIRST)
        request.skip_reading_prefix_cache = True
        before = engine.computed_tokens
        engine.run()
        assert engine.computed_tokens - before == 203


def test_a_session_that_may_take_tokens_back_is_not_kept(model: Path, extra: Extra) -> None:
    with machine(model, extra) as engine:
        engine.add("session", FIRST, resumable=True)
        for _ in range(4):
            engine.step()
        assert "blocks.saved" not in engine.counts


def test_an_engine_that_only_reads_uses_what_another_keeps(model: Path, extra: Extra) -> None:
    with machine(model, extra) as engine:
        engine.ask(FIRST)
        between(engine).store.flush(10.0)
        with machine(model, {**extra, "read_only": True}) as reader:
            assert reader.ask(FIRST) == (reference(FIRST, 4, PLAIN), 8 + 3)
            assert reader.counts["blocks.ssd"] == 12


@pytest.mark.parametrize("seed", range(6))
def test_anything_in_any_order(tmp_path: Path, extra: Extra, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shared prefixes, a small pool, aborts, resets, blocks that fail or find no room, loads that take long."""
    monkeypatch.setattr("kvterrace.integrations.vllm.scheduler_side._RETRY_S", (0.0, 0.0))
    chance = random.Random(seed)
    roots = [prompt(100 + number, 160) for number in range(3)]
    asked: dict[str, tuple[list[int], int, bytes]] = {}
    aborted: set[str] = set()
    extra = {**extra, "dram_bytes": "96KiB", "ssd_bytes": "8MiB"}  # about 20 blocks in DRAM

    def one_life(engine: Machine, life: int) -> None:
        store = between(engine)
        store.spoil = lambda start, stop: (
            {chance.randrange(start, stop): chance.choice([Expired(), Miss()])} if chance.random() < 0.15 else {}
        )
        store.put_outcome = lambda start, stop: Busy() if chance.random() < 0.1 else None
        for number in range(25):
            name = f"{life}.{number}"
            tokens = chance.choice(roots)[: chance.randrange(1, 160)] + prompt(
                seed * 1000 + number, chance.randrange(1, 60)
            )
            salt = chance.choice([None, None, "s"])
            answer = chance.randrange(1, 40)
            engine.add(name, tokens, answer=answer, cache_salt=salt)
            asked[name] = (tokens, answer, plain_seed(engine.weights, salt))
            for _ in range(chance.randrange(8)):
                engine.step()
                store.holding = chance.random() < 0.3
                if store.held and chance.random() < 0.5:
                    store.let_go()
            if chance.random() < 0.1:
                with contextlib.suppress(
                    RuntimeError
                ):  # vLLM resets nothing while a load, or one that failed, holds rows
                    engine.scheduler.reset_prefix_cache(True, chance.random() < 0.3)
            if chance.random() < 0.15:
                alive = [name for name, one in engine.scheduler.requests.items() if not one.is_finished()]
                if alive:
                    aborted.add(chosen := chance.choice(alive))
                    engine.scheduler.finish_requests(chosen, RequestStatus.FINISHED_ABORTED)
        store.let_go()
        engine.run()

    for life in range(2):
        with machine(model_folder(tmp_path / "model"), extra, blocks=30) as engine:
            one_life(engine, life)
        loaded = engine.counts.get("blocks.dram", 0) + engine.counts.get("blocks.ssd", 0)
        for name, got in engine.answers.items():
            tokens, answer, numbers = asked[name]
            want = reference(tokens, answer, numbers)
            assert got == want if name not in aborted else got == want[: len(got)]
    assert loaded > 0
