"""`kvterrace generate` on a tiny model folder: what it answers, and one line for everything that cannot work."""

from __future__ import annotations

import functools
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvterrace.cli import generate, main
from kvterrace.opening import open_store

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

CONTEXT = 1024
BLOCK = 64
TEXT = "The quick brown fox jumps over the lazy dog. " * 10  # 450 byte tokens
TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}<assistant>"


def save_model(folder: Path, *, config: Any = None, template: str | None = TEMPLATE) -> Path:
    """A random model with a tokenizer of single bytes."""
    torch.manual_seed(0)
    if config is None:
        config = transformers.LlamaConfig(
            vocab_size=258,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=CONTEXT,
            bos_token_id=None,
            eos_token_id=257,
        )
    transformers.AutoModelForCausalLM.from_config(config).eval().save_pretrained(folder)
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(letters)}
    vocabulary["<eos>"] = 257
    raw = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    raw.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = tokenizers.decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<eos>")
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def prompt(tmp_path: Path) -> Path:
    path = tmp_path / "prompt.txt"
    path.write_text(TEXT)
    return path


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(model: Path, prompt: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """Runs `generate` in this process; options that are not given are good ones."""

    def call(**options: str | Path) -> tuple[int, str, str]:
        given: dict[str, str | Path] = {
            "model": model,
            "prompt-file": prompt,
            "store": tmp_path / "kv",
            "max-new-tokens": "8",
            "dram": "16MiB",
            "ssd": "64MiB",
        }
        given.update({name.replace("_", "-"): value for name, value in options.items()})
        capsys.readouterr()
        status = main(["generate", *(text for name, value in given.items() for text in (f"--{name}", str(value)))])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    before = transformers.logging.get_verbosity()
    yield call
    transformers.logging.set_verbosity(before)
    transformers.logging.enable_progress_bar()


def refused(result: tuple[int, str, str], words: str) -> None:
    status, out, err = result
    assert status == 2, err
    assert out == ""
    assert err.count("\n") == 1, err
    assert err.startswith("kvterrace: ")
    assert words in err, err


def test_the_second_run_restores_from_the_ssd_and_says_the_same(run: Run, model: Path, tmp_path: Path) -> None:
    status, first, _ = run(json=tmp_path / "1.json", question="Why?")
    assert status == 0
    status, second, err = run(json=tmp_path / "2.json", question="Why?")
    assert status == 0
    assert first == second
    assert "computed; first token after" in err
    one, two = (json.loads((tmp_path / name).read_text()) for name in ("1.json", "2.json"))
    assert (one["restored_tokens"], one["restored_tokens_by_tier"]) == (0, {})
    assert two["restored_tokens_by_tier"] == {"ssd": 448}
    assert two["restored_tokens"] + two["recomputed_tokens"] == two["prompt_tokens"] == one["prompt_tokens"]
    assert two["answer_tokens"] == one["answer_tokens"]
    assert one["ssd_written_nbytes"] >= one["stored_nbytes"] == one["stored_blocks"] * BLOCK * 2 * 2 * 2 * 16 * 4
    assert first == one["answer"] + "\n"

    plain = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    ids = tokenizer(f"<user>{TEXT}\n\nWhy?\n<assistant>", return_tensors="pt")["input_ids"]
    want = plain.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert want[0, ids.shape[1] :].tolist() == one["answer_tokens"]


def test_another_question_shares_the_text_and_answers_are_kept(run: Run, tmp_path: Path) -> None:
    assert run(question="Why?", max_new_tokens="100", json=tmp_path / "1.json")[0] == 0
    assert run(question="Who was that?", json=tmp_path / "2.json")[0] == 0
    one, two = (json.loads((tmp_path / name).read_text()) for name in ("1.json", "2.json"))
    assert two["restored_tokens"] == 448
    assert one["stored_blocks"] == (one["prompt_tokens"] + len(one["answer_tokens"]) - 1) // BLOCK


def test_without_a_question_the_text_goes_on(run: Run, tmp_path: Path) -> None:
    assert run(json=tmp_path / "1.json")[0] == 0
    assert json.loads((tmp_path / "1.json").read_text())["prompt_tokens"] == len(TEXT)


def test_sampling_needs_only_a_seed(run: Run) -> None:
    one = run(temperature="1.0", seed="7")
    assert one[0] == 0
    assert run(temperature="1.0", seed="7")[1] == one[1]
    assert run(temperature="1.0", seed="8")[1] != one[1]


def test_a_folder_that_is_no_model(run: Run, tmp_path: Path) -> None:
    refused(run(model=tmp_path / "nowhere"), "is no model folder (it has no config.json)")
    assert not (tmp_path / "kv").exists()


def test_a_model_that_does_not_load(run: Run, model: Path, tmp_path: Path) -> None:
    damages: dict[str, Callable[[Path], object]] = {
        "no-weights": lambda folder: (folder / "model.safetensors").unlink(),
        "short-weights": lambda folder: os.truncate(folder / "model.safetensors", 1000),
        "bad-config": lambda folder: (folder / "config.json").write_text("{"),
        "unknown-type": lambda folder: (folder / "config.json").write_text('{"model_type": "nonesuch"}'),
    }
    for name, damage in damages.items():
        copy = shutil.copytree(model, tmp_path / name)
        damage(copy)
        refused(run(model=copy), f"cannot load the model in {copy}")
        assert not (tmp_path / "kv").exists(), name


def test_a_model_that_fails_on_trial_leaves_no_store(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @functools.wraps(transformers.LlamaForCausalLM.forward)
    def fails(self: Any, *arguments: Any, **options: Any) -> Any:
        raise RuntimeError("no such kernel")

    with monkeypatch.context() as patched:
        patched.setattr(transformers.LlamaForCausalLM, "forward", fails)
        (tmp_path / "kv").mkdir()
        refused(run(), "no such kernel")
        assert list((tmp_path / "kv").iterdir()) == []
        (tmp_path / "kv").rmdir()
        refused(run(), "no such kernel")
        assert not (tmp_path / "kv").exists()
    assert run()[0] == 0  # a folder made late is as good


def test_a_store_that_cannot_be_used_is_refused_before_the_model_is_loaded(
    run: Run, model: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(model, tmp_path / "no-weights")
    (copy / "model.safetensors").unlink()
    folder = tmp_path / "other"
    folder.mkdir()
    (folder / "thesis.tex").write_text("years of work")
    refused(run(model=copy, store=folder), str(folder))


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("hidden_size", 66, "config.json: "),  # no multiple of the heads: an error class of its own
        ("hidden_size", 128, "its weights have other shapes than its config.json says"),
        ("num_hidden_layers", "two", "config.json: "),
    ],
)
def test_a_config_that_does_not_fit(
    field: str, value: object, words: str, run: Run, model: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(model, tmp_path / "copy")
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, field: value}))
    result = run(model=copy)
    refused(result, f"cannot load the model in {copy}: {words}")
    assert result[2].endswith("; check that the folder is a complete Transformers model\n")


