"""Runs the demo's phases one after the other and compares what came out."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from kvterrace.demo import DemoError
from kvterrace.demo.model import MODEL_NAME, cache_folder, converted, gguf_folder
from kvterrace.demo.phases import Spec, write_spec
from kvterrace.integrations.transformers.versions import check_versions

__all__ = ["drop_page_cache", "tell"]

_NEW_TOKENS = 16

#: Told (phase, stage, tokens done, tokens in all; 0 of 0 where there is no count).
Listener = Callable[[str, str, int, int], None]


def tell(tokens: int, store: Path | None, listener: Listener) -> dict[str, Any]:
    """Run the story: a reference without kvterrace, a first process with it, a second one after it ended.

    Args:
        tokens: length of the shared prefix.
        store: folder of the store; None takes one in the cache folder and removes it afterwards.

    Returns:
        What `kvterrace demo --json` writes.

    Raises:
        DemoError, MissingDependencyError: it cannot run here.
    """
    check_versions()
    if not (converted() / "config.json").is_file():
        gguf_folder()
    with contextlib.ExitStack() as stack:
        try:
            cache_folder().mkdir(parents=True, exist_ok=True)
            work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="demo-", dir=cache_folder())))
        except OSError as error:
            raise DemoError(f"cannot write {cache_folder()} ({error.strerror}): set XDG_CACHE_HOME") from error
        spec = Spec(
            store=str(store if store is not None else work / "store"),
            tokens=tokens,
            new_tokens=_NEW_TOKENS,
            salt=secrets.token_hex(16),
            dram="1GiB",
            ssd="4GiB",
        )
        write_spec(spec, work)
        _run("convert", work, listener)
        reference = _run("reference", work, listener)
        first = _run("first", work, listener)
        page_cache = drop_page_cache(Path(spec.store))
        restarted = _run("restarted", work, listener)
        differences = _differences(work)
    return _result(spec, reference, first, restarted, differences, page_cache)


def drop_page_cache(folder: Path) -> str:
    """Take the files under `folder` out of the page cache, so that reads meet the drive; says how."""
    os.sync()
    with contextlib.suppress(OSError):
        Path("/proc/sys/vm/drop_caches").write_text("1\n", encoding="ascii")
        return "drop_caches"
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)
    return "posix_fadvise"


def _run(phase: str, work: Path, listener: Listener) -> dict[str, Any]:
    listener(phase, "starting", 0, 0)
    errors = work / f"{phase}.stderr"
    # Spinning OpenMP threads on a shared machine made phases ten times slower (2 cores, load 4).
    environment = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    with errors.open("wb") as sink:
        child = subprocess.Popen(  # noqa: S603 - our own module, no shell
            [sys.executable, "-m", "kvterrace.demo.phases", phase, str(work)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=sink,
            env=environment,
            text=True,
        )
    message = ""
    with child:
        try:
            assert child.stdout is not None
            for line in child.stdout:
                with contextlib.suppress(ValueError):
                    told = json.loads(line)
                    message = told.get("error", message)
                    if "stage" in told:
                        listener(phase, told["stage"], told["done"], told["total"])
            status = child.wait()
        except BaseException:
            child.send_signal(signal.SIGINT)
            try:
                child.wait(timeout=30)
            except subprocess.TimeoutExpired:
                child.kill()
            raise
    if status == 130:
        raise KeyboardInterrupt
    if status:
        last = (errors.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["no message"])[-1]
        raise DemoError(message or f"phase {phase} ended with status {status}: {last}")
    result: dict[str, Any] = json.loads((work / f"{phase}.json").read_text(encoding="utf-8"))
    return result


def _differences(work: Path) -> dict[str, float]:
    """Largest absolute difference of logits to the reference, by phase and question; inf where lengths differ."""
    found: dict[str, float] = {}
    with np.load(work / "reference.npz") as want:
        for phase in ("first", "restarted"):
            with np.load(work / f"{phase}.npz") as got:
                for question in want.files:
                    a, b = want[question], got[question]
                    same = a.shape == b.shape
                    found[f"{phase}.{question}"] = float(np.abs(a - b).max()) if same else float("inf")
    return found


def _result(
    spec: Spec,
    reference: dict[str, Any],
    first: dict[str, Any],
    restarted: dict[str, Any],
    differences: dict[str, float],
    page_cache: str,
) -> dict[str, Any]:
    cold, warm = first["results"]
    from_ssd, again = restarted["results"]
    recomputed_s = min(reference["ttft_s"])
    answers = [result["answer"] for result in (cold, warm, from_ssd, again)]
    worst = max(differences.values())
    ssd_s = from_ssd["ttft_s"]
    return {
        "model": MODEL_NAME,
        "dtype": "float32",
        "threads": reference["threads"],
        "prefix_tokens": spec.tokens,
        "ttft_recomputed_s": recomputed_s,
        "ttft_recomputed_all_s": reference["ttft_s"],
        "ttft_first_with_store_s": cold["ttft_s"],
        "ttft_dram_s": warm["ttft_s"],
        "ttft_ssd_s": ssd_s,
        "restore_dram_s": warm["restore_s"],
        "restore_ssd_s": from_ssd["restore_s"],
        "store_s": cold["store_s"],
        "speedup_dram": recomputed_s / warm["ttft_s"],
        "speedup_ssd": recomputed_s / ssd_s,
        "restored_tokens_dram": warm["tiers"].get("DRAM", 0),
        "restored_tokens_ssd": from_ssd["tiers"].get("SSD", 0),
        "tokens_equal": answers == [*reference["answers"], *reference["answers"]],
        "logits_equal": worst == 0.0,
        "logits_max_abs_diff": worst,
        "logits_max_abs_diff_by_run": differences,
        "restored_nbytes_ssd": from_ssd["restored_nbytes"],
        "stored_nbytes": cold["stored_nbytes"] + warm["stored_nbytes"],
        "ssd_written_nbytes": first["ssd_written_nbytes"],
        "ssd_read_nbytes": restarted["ssd_read_nbytes"],
        "missed_blocks": sum(result["missed_blocks"] for result in (cold, warm)),
        "model_load_s": restarted["load_s"],
        "fingerprint_s": restarted["setup_s"],
        "page_cache": page_cache,
        "answer_tokens": reference["answers"],
    }
