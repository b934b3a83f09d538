"""What is refused at start-up, with the reason; and what a user may say."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.vllm.machine import BLOCK, DIM, HEADS, LAYERS, cache_config, config_for, machine
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheGroupSpec,
    KVQuantMode,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from kvterrace.errors import ConfigError, StoreLockedError, UnsupportedModelError
from kvterrace.integrations import MissingDependencyError
from kvterrace.integrations.vllm import versions
from kvterrace.integrations.vllm.connector import _open
from kvterrace.integrations.vllm.options import place_of, read_options
from kvterrace.integrations.vllm.pages import pages_of
from kvterrace.integrations.vllm.weights import weights_fingerprint
from kvterrace.opening import default_write_budget

Extra = dict[str, Any]
SPEC = FullAttentionSpec(block_size=BLOCK, num_kv_heads=HEADS, head_size=DIM, dtype=torch.float32)


def make(config: Any, caches: Any = None, role: KVConnectorRole = KVConnectorRole.SCHEDULER) -> Any:
    return KVConnectorFactory.create_connector(config, role, caches or cache_config(8))


@pytest.mark.parametrize("role", KVConnectorRole)
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"policy": "fail"}, '"kv_load_failure_policy": "recompute"'),
        ({"role": "kv_consumer"}, '"kv_role": "kv_both"'),
        ({"prefix_caching": False}, "prefix caching is off"),
    ],
)
def test_engines_that_could_not_keep_it_rightly(
    model: Path, extra: Extra, role: KVConnectorRole, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        make(config_for(model, extra, **changes), role=role)


@pytest.mark.parametrize(
    ("where", "name", "value", "words"),
    [
        ("device_config", "device_type", "cuda", "device cuda"),
        ("parallel_config", "decode_context_parallel_size", 2, "context parallelism"),
        ("parallel_config", "nnodes", 2, "several hosts"),
        ("cache_config", "kv_sharing_fast_prefill", True, "kv_sharing_fast_prefill"),
        ("load_config", "load_format", "dummy", "load_format 'dummy'"),
        ("load_config", "load_format", "gguf", "load_format 'gguf'"),  # a plugin's; one commit has many of them
        ("model_config", "is_diffusion", True, "diffusion"),
        ("", "speculative_config", object(), "speculative decoding"),
    ],
)
def test_models_that_are_not_understood(
    model: Path, extra: Extra, where: str, name: str, value: Any, words: str
) -> None:
    config = config_for(model, extra)
    object.__setattr__(getattr(config, where) if where else config, name, value)
    with pytest.raises(UnsupportedModelError, match=words):
        make(config)


def test_a_commit_of_the_config_alone_does_not_name_the_weights() -> None:
    config = SimpleNamespace(_commit_hash="0" * 40)
    model = SimpleNamespace(model="someone/model", model_weights="", hf_config=config, hf_config_path=None)
    assert weights_fingerprint(model) == "hub:" + "0" * 40
    model.hf_config_path = "another/model"
    with pytest.raises(UnsupportedModelError, match="neither a commit of the hub nor weight files"):
        weights_fingerprint(model)


def groups(*specs: Any, **facts: Any) -> Any:
    made = cache_config(8, specs[0])
    made.kv_cache_groups = [KVCacheGroupSpec([f"layer {at}"], spec, **facts) for at, spec in enumerate(specs)]
    return made


WINDOW = SlidingWindowSpec(block_size=BLOCK, num_kv_heads=HEADS, head_size=DIM, dtype=torch.float32, sliding_window=32)
MLA = MLAAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=64, dtype=torch.float32)


@pytest.mark.parametrize(
    ("caches", "words"),
    [
        (groups(SPEC, WINDOW), "2 KV cache groups .FullAttentionSpec, SlidingWindowSpec"),
        (groups(WINDOW), "SlidingWindowSpec"),
        (groups(MLA), "MLAAttentionSpec"),
        (groups(dataclasses.replace(SPEC, kv_quant_mode=KVQuantMode.FP8_PER_TENSOR)), "quantised KV cache .FP8"),
        (groups(dataclasses.replace(SPEC, non_causal=True)), "non_causal=True"),
        (groups(dataclasses.replace(SPEC, page_size_padded=1 << 20)), "page_size_padded=1048576"),
        (groups(dataclasses.replace(SPEC, tokens_per_state=2)), "tokens_per_state=2"),
        (groups(SPEC, is_eagle_group=True), "is_eagle_group=True"),
        (groups(SPEC, enable_kv_transfer=False), "enable_kv_transfer=False"),
    ],
)
def test_groups_that_are_not_understood(model: Path, extra: Extra, caches: Any, words: str) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        make(config_for(model, extra), caches)


def test_blocks_that_are_hashed_in_pieces(model: Path, extra: Extra) -> None:
    caches = cache_config(8)
    caches.hash_block_size = 8
    with pytest.raises(UnsupportedModelError, match="blocks of 16 tokens, hashed in pieces of 8"):
        make(config_for(model, extra), caches)


# -- options -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({}, "path is None; give the folder"),
        ({"path": []}, "path is .."),
        ({"path": 3}, "path is 3"),
        ({"path": "/kv", "dram": "1GiB"}, "unknown key 'dram'; known: path, dram_bytes, ssd_bytes, tenant, read_only"),
        ({"path": "/kv", "ssd_bytes": "much"}, "ssd_bytes: 'much'"),
        ({"path": "/kv", "tenant": 3}, "tenant must be text"),
        ({"path": "/kv", "read_only": "yes"}, "read_only must be true or false"),
    ],
)
def test_options_that_cannot_work(extra: Extra, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_options(extra)


def test_options_that_can() -> None:
    options = read_options({"path": ["/a", "/b"], "dram_bytes": "3GiB", "ssd_bytes": 1000})
    assert options.paths == (Path("/a"), Path("/b"))
    assert (options.dram_nbytes, options.ssd_nbytes, options.tenant, options.read_only) == (3 << 30, 1000, "", False)


def parallel(**facts: Any) -> Any:
    plain = {
        "tensor_parallel_size": 2, "pipeline_parallel_size": 3, "world_size": 6, "nnodes": 1,
        "data_parallel_size_local": 1, "data_parallel_index": 0,
    }  # fmt: skip
    return SimpleNamespace(**{**plain, **facts})


def test_ranks_have_partitions_of_their_own_and_a_share_of_the_host() -> None:
    places = [place_of(parallel(), rank=rank) for rank in range(6)]
    assert [(one.pipeline_rank, one.tensor_rank) for one in places] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
    assert len({one.partition for one in places}) == 6
    assert {one.ranks_on_host for one in places} == {6}
    assert place_of(parallel(nnodes=2), rank=0).ranks_on_host == 3
    assert place_of(parallel(data_parallel_index=1), rank=0).partition not in {one.partition for one in places}


def test_a_second_engine_on_one_path(model: Path, extra: Extra) -> None:
    with machine(model, extra), pytest.raises(StoreLockedError, match='"read_only": true'), machine(model, extra):
        pass


def test_a_second_engine_in_one_process_gets_no_connector_of_another(model: Path, extra: Extra) -> None:
    """vLLM keeps one connector for each process, and hands it to whatever engine comes next."""
    with machine(model, extra) as engine, pytest.raises(ConfigError, match="shut that one down"):
        engine.worker.register_kv_caches({})


def test_dram_for_fewer_than_a_few_blocks(model: Path, extra: Extra) -> None:
    refused = pytest.raises(ConfigError, match=r"dram_bytes: 8192 B over 1 rank.s. are 2 blocks of 3072 B")
    with refused, machine(model, {**extra, "dram_bytes": 8192}):
        pass


@pytest.mark.parametrize("version", ["0.31.4", "0.33.0", "1.32.0", "0.320.1"])
def test_other_versions_of_vllm(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: version)
    with pytest.raises(MissingDependencyError, match=f"vLLM {version} is installed, kvterrace supports ==0.32"):
        versions.check_versions()


# -- pages -------------------------------------------------------------------------------------------------------------


def test_pages_are_the_engines_own_memory_in_whatever_order_of_axes() -> None:
    caches, blocks = cache_config(6), 6
    names = caches.kv_cache_groups[0].layer_names
    raw = torch.arange(LAYERS * blocks * HEADS * BLOCK * 2 * DIM, dtype=torch.int32).view(torch.float32)
    plain = raw.view(LAYERS, blocks, HEADS, BLOCK, 2 * DIM)
    per_block = plain.numel() // LAYERS // blocks
    forms = {
        "by layer": plain,
        "tokens before heads": raw.view(LAYERS, blocks, BLOCK, HEADS, 2 * DIM).transpose(2, 3),
        "by block": raw.view(blocks, LAYERS, HEADS, BLOCK, 2 * DIM).transpose(0, 1),
    }
    geometries = set()
    for name, form in forms.items():
        pages = pages_of({layer: form[at] for at, layer in enumerate(names)}, caches)
        geometries.add(pages.geometry)
        assert pages.blocks == blocks and len(pages.parts) == LAYERS
        for layer in range(LAYERS):
            for block in range(blocks):
                first = (block * LAYERS + layer if name == "by block" else layer * blocks + block) * per_block
                want = torch.arange(first, first + per_block, dtype=torch.int32).numpy().tobytes()
                assert pages.parts[layer][block].tobytes() == want
    assert len(geometries) == 2  # blocks of several layers side by side hold the same pages as blocks of one
    plain[1, 2] = 7.0
    assert pages_of({layer: plain[at] for at, layer in enumerate(names)}, caches).parts[1][2].tobytes() == (
        torch.full((per_block,), 7.0).numpy().tobytes()
    )


def test_a_kernel_that_sees_a_block_as_several_rows() -> None:
    caches = cache_config(3)
    names = caches.kv_cache_groups[0].layer_names
    raw = torch.arange(LAYERS * 6 * HEADS * 8 * 2 * DIM, dtype=torch.float32).view(LAYERS, 6, HEADS, 8, 2 * DIM)
    pages = pages_of({layer: raw[at] for at, layer in enumerate(names)}, caches)
    assert pages.blocks == 3
    assert pages.parts[2][1].tobytes() == raw[2, 2:4].contiguous().numpy().tobytes()


def test_bfloat16_pages() -> None:
    caches = cache_config(2)
    names = caches.kv_cache_groups[0].layer_names
    raw = torch.randn(LAYERS, 2, HEADS, BLOCK, 2 * DIM, dtype=torch.bfloat16)
    pages = pages_of({layer: raw[at] for at, layer in enumerate(names)}, caches)
    assert pages.parts[0][1].tobytes() == raw[0, 1].view(torch.int16).numpy().tobytes()


def test_pages_that_are_not_understood() -> None:
    caches = cache_config(6)
    names = caches.kv_cache_groups[0].layer_names
    heads_first = torch.zeros(LAYERS, HEADS, 6, BLOCK, 2 * DIM).transpose(1, 2)
    gaps = torch.zeros(LAYERS, 6, HEADS, BLOCK, 2 * DIM + 1)[..., :-1]
    for form in (heads_first, gaps):
        with pytest.raises(UnsupportedModelError, match="not one piece of memory"):
            pages_of({layer: form[at] for at, layer in enumerate(names)}, caches)
    good = torch.zeros(LAYERS, 6, HEADS, BLOCK, 2 * DIM)
    with pytest.raises(UnsupportedModelError, match="layers without a cache"):
        pages_of({layer: good[at] for at, layer in enumerate(names[:-1])}, caches)
    with pytest.raises(UnsupportedModelError, match="5 rows for 6 blocks"):
        pages_of({layer: good[at][:5] for at, layer in enumerate(names)}, caches)
    with pytest.raises(UnsupportedModelError, match="on or of list"):
        pages_of({layer: [good[at]] for at, layer in enumerate(names)}, caches)


def test_ranks_share_what_a_drive_may_be_written_in_a_day(tmp_path: Path) -> None:
    options = read_options({"path": str(tmp_path / "kv"), "dram_bytes": "16MiB", "ssd_bytes": "64MiB"})
    daily = []
    for ranks in (1, 4):
        with _open(options, f"r{ranks}", ranks, 4096) as store:
            daily.append(store.stats().ssd_daily_write_nbytes)
    assert daily[0] == default_write_budget([tmp_path]) and daily[1] == daily[0] // 4
