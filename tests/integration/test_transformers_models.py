"""Which models are understood, which are refused, and with which words."""

from __future__ import annotations

from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from kvterrace.demo import DemoError
from kvterrace.demo.model import convert, gguf_folder
from kvterrace.errors import LayoutError, UnsupportedModelError
from kvterrace.integrations import MissingDependencyError
from kvterrace.integrations.transformers import versions
from kvterrace.layout import KVLayout
from kvterrace.opening import open_store

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from kvterrace.integrations.transformers import (  # noqa: E402
    PrefixCache,
    layout_from_config,
    layout_from_model,
    namespace_for_model,
    weights_fingerprint,
)

pytestmark = pytest.mark.integration

BASE = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


def build(config: Any) -> Any:
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def test_layout_of_a_grouped_query_model() -> None:
    config = transformers.LlamaConfig(**BASE)
    want = KVLayout(layers=2, kv_heads=2, head_dim=16, dtype="float32", block_tokens=64)
    assert layout_from_config(config, dtype=torch.float32, block_tokens=64) == want
    assert layout_from_model(build(config), block_tokens=64) == want
    assert want.nbytes_per_token == 2 * 2 * 16 * 4 * 2
    half = layout_from_model(build(config).to(torch.bfloat16), block_tokens=64)
    assert half == layout_from_config(config, dtype="bfloat16", block_tokens=64)
    with pytest.raises(LayoutError):
        layout_from_config(config, dtype="float12", block_tokens=64)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: transformers.MistralConfig(**BASE, sliding_window=32), "mistral: sliding_window=32"),
        (
            lambda: transformers.Gemma3TextConfig(**BASE, head_dim=16, sliding_window=32),
            "gemma3_text: layer_types has 'sliding_attention'",
        ),
        (lambda: transformers.GptOssConfig(**BASE), "gpt_oss: layer_types has 'sliding_attention'"),
        (lambda: transformers.Llama4TextConfig(**BASE), "llama4_text: layer_types has 'chunked_attention'"),
        (lambda: transformers.JambaConfig(**BASE), "jamba: layer_types has 'linear_attention'"),
        (
            lambda: transformers.MambaConfig(vocab_size=128, hidden_size=64, num_hidden_layers=2, state_size=4),
            "mamba: layer_types has 'linear_attention'",
        ),
        (lambda: transformers.FalconH1Config(**BASE), "falcon_h1: layer_types has 'hybrid'"),
        (lambda: transformers.T5Config(vocab_size=128, d_model=64, num_layers=2), "t5: is_encoder_decoder=True"),
        (lambda: transformers.BertConfig(vocab_size=128, hidden_size=64), "bert: is_decoder=False"),
        (
            lambda: transformers.LlamaConfig(
                **BASE, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
            ),
            "llama: rope_parameters.rope_type='dynamic'",
        ),
        (lambda: transformers.RwkvConfig(vocab_size=128, hidden_size=64), "rwkv: no single num_attention_heads"),
        (lambda: transformers.LlavaConfig(), "llava: text_config"),
    ],
    ids=lambda value: value.split(":")[0] if isinstance(value, str) else "",
)
def test_other_kinds_of_cache_are_refused(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        layout_from_config(make(), dtype="float32", block_tokens=16)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_sliding_model_is_refused_before_it_is_run() -> None:
    model = build(transformers.MistralConfig(**BASE, sliding_window=32))
    with pytest.raises(UnsupportedModelError, match="mistral: sliding_window=32"):
        layout_from_model(model, block_tokens=16)


def test_a_lying_config_is_found_out_by_the_cache_that_the_model_makes() -> None:
    model = build(transformers.MistralConfig(**BASE, sliding_window=32))
    # Whatever the config says, the layers of the cache are what counts.
    real = transformers.DynamicCache
    model.config.use_sliding_window = False
    with pytest.raises(UnsupportedModelError, match="DynamicSlidingWindowLayer"):
        layout_from_model(model, block_tokens=16)
    assert type(real(config=model.config).layers[0]).__name__ == "DynamicSlidingWindowLayer"


def test_training_mode_adapters_and_static_caches_are_refused() -> None:
    model = build(transformers.LlamaConfig(**BASE))
    model.train()
    with pytest.raises(UnsupportedModelError, match="training mode"):
        layout_from_model(model, block_tokens=16)
    model.eval()
    model.generation_config.cache_implementation = "static"
    with pytest.raises(UnsupportedModelError, match="cache_implementation='static'"):
        layout_from_model(model, block_tokens=16)
    model.generation_config.cache_implementation = None
    model.peft_config = {}
    with pytest.raises(UnsupportedModelError, match="merge it first"):
        layout_from_model(model, block_tokens=16)


def test_the_fingerprint_follows_every_weight_and_buffer() -> None:
    config = transformers.LlamaConfig(**BASE)
    model = build(config)
    told: list[tuple[int, int]] = []
    first = weights_fingerprint(model, on_progress=lambda done, total: told.append((done, total)))
    assert first.startswith("sha256:")
    assert told[-1][0] == told[-1][1] > 0
    assert weights_fingerprint(build(config)) == first
    assert weights_fingerprint(build(config).to(torch.bfloat16)) != first
    for tensor in [*model.parameters(), *model.buffers()]:
        with torch.no_grad():
            tensor.view(-1)[0] += 0.5
            changed = weights_fingerprint(model)
            tensor.view(-1)[0] -= 0.5
        assert changed != first
    meta = build(config).to("meta")
    with pytest.raises(UnsupportedModelError, match="pass fingerprint="):
        weights_fingerprint(meta)


def test_the_namespace_says_what_decides_the_numbers() -> None:
    model = build(transformers.LlamaConfig(**BASE))
    layout = layout_from_model(model, block_tokens=16)
    space = namespace_for_model(model, layout, chunk_tokens=64, fingerprint="commit")
    assert space.model == "commit"
    for word in ("transformers", "torch", "attention", "sdpa", "device", "matmul_precision", "chunk_tokens"):
        assert word in space.numerics


@pytest.mark.parametrize("spread", [0.02, 0.3, 1.0])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_rounding_is_not_taken_for_a_foreign_cache(dtype: str, spread: float) -> None:
    # Wide weights: a deep model in which rounding grows from layer to layer.
    config = transformers.LlamaConfig(**{**BASE, "num_hidden_layers": 12}, initializer_range=spread)
    layout = layout_from_model(build(config).to(getattr(torch, dtype)), block_tokens=16)
    assert (layout.layers, layout.dtype) == (12, dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_model_that_does_not_go_on_from_its_cache_is_refused(dtype: str) -> None:
    def from_zero(_module: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        places = options["position_ids"]
        return arguments, {**options, "position_ids": places - places[:, :1]}

    model = build(transformers.LlamaConfig(**BASE)).to(getattr(torch, dtype))
    model.model.rotary_emb.register_forward_pre_hook(from_zero, with_kwargs=True)
    with pytest.raises(UnsupportedModelError, match="changes K and V of the first layer"):
        layout_from_model(model, block_tokens=16)

    # A state beside the cache: K and V agree, logits do not.
    model = build(transformers.LlamaConfig(**BASE)).to(getattr(torch, dtype))
    model.model.norm.register_forward_hook(lambda _module, _arguments, out: out + 2 * out.cumsum(1))
    with pytest.raises(UnsupportedModelError, match="changes the logits by"):
        layout_from_model(model, block_tokens=16)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_real_model_restores_bit_equal(dtype: str, tmp_path: Path) -> None:
    try:
        gguf_folder()
    except DemoError as error:
        pytest.skip(str(error))
    model = transformers.AutoModelForCausalLM.from_pretrained(convert(), dtype=getattr(torch, dtype)).eval()
    ids = [(7919 * number + 13) % model.config.vocab_size for number in range(300)]
    with open_store(tmp_path / "kv", dram_bytes="256MiB", ssd_bytes="256MiB") as store:
        prefix = PrefixCache(store, model, chunk_tokens=64, fingerprint="smollm2")
        cache, _ = prefix.restore(ids)
        want = prefix.prefill(ids, cache)
        assert prefix.store(ids, cache).stored_blocks == 4
        again, report = prefix.restore(ids)
        assert report.restored_tokens == 256
        assert torch.equal(prefix.prefill(ids, again), want)


@pytest.mark.parametrize("version", ["4.57.1", "5.15.9", "6.0.0"])
def test_other_versions_are_refused_with_the_range(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: version if name == "transformers" else "2.13.0")
    with pytest.raises(MissingDependencyError, match=r">=5\.16,<6.*pip install 'kvterrace\[transformers\]'"):
        versions.check_versions()
    for good in ("5.16.0", "5.24.0", "5.99.0.dev0"):
        monkeypatch.setattr(metadata, "version", lambda _name, good=good: good)
        versions.check_versions()
