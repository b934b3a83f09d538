"""One phase of the demo, in a process of its own: `python -m kvterrace.demo.phases PHASE WORK_DIR NAME`.

`WORK_DIR/spec.json` says what to do, `WORK_DIR/NAME.json` and `.npz` tell what came out; stdout carries progress, one
JSON object a line.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvterrace.demo import DemoError
from kvterrace.demo.model import convert
from kvterrace.errors import KVTerraceError

__all__ = ["PHASES", "QUESTIONS", "Spec"]

QUESTIONS = ("In one sentence, what does the assert statement do?", "Which keyword defines a function?")

# Multiples of this lie on the grid of the prefill in every phase.
_CHUNK_TOKENS = 512
_BLOCK_TOKENS = 64
_WARM_UP_TOKENS = (64, 16)


@dataclass(frozen=True, slots=True)
class Spec:
    """What all phases agree on. `salt` keeps this run's blocks apart from those of earlier runs on the same store."""

    store: str
    tokens: int
    new_tokens: int
    salt: str
    dram: str
    ssd: str


def prompts(tokenizer: Any, tokens: int) -> list[list[int]]:
    """Prompts with one prefix of `tokens` tokens (text of Python's own help topics) and a question each."""
    from pydoc_data.topics import topics  # type: ignore[import-not-found, unused-ignore]

    text = "\n\n".join(f"# {name}\n{topics[name]}" for name in sorted(topics))
    head = "<|im_start|>user\nAnswer from this text.\n\n"
    prefix = tokenizer(head + text, add_special_tokens=False)["input_ids"][:tokens]
    if len(prefix) < tokens:
        raise DemoError(f"the demo's text has only {len(prefix)} tokens: lower --tokens")
    tails = [f"\n\n{question}<|im_end|>\n<|im_start|>assistant\n" for question in QUESTIONS]
    return [[*prefix, *tokenizer(tail, add_special_tokens=False)["input_ids"]] for tail in tails]


def _load(spec: Spec) -> tuple[Any, list[list[int]], float]:
    from kvterrace.integrations.transformers import session

    _say("loading the model")
    began_s = time.monotonic()
    folder = convert()
    config = session.load_config(folder)
    asked = prompts(session.load_tokenizer(folder), spec.tokens)
    limit = int(config.max_position_embeddings)
    if max(map(len, asked)) + spec.new_tokens > limit:
        raise DemoError(f"{spec.tokens} tokens and a question exceed the model's context of {limit}: lower --tokens")
    return session.load_model(folder, "float32"), asked, time.monotonic() - began_s


def _warm_up(model: Any) -> None:
    """What a process pays once (threads, kernels, lazy imports), paid before any clock starts: in every phase alike."""
    import torch
    from transformers import DynamicCache

    from kvterrace.integrations.transformers import cache_argument

    cache = {cache_argument(model): DynamicCache(config=model.config)}
    with torch.no_grad():
        for tokens in _WARM_UP_TOKENS:
            model(input_ids=torch.ones(1, tokens, dtype=torch.long), use_cache=True, logits_to_keep=1, **cache)


def _convert(_spec: Spec, _work: Path, _name: str) -> dict[str, object]:
    _say("converting the model")
    return {"model": str(convert())}


def _reference(spec: Spec, work: Path, name: str) -> dict[str, object]:
    """Plain Transformers; no store, no `PrefixCache`. On the same grid, for the bits; and in one pass, which is how
    Transformers by itself computes a prompt, for the time."""
    import torch
    from transformers import DynamicCache

    from kvterrace.integrations.transformers import cache_argument, session

    model, asked, load_s = _load(spec)
    argument, ends = cache_argument(model), session.end_tokens(model)

    def step(ids: Sequence[int], cache: Any) -> Any:
        with torch.no_grad():
            taken = {argument: cache}
            return model(input_ids=torch.tensor([ids]), use_cache=True, logits_to_keep=1, **taken).logits[0, -1]

    def prefill(ids: Sequence[int], chunk_tokens: int, stage: str) -> tuple[Any, Any, float]:
        told = _progress(stage)
        began_s = time.monotonic()
        cache = DynamicCache(config=model.config)
        for start in range(0, len(ids), chunk_tokens):
            stop = min(len(ids), start + chunk_tokens)
            last = step(ids[start:stop], cache)
            told(stop, len(ids))
        last.argmax().item()
        return last, cache, time.monotonic() - began_s

    _warm_up(model)
    answers, logits, chunks_s, one_pass_s = [], {}, [], []
    for number, ids in enumerate(asked):
        last, cache, ttft_s = prefill(ids, _CHUNK_TOKENS, f"question {number + 1}, in chunks")
        chunks_s.append(ttft_s)
        seen, answer = [last], [int(last.argmax())]
        while answer[-1] not in ends and len(answer) < spec.new_tokens:
            last = step(answer[-1:], cache)
            seen.append(last)
            answer.append(int(last.argmax()))
        answers.append(answer)
        logits[f"q{number}"] = torch.stack(seen).numpy()
        del cache
        one_pass_s.append(prefill(ids, len(ids), f"question {number + 1}, in one pass")[2])
    np.savez(work / f"{name}.npz", **logits)
    return {
        "answers": answers,
        "ttft_chunks_s": chunks_s,
        "ttft_one_pass_s": one_pass_s,
        "load_s": load_s,
        "threads": torch.get_num_threads(),
    }


