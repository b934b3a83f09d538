"""When may KV of one engine stand in for KV of another? What decides the numbers, put into a `Namespace` for each rank.

K and V of a token come from the weights (`weights`), the config, the attention kernel and how it lays a page out, the
versions of torch and vLLM, the device and its instruction set, and how the model is cut over ranks. Not in it: the
number of threads, and how a batch was cut into steps. They can move the last bits, too, but nobody recomputes for them.
"""

from __future__ import annotations

import hashlib
import json
from importlib import metadata
from typing import Any

import torch

from kvterrace.integrations.vllm.options import Place
from kvterrace.integrations.vllm.pages import Pages
from kvterrace.integrations.vllm.versions import vllm_version
from kvterrace.keys import KeyChain, Namespace
from kvterrace.layout import KVLayout

__all__ = ["namespace_for_rank", "rank_chain", "with_epoch"]

#: Config fields that name things or steer sampling; every other one is taken to change the numbers.
_INERT_FIELDS = frozenset(
    [
        "_name_or_path",
        "architectures",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "transformers_version",
        "use_cache",
    ]
)


def namespace_for_rank(
    vllm_config: Any, spec: Any, pages: Pages, place: Place, *, fingerprint: str, tenant: str
) -> Namespace:
    """The namespace of the KV on one rank."""
    layout = KVLayout(
        layers=len(pages.parts),
        kv_heads=spec.num_kv_heads,
        head_dim=spec.head_size + spec.head_size_v,
        dtype=str(spec.dtype).removeprefix("torch."),
        block_tokens=spec.block_size,
        parts_per_layer=1,
        order="vllm",
        tp_rank=place.tensor_rank,
        tp_size=place.tensor_size,
    )
    numerics = {
        "engine": "vllm",
        "vllm": vllm_version(),
        "torch": metadata.version("torch"),
        "device": vllm_config.device_config.device_type,
        "device_kind": torch.backends.cpu.get_cpu_capability(),
        "attention": attention_kinds(vllm_config),
        "pages": pages.geometry,
        "dtype": str(vllm_config.model_config.dtype),
        "quantization": str(vllm_config.model_config.quantization),
        "implementation": vllm_config.model_config.architecture,
        "compiled": str(vllm_config.compilation_config.mode),
        "matmul_precision": torch.get_float32_matmul_precision(),
        "config": _config_digest(vllm_config.model_config),
        "pipeline": [place.pipeline_rank, place.pipeline_size],
        "windows": [spec.sliding_window, spec.attention_chunk_size],
    }
    if _needs_transformers(vllm_config.model_config):
        numerics["transformers"] = metadata.version("transformers")
    if _has_long_rope(vllm_config.model_config):
        model = vllm_config.model_config  # as asked for, too: vLLM may fit it to its memory after it has made the model
        numerics["longest"] = [model.max_model_len, getattr(model, "original_max_model_len", None)]
    text = json.dumps(numerics, sort_keys=True, separators=(",", ":"))
    return Namespace(model=fingerprint, layout=layout, tenant=tenant, numerics=text)


def attention_kinds(vllm_config: Any) -> list[str]:
    """Which kernels the layers use, as far as their objects say."""
    kinds = set()
    for layer in vllm_config.compilation_config.static_forward_context.values():
        backend, impl = getattr(layer, "attn_backend", None), getattr(layer, "impl", None)
        if impl is not None:
            name = backend.__name__ if isinstance(backend, type) else ""
            kinds.add(f"{name}/{type(impl).__name__}")
    return sorted(kinds)


def _config_digest(model_config: Any) -> str:
    fields = {key: value for key, value in model_config.hf_config.to_dict().items() if key not in _INERT_FIELDS}
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _needs_transformers(model_config: Any) -> bool:
    """Whether Transformers computes KV, or prepares the images that it is computed from."""
    return bool(model_config.is_multimodal_model) or str(model_config.architecture).startswith("Transformers")


def _has_long_rope(model_config: Any) -> bool:
    """Whether vLLM chooses between short and long factors of the rotary embedding by the longest context it serves."""
    return "longrope" in json.dumps(model_config.hf_config.to_dict(), default=str)


def with_epoch(namespace: Namespace, epoch: str) -> Namespace:
    """The namespace of KV computed after the weights, or the cache, were changed in place; "" is as loaded.

    `epoch` is random text that no other process makes: nobody could tell its weights from others.
    """
    if not epoch:
        return namespace
    return Namespace(
        model=namespace.model,
        layout=namespace.layout,
        epoch=1,
        numerics=f"{namespace.numerics} {epoch}",
        tenant=namespace.tenant,
    )


def rank_chain(namespace: Namespace, keys: bytes, made_in: bytes) -> KeyChain:
    """The chain of one rank, from keys that the scheduler made in the namespace of digest `made_in` (its first rank's).

    A rank of another namespace has other keys: SHA-256 over its namespace and the scheduler's key.
    """
    root = namespace.root_key()
    if namespace.digest == made_in:
        return KeyChain(namespace, root, keys)
    head = b"kvterrace/rank/1\0" + namespace.digest
    mine = (hashlib.sha256(head + keys[at : at + 32]).digest() for at in range(0, len(keys), 32))
    return KeyChain(namespace, root, b"".join(mine))
