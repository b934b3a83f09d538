"""`kvterrace generate`."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvterrace.cli.console import few_warnings, human_nbytes, stderr, write_json
from kvterrace.config import parse_nbytes
from kvterrace.engine.counters import StoreStats
from kvterrace.errors import ConfigError, StoreUnusableError
from kvterrace.opening import open_store
from kvterrace.store import Store

if TYPE_CHECKING:
    from kvterrace.integrations.transformers.report import BlockFault, StoreReport

__all__ = ["GenerateOptions", "run"]

# Longest wait for the drive after the answer.
_FLUSH_S = 60.0

# Less than that cannot work: of DRAM a few blocks, of SSD what `open_store` asks for.
_MIN_DRAM, _MIN_SSD = "1MiB", "1MiB"

_DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class GenerateOptions:
    """What the command was asked for; see `kvterrace generate --help`."""

    model: Path
    prompt_files: tuple[Path, ...]
    store: Path
    question: str | None
    max_new_tokens: int
    dram: str
    ssd: str
    dtype: str
    temperature: float
    seed: int
    json_file: Path | None


def run(options: GenerateOptions) -> None:
    """Answer, report, store. Raises KVTerraceError over bad input, before anything is written where that shows."""
    if options.dtype not in _DTYPES:
        raise ConfigError(f"--dtype {options.dtype}: give one of {', '.join(_DTYPES)}")
    _check_sizes(options.dram, options.ssd)
    if options.json_file is not None and not options.json_file.absolute().parent.is_dir():
        raise ConfigError(f"--json {options.json_file}: its folder does not exist: make it first")
    text = "\n".join(_read_prompt(path) for path in options.prompt_files)
    if not text.strip():
        raise ConfigError(f"{', '.join(map(str, options.prompt_files))}: the prompt is empty: give a file with text")
    # Before torch loads its OpenMP: threads that spin take the cores from those of the store (4 s, not 0.3 s, for a
    # first token on 2 busy cores).
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    with stderr.status("loading Transformers"):
        # Here, not above: `kvterrace --version` shall not wait for torch, and must work without it.
        from kvterrace.integrations.transformers import session

    began_s = time.monotonic()
    config = session.load_config(options.model)
    tokenizer = session.load_tokenizer(options.model)
    ids = session.encode_prompt(tokenizer, text, options.question)
    session.check_context(config, len(ids), options.max_new_tokens)
    with few_warnings(), ExitStack() as stack:
        # One that is there is opened first, so that a bad one is refused at once. A new one is made last, so that a
        # model that cannot be used leaves no folder behind.
        store = stack.enter_context(_open(options)) if _is_there(options.store) else None
        with stderr.status(f"loading {options.model}"):
            model = session.load_model(options.model, options.dtype)
        if store is None:
            session.check_model(model)
            store = stack.enter_context(_open(options))
        report = _answer(options, store, model, tokenizer, ids, load_began_s=began_s)
    if options.json_file is not None:
        write_json(options.json_file, report)
    if report["unsaved"]:
        gone = not (options.store / "store.json").exists()
        raise StoreUnusableError(
            f"the answer is complete, but not all of its KV could be kept on {options.store} ({report['unsaved']}): "
            + (
                "the folder is gone, or something else is in its place: leave it alone while a command uses it"
                if gone
                else "free space there, or give --store another place"
            )
        )


def _is_there(path: Path) -> bool:
    """Whether something lies at `path` that opening a store there would not make: anything but an empty folder."""
    try:
        return any(path.iterdir())
    except FileNotFoundError:
        return False
    except OSError:
        return True


def _open(options: GenerateOptions) -> Store:
    return open_store(options.store, dram_bytes=options.dram, ssd_bytes=options.ssd)


def _check_sizes(dram: str, ssd: str) -> None:
    """Raises ConfigError that names the option. Here, since loading Transformers takes seconds."""
    for option, size, least in (("--dram", dram, _MIN_DRAM), ("--ssd", ssd, _MIN_SSD)):
        if parse_nbytes(size, option) < parse_nbytes(least, option):
            raise ConfigError(f"{option}: {size} is too small: give {least} or more, e.g. {option} 4GiB")


def _answer(
    options: GenerateOptions, store: Store, model: Any, tokenizer: Any, ids: list[int], *, load_began_s: float
) -> dict[str, object]:
    from kvterrace.integrations.transformers import PrefixCache, session
    from kvterrace.integrations.transformers.report import fault_words

    if model.device.type == "cpu":
        # Grouped queries attend to K and V as they are, not to copies for each query head. The same bits, but the first
        # token of a question on 4,096 restored tokens comes a third sooner.
        os.environ.setdefault("TRANSFORMERS_SDPA_FORCE_GQA", "1")
    with _progress("fingerprinting weights") as told:
        prefix = PrefixCache(store, model, on_progress=told)
    load_s = time.monotonic() - load_began_s
    stream = _Stream(tokenizer)
    kept: list[StoreReport] = []
    with _progress("computing prompt") as told:

        def first_or_next(token: int, _logits: object) -> None:
            told(len(ids), len(ids))
            stream.push(token)

        def keep_prompt(cache: object) -> None:
            # Before the answer, which may be long, or interrupted.
            kept.append(prefix.store([ids], cache))

        made = session.generate(
            prefix,
            model,
            ids,
            max_new_tokens=options.max_new_tokens,
            temperature=options.temperature,
            seed=options.seed,
            on_progress=told,
            on_token=first_or_next,
            on_prefilled=keep_prompt,
        )
    answer = stream.end()
    kept.append(prefix.store([ids + made.tokens], made.cache))
    flushed = store.flush(_FLUSH_S)
    stats = store.stats()
    restored = made.restored
    tiers = {tier.name.lower(): count for tier, count in restored.tier_tokens.items()}
    report: dict[str, object] = {
        "answer": answer,
        "answer_tokens": made.tokens,
        "prompt_tokens": len(ids),
        "restored_tokens": restored.restored_tokens,
        "restored_tokens_by_tier": tiers,
        "recomputed_tokens": len(ids) - restored.restored_tokens,
        "restored_nbytes": restored.nbytes,
        "restore_s": restored.elapsed_s,
        "ttft_s": made.ttft_s,
        "decode_s": made.decode_s,
        "load_s": load_s,
        "stored_blocks": sum(part.stored_blocks for part in kept),
        "present_blocks": kept[0].present_blocks,
        "missed_blocks": kept[-1].missed_blocks,
        "stored_nbytes": sum(part.nbytes for part in kept),
        "unsaved": kept[-1].error or ("" if flushed else _why_unsaved(stats)),
        "faults": [_fault_json(fault) for fault in restored.faults],
        "restore_error": restored.error,
        "ssd_read_nbytes": stats.ssd_read_nbytes,
        "ssd_written_nbytes": stats.ssd_written_nbytes,
        "dram_read_nbytes": stats.dram_read_nbytes,
    }
    _tell(report, tiers)
    if restored.faults:
        stderr.print(
            f"{fault_words(restored.faults)} could not be read and were computed again; "
            f"see `kvterrace verify {options.store}`",
            markup=False,
            soft_wrap=True,
        )
    if restored.error:
        stderr.print(f"nothing was restored: {restored.error}", markup=False, soft_wrap=True)
    return report


def _fault_json(fault: BlockFault) -> dict[str, object]:
    return {
        "row": fault.row,
        "block": fault.block,
        "outcome": type(fault.outcome).__name__,
        "where": getattr(fault.outcome, "where", ""),
        "reason": getattr(fault.outcome, "reason", ""),
    }


def _tell(report: dict[str, Any], tiers: dict[str, int]) -> None:
    found = ", ".join(f"{count} from {tier.upper()}" for tier, count in tiers.items()) or "0 restored"
    stderr.print(
        f"prompt {report['prompt_tokens']} tokens: {found}, {report['recomputed_tokens']} computed; "
        f"first token after {report['ttft_s']:.2f} s",
        soft_wrap=True,
    )
    restored, read = human_nbytes(report["restored_nbytes"]), human_nbytes(report["ssd_read_nbytes"])
    stored, written = human_nbytes(report["stored_nbytes"]), human_nbytes(report["ssd_written_nbytes"])
    stderr.print(
        f"moved: {restored} restored ({read} read from SSD), {stored} stored ({written} written to SSD)", soft_wrap=True
    )
    if report["missed_blocks"]:
        stderr.print(f"{report['missed_blocks']} blocks found no room: raise --dram and --ssd")


def _why_unsaved(stats: StoreStats) -> str:
    if stats.ssd_write_failures:
        return f"{stats.ssd_write_failures} writes failed"
    return "the drive took no writes in time"


def _read_prompt(path: Path) -> str:
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise ConfigError(f"prompt file {path} does not exist: check --prompt-file") from None
    except OSError as error:
        raise ConfigError(f"prompt file {path} cannot be read ({error.strerror or error}): give a text file") from None
    if b"\0" in raw:
        raise ConfigError(f"prompt file {path} is binary: give a UTF-8 text file")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"prompt file {path} is not UTF-8 (byte {error.start}): convert it first") from None


class _Stream:
    """Writes an answer to stdout while it grows: text is held back until its characters are whole."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._shown = 0
        self._text: list[str] = []

    def push(self, token: int) -> None:
        self._ids.append(token)
        text = self._decode()
        if text.endswith("�"):
            return
        self._emit(text[self._shown :])
        self._shown = len(text)
        if text.endswith("\n"):
            # One token stays as context: some tokenizers drop the space before a first word.
            self._ids = self._ids[-1:]
            self._shown = len(self._decode())

    def end(self) -> str:
        """Write what is left and a newline; the whole text."""
        self._emit(self._decode()[self._shown :] if self._ids else "")
        sys.stdout.write("\n")
        sys.stdout.flush()
        return "".join(self._text)

    def _decode(self) -> str:
        return str(self._tokenizer.decode(self._ids, skip_special_tokens=True))

    def _emit(self, text: str) -> None:
        self._text.append(text)
        sys.stdout.write(text)
        sys.stdout.flush()


@contextmanager
def _progress(label: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr that is there from the first report to the last; nothing where stderr is no terminal."""
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=stderr,
        transient=True,
        disable=not stderr.is_terminal,
    )
    task = bar.add_task(label, total=None)
    running = False

    def told(done: int, total: int) -> None:
        nonlocal running
        if done >= total:
            bar.stop()
            return
        if not running:
            bar.start()
            running = True
        bar.update(task, completed=done, total=total)

    try:
        yield told
    finally:
        bar.stop()
