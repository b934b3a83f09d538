"""What of vLLM's configurations this adapter understands. Everything else is refused at start-up, with the reason."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vllm.v1.kv_cache_interface import FullAttentionSpec, KVQuantMode

from kvterrace.errors import ConfigError, UnsupportedModelError

__all__ = ["check_engine", "check_groups"]

#: Load formats that read weights from files which can be fingerprinted.
_FILE_FORMATS = frozenset(["auto", "hf", "safetensors", "pt", "mistral", "fastsafetensors"])


def check_engine(vllm_config: Any) -> None:
    """Raises ConfigError or UnsupportedModelError for an engine whose KV could not be kept rightly."""
    transfer = vllm_config.kv_transfer_config
    if transfer.kv_load_failure_policy != "recompute":
        raise ConfigError(
            f"kv_load_failure_policy is {transfer.kv_load_failure_policy!r}: a block that cannot be had would end the "
            'request in an error; set "kv_load_failure_policy": "recompute"'
        )
    if transfer.kv_role != "kv_both":
        raise ConfigError(f'kv_role is {transfer.kv_role!r}: kvterrace saves and loads; set "kv_role": "kv_both"')
    if not vllm_config.cache_config.enable_prefix_caching:
        raise ConfigError(
            "prefix caching is off: vLLM turns it off for models whose KV is not that of the tokens before it alone; "
            "if you turned it off, leave out --no-enable-prefix-caching"
        )
    for refusal in _refusals(vllm_config):
        raise UnsupportedModelError(f"kvterrace cannot keep the KV of this engine: {refusal}")


def _refusals(vllm_config: Any) -> Iterator[str]:
    model, parallel, cache = vllm_config.model_config, vllm_config.parallel_config, vllm_config.cache_config
    if vllm_config.device_config.device_type != "cpu":
        yield f"device {vllm_config.device_config.device_type}: this adapter was run on CPUs only, as yet"
    if vllm_config.speculative_config is not None:
        yield "speculative decoding: a drafter's KV of a prefix may depend on the token after it"
    if parallel.decode_context_parallel_size > 1 or getattr(parallel, "prefill_context_parallel_size", 1) > 1:
        yield "context parallelism: a rank then holds parts of a block's tokens"
    if parallel.nnodes > 1:
        yield "ranks on several hosts: the scheduler asks its workers by sockets of one host"
    if model.is_encoder_decoder:
        yield "an encoder-decoder model"
    if getattr(model, "is_diffusion", False):
        yield "a diffusion model: it goes back over tokens"
    if getattr(model, "is_mm_prefix_lm", False):
        yield "attention in both directions over images: KV of a prefix depends on what comes after"
    if getattr(cache, "calculate_kv_scales", False):
        yield "calculate_kv_scales: the scale of a block is not in its key"
    if cache.kv_sharing_fast_prefill:
        yield "kv_sharing_fast_prefill: not all layers have the KV of a prefix"
    if model.enable_sleep_mode and model.sleep_preserve_parameter_names:
        yield "sleep_preserve_parameter_names: weights may change in part"
    if vllm_config.load_config.load_format not in _FILE_FORMATS:
        yield (
            f"load_format {vllm_config.load_config.load_format!r}: the weights cannot be told from others; known: "
            + ", ".join(sorted(_FILE_FORMATS))
        )


def check_groups(kv_cache_config: Any) -> Any:
    """The spec of the one KV cache group. Raises UnsupportedModelError for groups that are not understood."""
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        kinds = ", ".join(type(group.kv_cache_spec).__name__ for group in groups)
        raise UnsupportedModelError(
            f"{len(groups)} KV cache groups ({kinds}): kvterrace keeps one; leave out "
            "--no-disable-hybrid-kv-cache-manager, so that vLLM makes them one where it can"
        )
    group, spec = groups[0], groups[0].kv_cache_spec
    if type(spec) is not FullAttentionSpec:
        raise UnsupportedModelError(
            f"a KV cache group of {type(spec).__name__}: kvterrace understands FullAttentionSpec, KV of all tokens"
        )
    if spec.kv_quant_mode is not KVQuantMode.NONE:
        raise UnsupportedModelError(f"a quantised KV cache ({spec.kv_quant_mode.name}): set kv_cache_dtype to auto")
    odd = {
        "non_causal": spec.non_causal,
        "page_size_padded": spec.page_size_padded,
        "state_content_bytes": spec.state_content_bytes,
        "num_head_slots": spec.num_head_slots,
        "is_eagle_group": group.is_eagle_group,
        "host_resident": group.host_resident,
    }
    strange = [f"{name}={value}" for name, value in odd.items() if value not in (None, False)]
    if spec.tokens_per_state != 1:
        strange.append(f"tokens_per_state={spec.tokens_per_state}")
    if not group.enable_kv_transfer:
        strange.append("enable_kv_transfer=False")
    if strange:
        raise UnsupportedModelError(f"a KV cache group with {', '.join(strange)}: not understood")
    if kv_cache_config.hash_block_size not in (None, spec.block_size):
        raise UnsupportedModelError(
            f"blocks of {spec.block_size} tokens, hashed in pieces of {kv_cache_config.hash_block_size}: not understood"
        )
    return spec