@pytest.mark.parametrize("content", ["{", "[]", None])
def test_a_tokenizer_that_does_not_load(content: str | None, run: Run, model: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(model, tmp_path / "copy")
    if content is None:
        (copy / "tokenizer.json").unlink()
    else:
        (copy / "tokenizer.json").write_text(content)
    refused(run(model=copy), f"are missing or damaged in {copy}")


def test_a_store_folder_that_is_removed_meanwhile(
    run: Run, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = generate._answer

    def removing(*arguments: Any, **options: Any) -> dict[str, object]:
        shutil.rmtree(tmp_path / "kv")
        return answer(*arguments, **options)

    monkeypatch.setattr(generate, "_answer", removing)
    status, out, err = run()
    assert (status, bool(out)) == (2, True)
    assert "the folder is gone" in err.splitlines()[-1]
    assert "free space" not in err


def test_blocks_that_cannot_be_read_are_counted_in_one_line(run: Run, tmp_path: Path) -> None:
    assert run(ssd="6MiB")[0] == 0  # more than half of a segment, so that close seals it
    for path in (tmp_path / "kv").rglob("*.seg"):
        raw = bytearray(path.read_bytes())
        for block in range(7):  # behind the segment's page: a page of header and 32 KiB of KV each
            raw[4096 + block * (36 << 10) + (20 << 10)] ^= 0xFF
        path.write_bytes(raw)
    status, _, err = run(ssd="6MiB", json=tmp_path / "out.json")
    assert status == 0, err
    faults = json.loads((tmp_path / "out.json").read_text())["faults"]
    assert faults, err
    for fault in faults:
        assert list(fault) == ["row", "block", "outcome", "where", "reason"]
        assert fault["outcome"] == "Corrupt"
        assert "@" in fault["where"]
    assert f"{len(faults)} blocks (corrupt: {len(faults)}) could not be read and were computed again" in err
    assert f"see `kvterrace verify {tmp_path / 'kv'}`" in err
    assert "BlockFault" not in err
    assert err.count("\n") <= 8, err


def test_a_model_that_is_not_understood(run: Run, tmp_path: Path) -> None:
    config = transformers.MistralConfig(
        vocab_size=258, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, sliding_window=32,
    )  # fmt: skip
    refused(run(model=save_model(tmp_path / "mistral", config=config)), "mistral: sliding_window=32")
    assert not (tmp_path / "kv").exists()


def test_prompts_that_cannot_be_read(run: Run, tmp_path: Path) -> None:
    refused(run(prompt_file=tmp_path / "nowhere.txt"), "does not exist")
    refused(run(prompt_file=tmp_path), "cannot be read (Is a directory)")
    bad = tmp_path / "bad"
    bad.write_bytes(b"\x7fELF\0\0")
    refused(run(prompt_file=bad), "is binary")
    bad.write_bytes("Grüße".encode("latin-1"))
    refused(run(prompt_file=bad), "is not UTF-8 (byte 2)")
    bad.write_bytes(b" \n")
    refused(run(prompt_file=bad), "the prompt is empty")
    bad.write_text("x" * CONTEXT)
    refused(run(prompt_file=bad), f"exceeds the model's context of {CONTEXT}")
    assert not (tmp_path / "kv").exists()


def test_options_that_cannot_work(run: Run, tmp_path: Path) -> None:
    refused(run(dram="lots"), "--dram: 'lots' is no size")
    refused(run(dram="-1"), "--dram: '-1' is no size")
    refused(run(dram="0"), "--dram: 0 is too small")
    refused(run(ssd="0", model=tmp_path / "nowhere"), "--ssd: 0 is too small: give 1MiB or more")
    refused(run(dtype="int3"), "--dtype int3")
    refused(run(json=tmp_path / "missing" / "out.json"), "its folder does not exist")
    refused(run(max_new_tokens="0"), "max-new-tokens")


def test_a_store_of_a_newer_format_is_left_alone(run: Run, tmp_path: Path) -> None:
    assert run()[0] == 0
    head = tmp_path / "kv" / "store.json"
    data = json.loads(head.read_text())
    data["format_version"] += 1
    head.write_text(json.dumps(data))
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "kv").rglob("*")}
    refused(run(), "format")
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "kv").rglob("*")} == before
    data["format_version"] -= 1
    head.write_text(json.dumps(data))
    assert run(json=tmp_path / "out.json")[0] == 0
    assert json.loads((tmp_path / "out.json").read_text())["restored_tokens_by_tier"] == {"ssd": 448}


