"""A vLLM engine in a process of its own that does what it is told, line by line: see `engines.Child`.

Reads one JSON object a line from standard input and answers each with one line that begins with `@@`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

#: What an order does to the engine; returns the answer.
Order = Callable[..., dict[str, Any]]


def main(more: Mapping[str, Order], before: Callable[[dict[str, Any]], None] | None = None) -> None:
    """Serve orders; `more` are others by name, `before` is called with what the engine is to be, before vLLM is."""
    spec = json.loads(sys.argv[1])
    os.environ.update(spec.pop("environment"))
    if before is not None:
        before(spec)
    from vllm import LLM

    orders: dict[str, Order] = {"ask": ask, "load": load, "metrics": metrics, "reset": reset, **more}
    began_s = time.monotonic()
    llm = LLM(**spec)
    say({"ready_s": time.monotonic() - began_s})
    for line in sys.stdin:
        order = json.loads(line)
        say(orders[order.pop("do")](llm, **order))


def ask(
    llm: Any, *, prompts: list[list[int]], tokens: int, salt: str | None = None, adapter: str | None = None
) -> dict[str, Any]:
    """All prompts at once; `adapter` is the folder of a LoRA adapter."""
    from vllm.lora.request import LoRARequest

    from vllm import SamplingParams

    lora = None if adapter is None else LoRARequest(adapter, 1, adapter)
    texts = [{"prompt_token_ids": prompt} | ({} if salt is None else {"cache_salt": salt}) for prompt in prompts]
    began_s = time.monotonic()
    outputs = llm.generate(
        texts, SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True), use_tqdm=False, lora_request=lora
    )
    return {
        "tokens": [list(one.outputs[0].token_ids) for one in outputs],
        "cached": [one.num_cached_tokens for one in outputs],
        "elapsed_s": time.monotonic() - began_s,
    }


def load(llm: Any, *, prompts: list[list[int]], tokens: int, concurrency: int) -> dict[str, Any]:
    """`concurrency` prompts at a time, in order; seconds to each one's first token from when it was handed over."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    engine, waiting = llm.llm_engine, list(enumerate(prompts))
    began_s: dict[str, float] = {}
    first_s: dict[str, float] = {}
    answers: dict[str, list[int]] = {}
    start_s = time.monotonic()
    while waiting or len(answers) < len(prompts):
        while waiting and len(began_s) - len(answers) < concurrency:
            number, prompt = waiting.pop(0)
            began_s[f"load {number}"] = time.monotonic()
            engine.add_request(f"load {number}", {"prompt_token_ids": prompt}, sampling)
        for output in engine.step():
            name = output.request_id
            first_s.setdefault(name, time.monotonic() - began_s[name])
            if output.finished:
                answers[name] = list(output.outputs[0].token_ids)
    names = [f"load {number}" for number in range(len(prompts))]
    return {
        "tokens": [answers[name] for name in names],
        "first_s": [first_s[name] for name in names],
        "elapsed_s": time.monotonic() - start_s,
    }


def metrics(llm: Any) -> dict[str, float]:
    """Counters of the connector, by name and last label."""
    found = {}
    for one in llm.get_metrics():
        if "kvterrace" in one.name and hasattr(one, "value"):
            own = [value for key, value in one.labels.items() if key not in ("engine", "model_name")]
            found[".".join([one.name.removeprefix("vllm:kvterrace_"), *own])] = one.value
        elif "kvterrace" in one.name:
            found[one.name.removeprefix("vllm:kvterrace_") + "_sum"] = one.sum
    return found


def reset(llm: Any, **what: Any) -> dict[str, Any]:
    return {"reset": llm.reset_prefix_cache(**what)}


def say(what: dict[str, Any]) -> None:
    sys.stdout.write("@@" + json.dumps(what) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main({})