def _with_store(spec: Spec, work: Path, name: str) -> dict[str, object]:
    import torch

    from kvterrace.integrations.transformers import PrefixCache, session
    from kvterrace.opening import open_store

    model, asked, load_s = _load(spec)

    def ask(number: int) -> tuple[dict[str, object], Any]:
        # In a function of its own: the cache goes when it returns, and its memory is there for the next question.
        seen: list[Any] = []
        made = session.generate(
            prefix,
            model,
            asked[number],
            max_new_tokens=spec.new_tokens,
            on_progress=_progress(f"question {number + 1}"),
            on_token=lambda _token, row: seen.append(row),
        )
        kept = prefix.store([asked[number] + made.tokens], made.cache)
        told: dict[str, object] = {
            "answer": made.tokens,
            "ttft_s": made.ttft_s,
            "restore_s": made.restored.elapsed_s,
            "restored_tokens": made.restored.restored_tokens,
            "tiers": {tier.name: count for tier, count in made.restored.tier_tokens.items()},
            "restored_nbytes": made.restored.nbytes,
            "stored_nbytes": kept.nbytes,
            "store_s": kept.elapsed_s,
            "missed_blocks": kept.missed_blocks,
        }
        return told, torch.stack(seen).numpy()

    with open_store(spec.store, dram_bytes=spec.dram, ssd_bytes=spec.ssd) as store:
        _say("fingerprinting weights")
        began_s = time.monotonic()
        prefix = PrefixCache(
            store,
            model,
            block_tokens=_BLOCK_TOKENS,
            chunk_tokens=_CHUNK_TOKENS,
            salt=bytes.fromhex(spec.salt),
            reserve_tokens=max(map(len, asked)) + spec.new_tokens,
        )
        setup_s = time.monotonic() - began_s
        _warm_up(model)
        told = [ask(number) for number in range(len(asked))]
        _say("flushing to the SSD")
        store.flush()
        stats = store.stats()
        moved = {key: getattr(stats, key) for key in ("ssd_read_nbytes", "ssd_written_nbytes", "dram_read_nbytes")}
    np.savez(work / f"{name}.npz", **{f"q{number}": logits for number, (_, logits) in enumerate(told)})
    return {"results": [one for one, _ in told], "load_s": load_s, "setup_s": setup_s, **moved}


#: Phases by name.
PHASES: dict[str, Callable[[Spec, Path, str], dict[str, object]]] = {
    "convert": _convert,
    "reference": _reference,
    "first": _with_store,
    "restarted": _with_store,
}


def _say(stage: str, done: int = 0, total: int = 0) -> None:
    sys.stdout.write(json.dumps({"stage": stage, "done": done, "total": total}) + "\n")
    sys.stdout.flush()


def _progress(stage: str) -> Callable[[int, int], None]:
    return lambda done, total: _say(stage, done, total)


def write_spec(spec: Spec, work: Path) -> None:
    """Leave `spec` where the phases look for it."""
    (work / "spec.json").write_text(json.dumps(asdict(spec)), encoding="utf-8")


def main(arguments: Sequence[str]) -> int:
    """Run one phase; 0, or 1 after a line with what went wrong, or 130."""
    phase, work, name = arguments[0], Path(arguments[1]), arguments[2]
    spec = Spec(**json.loads((work / "spec.json").read_text(encoding="utf-8")))
    try:
        result = PHASES[phase](spec, work, name)
    except KVTerraceError as error:
        sys.stdout.write(json.dumps({"error": str(error)}) + "\n")
        return 1
    except KeyboardInterrupt:
        return 130
    (work / f"{name}.json").write_text(json.dumps(result), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
