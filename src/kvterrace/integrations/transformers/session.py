"""A model folder, a prompt, an answer: what the command line and the demo do with a `PrefixCache`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from kvterrace.errors import ConfigError
from kvterrace.integrations.transformers.model import check_config, layout_from_model
from kvterrace.integrations.transformers.prefix import PrefixCache
from kvterrace.integrations.transformers.report import RestoreReport

__all__ = [
    "Generated",
    "check_context",
    "encode_prompt",
    "end_tokens",
    "generate",
    "load_config",
    "load_model",
    "load_tokenizer",
]

_REASON_CHARS = 300


def load_config(folder: Path) -> Any:
    """The config of a model folder. Raises ConfigError (no model), UnsupportedModelError (not understood)."""
    _quiet()
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"{folder} is no model folder (it has no config.json): give the folder that save_pretrained or "
            "`hf download` wrote"
        )
    config = _load(folder, "config.json", AutoConfig.from_pretrained)
    check_config(config)
    return config


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of a model folder. Raises ConfigError."""
    tokenizer = _load(folder, "tokenizer", AutoTokenizer.from_pretrained)
    try:
        # Some damage shows only in use; and without its files, some classes make a tokenizer that knows no text.
        known = bool(tokenizer("a")["input_ids"]) and len(tokenizer) > 1
    except Exception as error:
        raise _not_loaded(folder, "tokenizer", error) from error
    if not known:
        raise _not_loaded(folder, "tokenizer", ValueError("it knows no text"))
    return tokenizer


def load_model(folder: Path, dtype: str = "auto") -> Any:
    """The causal language model of a folder, in eval mode, on the GPU where there is one.

    Args:
        dtype: "float32", "bfloat16", "float16", or "auto": as saved on a GPU; float32 on a CPU, where it is faster.

    Raises:
        ConfigError: the folder does not load.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if dtype == "auto" and device == "cpu":
        dtype = "float32"
    return _load(folder, "model", AutoModelForCausalLM.from_pretrained, dtype=dtype).to(device).eval()


def check_model(model: Any) -> None:
    """Try whether the model caches in a way that is understood, by a few short forward passes; `PrefixCache` asks the
    same of it. Raises UnsupportedModelError.
    """
    layout_from_model(model, block_tokens=1)


def encode_prompt(tokenizer: Any, text: str, question: str | None) -> list[int]:
    """Token ids of `text` with `question` after it, so that questions on one text share its KV.

    With a question and a chat template: one user message, and the start of the answer. With a question and no template:
    `Question: ... Answer:`. Without a question: the text as it is, to be continued.
    """
    if question is None:
        return [int(token) for token in tokenizer(text)["input_ids"]]
    body = f"{text}\n\n{question}"
    if getattr(tokenizer, "chat_template", None):
        message = [{"role": "user", "content": body}]
        shown = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
        return [int(token) for token in tokenizer(shown, add_special_tokens=False)["input_ids"]]
    return [int(token) for token in tokenizer(f"{text}\n\nQuestion: {question}\nAnswer:")["input_ids"]]


def check_context(config: Any, tokens: int, max_new_tokens: int) -> None:
    """Raises ConfigError where prompt and answer exceed the model's context."""
    limit = getattr(config, "max_position_embeddings", None)
    if isinstance(limit, int) and tokens + max_new_tokens > limit:
        raise ConfigError(
            f"the prompt has {tokens} tokens; with {max_new_tokens} new ones it exceeds the model's context of "
            f"{limit}: "
            "shorten the prompt or lower --max-new-tokens"
        )


@dataclass(frozen=True, slots=True)
class Generated:
    """An answer and how it came about.

    Attributes:
        tokens: the answer, without the end token's successors; `cache` holds prompt and answer less the last token.
        ttft_s: seconds from the handed-over token ids to the first token.
        decode_s: seconds for the tokens after the first.
    """

    tokens: list[int]
    restored: RestoreReport
    cache: Any
    ttft_s: float
    decode_s: float


