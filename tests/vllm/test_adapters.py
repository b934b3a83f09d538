"""LoRA adapters are known by the weights that vLLM has loaded, not by their names, numbers, paths or files."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.vllm.machine import adapter, machine, plain_seed, prompt, reference
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import LoRALayerWeights
from vllm.v1.request import RequestStatus

from kvterrace.integrations.vllm.adapters import adapter_digest

TOKENS = prompt(1, 200)  # 12 whole blocks of 16, and 8 tokens
ALL, REST = 203, 11  # computed without a hit, and with the whole one

Extra = dict[str, Any]


def answer(folder: Path) -> list[int]:
    """What is answered with the weights that are in a folder now."""
    return reference(TOKENS, 4, plain_seed(adapter=(folder / "adapter_model.safetensors").read_bytes()))


def test_known_by_its_weights_over_restarts(tmp_path: Path, model: Path, extra: Extra) -> None:
    folder = tmp_path / "a"
    for weights, want in ((1.0, ALL), (2.0, ALL), (1.0, REST)):
        with machine(model, extra) as engine:
            lora = adapter(folder, weights)
            engine.loras.use(lora)  # as vLLM's server does, before the first request
            assert engine.ask(TOKENS, lora_request=lora) == (answer(folder), want)
            engine.scheduler.reset_prefix_cache()
            assert engine.ask(TOKENS, lora_request=lora) == (answer(folder), REST)
            assert engine.ask(TOKENS)[0] == reference(TOKENS, 4, plain_seed())


def test_one_that_the_first_request_brings_is_kept_and_found_from_the_next_on(
    tmp_path: Path, model: Path, extra: Extra
) -> None:
    for _ in range(2):
        with machine(model, extra) as engine:
            lora = adapter(tmp_path / "a", 1.0)
            for want in (ALL, REST):
                assert engine.ask(TOKENS, lora_request=lora) == (answer(tmp_path / "a"), want)
                engine.scheduler.reset_prefix_cache()
    assert engine.counts["blocks.present"] == 12


def test_files_that_change_after_they_were_loaded_do_not_count(tmp_path: Path, model: Path, extra: Extra) -> None:
    folder = tmp_path / "a"
    with machine(model, extra) as engine:
        lora = adapter(folder, 1.0)
        engine.loras.use(lora)
        old = answer(folder)
        adapter(folder, 2.0)  # same name, number and path
        assert engine.ask(TOKENS, lora_request=lora) == (old, ALL)
    for weights, want in ((2.0, ALL), (1.0, REST)):
        with machine(model, extra) as engine:
            lora = adapter(folder, weights)
            engine.loras.use(lora)
            assert engine.ask(TOKENS, lora_request=lora) == (answer(folder), want)


def test_one_that_is_loaded_again_with_other_weights_is_not_kept(
    tmp_path: Path, model: Path, extra: Extra, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "a"
    with machine(model, extra, blocks=40) as engine:
        lora = adapter(folder, 1.0)
        engine.loras.use(lora)
        engine.add("runs", prompt(2, 100), lora_request=lora)
        engine.step()  # asks the worker what it has loaded
        engine.step()
        saved = engine.counts["blocks.saved"]
        assert saved == 6
        engine.scheduler.finish_requests("runs", RequestStatus.FINISHED_ABORTED)
        engine.loras.held.clear()  # made room for others
        adapter(folder, 2.0)
        for tokens in (TOKENS, prompt(3, 200)):
            engine.scheduler.reset_prefix_cache()
            assert engine.ask(tokens, lora_request=lora)[1] == ALL
        assert engine.counts["blocks.saved"] == saved
        assert sum("loaded again with other weights" in one.getMessage() for one in caplog.records) == 1
    with machine(model, extra) as engine:
        lora = adapter(folder, 1.0)
        engine.loras.use(lora)
        assert engine.ask(TOKENS, lora_request=lora) == (answer(folder), ALL)


def test_a_request_loads_nothing_once_its_adapter_was_loaded_anew(tmp_path: Path, model: Path, extra: Extra) -> None:
    """It was let in before, and is preempted."""
    with machine(model, extra) as engine:
        lora = adapter(tmp_path / "a", 1.0)
        engine.loras.use(lora)
        engine.ask(TOKENS, lora_request=lora)
        engine.add("runs", TOKENS, answer=30, lora_request=lora)
        for _ in range(3):
            engine.step()
        engine.scheduler.connector._scheduler._adapters.take_in({1: [b"other weights"]})
        engine.scheduler.reset_prefix_cache(reset_running_requests=True)
        before = engine.computed_tokens
        engine.run()
        assert engine.computed_tokens - before >= 200


def test_one_that_takes_the_name_of_another_is_not_kept(
    tmp_path: Path, model: Path, extra: Extra, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM's own prefix cache would serve it blocks of the other."""
    with machine(model, extra) as engine:
        engine.ask(TOKENS, lora_request=adapter(tmp_path / "a", 1.0))
        saved = engine.counts["blocks.saved"]
        second = adapter(tmp_path / "b", 2.0, number=2)
        engine.scheduler.reset_prefix_cache()  # else the machine would see the wrong blocks
        for _ in range(2):
            assert engine.ask(TOKENS, lora_request=second) == (answer(tmp_path / "b"), ALL)
            engine.scheduler.reset_prefix_cache()
        assert engine.counts["blocks.saved"] == saved == 12
        assert sum("was called 'name' before" in one.getMessage() for one in caplog.records) == 1


def test_one_that_cannot_be_hashed_is_not_kept(
    tmp_path: Path, model: Path, extra: Extra, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("kvterrace.integrations.vllm.adapters.torch", SimpleNamespace(Tensor=int, uint8=None))
    with machine(model, extra) as engine:
        for _ in range(2):
            assert engine.ask(TOKENS, lora_request=adapter(tmp_path / "a", 1.0)) == (answer(tmp_path / "a"), ALL)
            engine.scheduler.reset_prefix_cache()
        assert "blocks.saved" not in engine.counts
        assert sum("cannot be told from others" in one.getMessage() for one in caplog.records) == 1


def lora_model(number: int = 1, **changes: Any) -> LoRAModel:
    facts: dict[str, Any] = {"module_name": "q", "rank": 2, "lora_alpha": 4}
    facts |= {"lora_a": torch.ones(2, 8), "lora_b": torch.ones(8, 2), **changes}
    return LoRAModel(number, 2, {"q": LoRALayerWeights(**facts)})


def test_no_two_adapters_have_one_digest() -> None:
    other = torch.ones(2, 8)
    other[1, 7] = 1.0000001
    adapters = [
        lora_model(),
        lora_model(lora_a=other),
        lora_model(lora_a=torch.ones(2, 8, dtype=torch.float16)),
        lora_model(lora_a=torch.ones(8, 2), lora_b=torch.ones(2, 8)),
        lora_model(scaling=3.0),
        lora_model(rank=4),
        LoRAModel(1, 2, {"k": lora_model().loras["q"]}),
        LoRAModel(1, 2, {}),
    ]
    digests = {adapter_digest(one) for one in adapters}
    assert len(digests) == len(adapters) and b"" not in digests
    assert adapter_digest(lora_model(2)) == adapter_digest(lora_model(1))  # the number is vLLM's


def test_an_adapter_with_something_unknown_in_it_has_no_digest() -> None:
    strange = lora_model()
    strange.loras["q"].scaling = object()
    assert adapter_digest(strange) == b""
