"""When may KV of one run stand in for KV of another? What decides the numbers, put into a `Namespace`.

K and V of a token come from: the weights and buffers as they are in memory (after casts, quantising, merged adapters;
RoPE frequencies are buffers); the config (norm eps, RoPE scale, ...); the attention kernel; the versions of torch and
Transformers; the device and its instruction set; the precision of float32 matrix products. All of these are in the
namespace. So is the grid of the prefill, since a matrix product of another shape may sum in another order (differences
of about 1e-4 were seen in float32).
Not in it: the number of threads and the batch size. They can move the last bits, too, but nobody recomputes for them.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from typing import Any

import torch

from kvterrace.errors import UnsupportedModelError
from kvterrace.integrations.transformers.versions import major_minor
from kvterrace.keys import Namespace
from kvterrace.layout import KVLayout

__all__ = ["namespace_for_model", "weights_fingerprint"]

# Config fields that name things or steer sampling and outputs; every other one is taken to change the numbers.
_INERT_FIELDS = frozenset(
    [
        "_name_or_path",
        "architectures",
        "bos_token_id",
        "chunk_size_feed_forward",
        "dtype",
        "eos_token_id",
        "id2label",
        "label2id",
        "num_labels",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "problem_type",
        "return_dict",
        "sep_token_id",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    ]
)

_HASH_THREADS = 4


def weights_fingerprint(model: Any, *, on_progress: Callable[[int, int], None] | None = None) -> str:
    """SHA-256 over every parameter and buffer that `model` holds: name, dtype, shape and bytes. Blocks.

    It hashes memory, not files: what counts is what the model computes with. About 1 GB/s a thread; call it once a
        process.

    Args:
        on_progress: called with (bytes done, bytes in all) from the calling thread.

    Raises:
        UnsupportedModelError: a tensor has no readable bytes (offloaded to `meta`, an opaque quantised type).
    """
    tensors = [*model.named_parameters(), *model.named_buffers()]
    total = sum(tensor.numel() * tensor.element_size() for _, tensor in tensors)
    whole = hashlib.sha256(b"kvterrace/weights/1\0")
    done = 0
    with ThreadPoolExecutor(_HASH_THREADS, thread_name_prefix="kvterrace-hash") as pool:
        for (name, tensor), digest in zip(tensors, pool.map(_tensor_digest, tensors), strict=True):
            head = json.dumps([name, str(tensor.dtype), list(tensor.shape)])
            whole.update(head.encode() + b"\0" + digest)
            done += tensor.numel() * tensor.element_size()
            if on_progress is not None:
                on_progress(done, total)
    return f"sha256:{whole.hexdigest()}"


def _tensor_digest(item: tuple[str, torch.Tensor]) -> bytes:
    name, tensor = item
    try:
        plain = tensor.detach().cpu().contiguous().reshape(-1)
        return hashlib.sha256(plain.view(torch.uint8).numpy().data).digest()
    except (RuntimeError, NotImplementedError, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise UnsupportedModelError(
            f"cannot read the bytes of {name} ({reason}): pass fingerprint=, a text that changes whenever the "
            "weights do"
        ) from error


def namespace_for_model(
    model: Any,
    layout: KVLayout,
    *,
    chunk_tokens: int,
    fingerprint: str | None = None,
    epoch: int = 0,
    tenant: str = "",
    on_progress: Callable[[int, int], None] | None = None,
) -> Namespace:
    """The namespace of `model`'s KV.

    Args:
        layout: from `layout_from_model`.
        chunk_tokens: grid of the prefill.
        fingerprint: names the weights where the caller knows them unchanged, e.g. a hub commit; None hashes them.
        epoch, tenant: see `Namespace`.
        on_progress: see `weights_fingerprint`.
    """
    weights = fingerprint or weights_fingerprint(model, on_progress=on_progress)
    return Namespace(model=weights, layout=layout, epoch=epoch, tenant=tenant, numerics=_numerics(model, chunk_tokens))


def _numerics(model: Any, chunk_tokens: int) -> str:
    device = model.device
    facts = {
        "engine": "transformers",
        "transformers": _version("transformers"),
        "torch": _version("torch"),
        "model_class": type(model).__name__,
        "compiled": hasattr(model, "_orig_mod"),
        "attention": str(getattr(model.config, "_attn_implementation", "")),
        "grouped_queries": os.environ.get("TRANSFORMERS_SDPA_FORCE_GQA", ""),
        "dtype": str(getattr(model, "dtype", "")),
        "device": device.type,
        "device_kind": _device_kind(device),
        "matmul_precision": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "config": _config_digest(model.config),
        "chunk_tokens": chunk_tokens,
    }
    return json.dumps(facts, sort_keys=True, separators=(",", ":"))


def _version(package: str) -> str:
    return ".".join(map(str, major_minor(metadata.version(package))))


def _device_kind(device: torch.device) -> str:
    if device.type == "cpu":
        return str(torch.backends.cpu.get_cpu_capability())
    if device.type == "cuda":
        return ".".join(map(str, torch.cuda.get_device_capability(device)))
    return ""


def _config_digest(config: Any) -> str:
    fields = {key: value for key, value in config.to_dict().items() if key not in _INERT_FIELDS}
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()