def generate(
    prefix: PrefixCache,
    model: Any,
    ids: Sequence[int],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
    on_restored: Callable[[RestoreReport], None] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
    on_token: Callable[[int, torch.Tensor], None] | None = None,
    on_prefilled: Callable[[Any], None] | None = None,
) -> Generated:
    """Restore what the store has of `ids`, compute the rest, and decode up to an end token. Stores nothing by itself.

    Args:
        temperature: 0 takes the likeliest token; above, samples with `seed`.
        on_restored, on_progress, on_token: told as it goes: the restore, (tokens in the cache, of all), each new token
            with the logits `[vocabulary]` that it was taken from.
        on_prefilled: given the cache when it holds the whole prompt and the first token was told: the time to store it.
    """
    began_s = time.monotonic()
    cache, restored = prefix.restore([list(ids)], spare_tokens=max_new_tokens)
    if on_restored is not None:
        on_restored(restored)
    logits = prefix.prefill([list(ids)], cache, on_progress=on_progress)
    draw = torch.Generator().manual_seed(seed)
    ends = end_tokens(model)
    token = _pick(logits[0], temperature, draw)
    ttft_s = time.monotonic() - began_s
    answer = [token]
    if on_token is not None:
        on_token(token, logits[0])
    if on_prefilled is not None:
        on_prefilled(cache)
    decode_began_s = time.monotonic()
    while token not in ends and len(answer) < max_new_tokens:
        logits = prefix.step(torch.tensor([[token]], device=model.device), cache)
        token = _pick(logits[0], temperature, draw)
        answer.append(token)
        if on_token is not None:
            on_token(token, logits[0])
    return Generated(answer, restored, cache, ttft_s, decode_s=time.monotonic() - decode_began_s)


def _pick(logits: torch.Tensor, temperature: float, draw: torch.Generator) -> int:
    if temperature <= 0:
        return int(logits.argmax())
    chances = torch.softmax(logits.float().cpu() / temperature, dim=-1)
    return int(torch.multinomial(chances, 1, generator=draw))


def end_tokens(model: Any) -> frozenset[int]:
    """Ids that end an answer of `model`."""
    ends = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    if ends is None:
        ends = getattr(model.config, "eos_token_id", None)
    return frozenset() if ends is None else frozenset([ends] if isinstance(ends, int) else ends)


def _load(folder: Path, what: str, loader: Callable[..., Any], **options: Any) -> Any:
    _quiet()
    try:
        return loader(str(folder), local_files_only=True, **options)
    except Exception as error:  # each library has errors of its own over a file that is not what it should be
        raise _not_loaded(folder, what, error) from error


def _not_loaded(folder: Path, what: str, error: Exception) -> ConfigError:
    """One line for people: what, where, why, and what to do."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    reason = " ".join(lines[:2] if lines[0].endswith(":") else lines[:1]).rstrip(".")
    if "ignore_mismatched_sizes" in reason:
        reason = "its weights have other shapes than its config.json says"
    if isinstance(error, (KeyError, AttributeError, TypeError)):  # said in terms of code
        reason = f"{type(error).__name__}: {reason}"
    if what == "tokenizer":
        return ConfigError(
            f"cannot load the tokenizer: tokenizer files (tokenizer.json, tokenizer_config.json) are missing or "
            f"damaged in {folder}: {_cut(reason)}; copy them again from where the model came from"
        )
    advice = "check that the folder is a complete Transformers model"
    if what == "config.json":
        return ConfigError(f"cannot load the model in {folder}: config.json: {_cut(reason)}; {advice}")
    return ConfigError(f"cannot load the model in {folder}: {_cut(reason)}; {advice}")


def _cut(text: str) -> str:
    return text if len(text) <= _REASON_CHARS else f"{text[: _REASON_CHARS - 3]}..."


def _quiet() -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