def test_stores_that_cannot_be_used(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "other"
    folder.mkdir()
    (folder / "thesis.tex").write_text("years of work")
    refused(run(store=folder), str(folder))
    assert (folder / "thesis.tex").read_text() == "years of work"
    refused(run(store=tmp_path / "prompt.txt"), "prompt.txt")
    refused(run(store=tmp_path / "prompt.txt" / "kv"), "prompt.txt")
    refused(run(store="/proc/kv"), "/proc/kv")
    with open_store(tmp_path / "kv", dram_bytes="8MiB", ssd_bytes="64MiB"):
        refused(run(), str(tmp_path / "kv"))


def test_a_full_disk_costs_the_store_not_the_answer(run: Run, tmp_path: Path) -> None:
    status, want, _ = run()
    assert status == 0
    small = tmp_path / "small"
    small.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=100k", "tmpfs", str(small)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a small file system")
    try:
        status, out, err = run(store=small / "kv")
        assert status == 2, err
        assert out == want
        assert "Traceback" not in err
        assert "the answer is complete, but not all of its KV could be kept" in err.splitlines()[-1]
        filler = small / "filler"
        with filler.open("wb", buffering=0) as sink:
            try:
                while sink.write(b"x" * 4096):
                    pass
            except OSError:
                pass
        status, out, err = run(store=small / "kv2")
        refused((status, out, err), str(small))
    finally:
        subprocess.run(["umount", str(small)], check=True)


def start(code: str, *arguments: str | Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *(str(argument) for argument in arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )


MAIN = "import sys; from kvterrace.cli import main; sys.exit(main())"


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted_while_answering(
    number: int, status: int, run: Run, model: Path, prompt: Path, tmp_path: Path
) -> None:
    arguments = [
        "--model",
        str(model),
        "--prompt-file",
        str(prompt),
        "--store",
        str(tmp_path / "kv"),
        "--dram",
        "16MiB",
    ]
    child = start(MAIN, "generate", *arguments, "--max-new-tokens", "500")
    assert child.stdout is not None
    assert child.stdout.read(30)  # the prompt was stored after the first token
    child.send_signal(number)
    _, err = child.communicate(timeout=60)
    assert child.returncode == status, err
    assert "Traceback" not in err
    if number == signal.SIGINT:
        assert err.endswith("kvterrace: interrupted; what was stored is kept\n")
    assert run(json=tmp_path / "out.json")[0] == 0
    assert json.loads((tmp_path / "out.json").read_text())["restored_tokens_by_tier"] == {"ssd": 448}


def test_without_transformers_one_line_says_how_to_get_it(model: Path, prompt: Path, tmp_path: Path) -> None:
    missing = (
        "import sys, importlib.metadata as m; real = m.version\n"
        "def version(name):\n"
        "    if name == 'transformers': raise m.PackageNotFoundError(name)\n"
        "    return real(name)\n"
        "m.version = version; sys.modules['transformers'] = None\n"
    )
    generate = ["generate", "--model", str(model), "--prompt-file", str(prompt), "--store", str(tmp_path / "kv")]
    commands: list[list[str]] = [generate, ["demo"]]
    for command in commands:
        child = start(missing + MAIN, *command)
        out, err = child.communicate(timeout=60)
        assert (child.returncode, out) == (2, "")
        assert err == "kvterrace: transformers is not installed: pip install 'kvterrace[transformers]'\n"
    assert not (tmp_path / "kv").exists()


def test_the_version_needs_no_torch() -> None:
    child = start("import sys; sys.modules['torch'] = None; " + MAIN, "--version")
    out, err = child.communicate(timeout=60)
    assert (child.returncode, err) == (0, "")
    assert out.startswith("kvterrace ")
