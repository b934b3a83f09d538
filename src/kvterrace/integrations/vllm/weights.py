"""Which weights an engine has: a hub commit, or a hash of the files that it read.

Weights that change while the engine runs (`update_weights`, `reload_weights`, sleep) are seen by `watch_weights`: what
they change to is known to nobody after a restart, so KV computed with them goes into namespaces that no other process
makes.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from kvterrace.errors import UnsupportedModelError
from kvterrace.integrations.vllm.watching import watch

__all__ = ["files_digest", "watch_weights", "weights_fingerprint"]

_COMMIT = re.compile(r"[0-9a-f]{40}")
_SUFFIXES = frozenset([".safetensors", ".bin", ".pt", ".pth", ".gguf"])
_HASH_THREADS = 4
_CHUNK_NBYTES = 4 << 20

#: Methods of vLLM's worker that change weights in place.
_CHANGING = (
    "load_model",
    "reload_weights",
    "reset_weights",
    "update_weights",
    "start_weight_update",
    "finish_weight_update",
    "sleep",
    "wake_up",
    "discard",
)


def weights_fingerprint(model_config: Any) -> str:
    """Names the weights of a model. Blocks: hashes files where there is no commit, about 1 GB/s a thread.

    Raises:
        UnsupportedModelError: they lie neither in a folder nor in the cache of the hub.
    """
    if model_config.model_weights:
        raise UnsupportedModelError(
            f"weights at {model_config.model_weights}: they cannot be told from others; give a folder"
        )
    path = Path(model_config.model)
    commit: str | None = None
    if path.is_dir():
        commit = _commit_of(path)
    elif not model_config.hf_config_path:  # with it, the config comes from elsewhere, and so does its commit
        commit = getattr(model_config.hf_config, "_commit_hash", None)
    if isinstance(commit, str) and _COMMIT.fullmatch(commit):
        return f"hub:{commit}"
    if path.is_file():
        return f"sha256:{files_digest([path])}"
    files = [each for each in sorted(path.glob("**/*")) if each.suffix in _SUFFIXES] if path.is_dir() else []
    if not files:
        raise UnsupportedModelError(
            f"model {model_config.model}: neither a commit of the hub nor weight files in a folder; give such a folder"
        )
    return f"sha256:{files_digest(files)}"


def _commit_of(folder: Path) -> str | None:
    """The commit of a folder in the hub's cache, `models--*/snapshots/<commit>`."""
    folder = folder.absolute()
    return folder.name if folder.parent.name == "snapshots" and _COMMIT.fullmatch(folder.name) else None


def files_digest(files: list[Path]) -> str:
    """SHA-256 over names and contents, as hex. Blocks. Raises OSError."""
    whole = hashlib.sha256(b"kvterrace/files/1\0")
    with ThreadPoolExecutor(_HASH_THREADS, thread_name_prefix="kvterrace-hash") as pool:
        for path, digest in zip(files, pool.map(_file_digest, files), strict=True):
            whole.update(path.name.encode() + b"\0" + digest)
    return whole.hexdigest()


def _file_digest(path: Path) -> bytes:
    hashed, buffer = hashlib.sha256(), bytearray(_CHUNK_NBYTES)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            hashed.update(memoryview(buffer)[:count])
    return hashed.digest()


def watch_weights(
    worker_classes: tuple[type, ...], vllm_config: Any, on_change: Callable[[str], None]
) -> Callable[[], None]:
    """Have `on_change` told, with the method's name, before any method of a worker of this engine that changes weights
    runs: on the worker's thread, between steps. vLLM tells a connector of no such change.

    Returns:
        Ends it.
    """

    def before(worker: Any, name: str) -> None:
        of = getattr(worker, "vllm_config", None)
        if of is None or of is vllm_config:  # else of another engine in this process
            on_change(name)

    return watch(worker_classes, _CHANGING, before=before)
