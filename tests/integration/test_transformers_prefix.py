"""Restored KV gives the tokens, and on one grid the bits, of a run without kvterrace: tiny random models."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kvterrace.errors import ConfigError, KVTerraceError, LayoutError, UnsupportedModelError
from kvterrace.keys import KeyChain
from kvterrace.opening import open_store
from kvterrace.store import Store
from kvterrace.types import Busy, Corrupt, DeviceFailed, Expired, GetOutcome, Hint, Miss, Stale, Tier

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from kvterrace.integrations.transformers import PrefixCache  # noqa: E402

pytestmark = pytest.mark.integration

BLOCK = 16
TOKENS = 100
NEW = 10
VOCABULARY = 128

_SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}
_GQA = {**_SHAPE, "num_key_value_heads": 2}
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**_GQA),
    "qwen2": lambda: transformers.Qwen2Config(**_GQA),
    "qwen3": lambda: transformers.Qwen3Config(**_GQA, head_dim=32),
    "gpt_neox": lambda: transformers.GPTNeoXConfig(**_SHAPE),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(
        **_SHAPE,
        num_key_value_heads=4,
        moe_intermediate_size=32,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        kv_lora_rank=24,
        q_lora_rank=24,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=16,
        first_k_dense_replace=1,
    ),
}


def build(name: str = "llama", dtype: str = "float32") -> Any:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name]())
    return model.to(getattr(torch, dtype)).eval()


def prompt(rows: int = 1, tokens: int = TOKENS, seed: int = 1) -> Any:
    return torch.randint(1, VOCABULARY, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def plain(model: Any, ids: Any) -> Any:
    return model.generate(ids, max_new_tokens=NEW, do_sample=False, pad_token_id=0, eos_token_id=None)


def restored(model: Any, ids: Any, prefix: PrefixCache, cache: Any) -> Any:
    return model.generate(
        ids,
        max_new_tokens=NEW,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
        **prefix.cache_arguments(cache),
    )


@pytest.fixture
def store() -> Iterator[Store]:
    with open_store(None, dram_bytes="32MiB") as opened:
        yield opened


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", list(CONFIGS))
def test_restored_kv_gives_the_same_bits_and_tokens(name: str, dtype: str, store: Store) -> None:
    model, ids = build(name, dtype), prompt(rows=2)
    prefix = PrefixCache(store, model, block_tokens=BLOCK, chunk_tokens=BLOCK)
    cache, report = prefix.restore(ids)
    assert (report.restored_tokens, report.tokens, len(cache.layers)) == (0, TOKENS, 2)
    logits = prefix.prefill(ids, cache)
    kept = prefix.store(ids, cache)
    assert (kept.blocks, kept.stored_blocks, kept.missed_blocks) == (12, 12, 0)

    again, report = prefix.restore(ids)
    assert report.restored_tokens == 96
    assert report.tier_tokens == {Tier.DRAM: 192}
    assert report.nbytes == 12 * prefix.layout.block_nbytes
    for mine, theirs in zip(again.layers, cache.layers, strict=True):
        assert torch.equal(mine.keys, theirs.keys[:, :, :96])
        assert torch.equal(mine.values, theirs.values[:, :, :96])
    assert torch.equal(prefix.prefill(ids, again), logits)
    for mine, theirs in zip(again.layers, cache.layers, strict=True):
        assert torch.equal(mine.keys, theirs.keys)

    fresh, _ = prefix.restore(ids)
    assert torch.equal(restored(model, ids, prefix, fresh), plain(model, ids))


def test_answers_are_stored_and_the_next_turn_continues(store: Store) -> None:
    model, ids = build(), prompt()
    prefix = PrefixCache(store, model, block_tokens=BLOCK)
    cache, _ = prefix.restore(ids)
    first = restored(model, ids, prefix, cache)
    kept = prefix.store(first, cache)  # 109 tokens held, the 110th was never fed
    assert kept.stored_blocks == 6
    turn = torch.cat([first, prompt(tokens=30, seed=7)], dim=1)
    cache, report = prefix.restore(turn)
    assert report.restored_tokens == 96
    second = restored(model, turn, prefix, cache)
    assert torch.equal(second, plain(model, turn))
    assert prefix.store(second, cache).present_blocks == 6
    assert prefix.restore(second)[1].restored_tokens == 144


def test_a_restart_restores_from_the_ssd(tmp_path: Path) -> None:
    model, ids = build(), prompt()
    with open_store(tmp_path / "kv", dram_bytes="8MiB", ssd_bytes="64MiB") as store:
        prefix = PrefixCache(store, model, block_tokens=BLOCK)
        cache, _ = prefix.restore(ids)
        want = prefix.prefill(ids, cache)
        prefix.store(ids, cache)
    with open_store(tmp_path / "kv", dram_bytes="8MiB", ssd_bytes="64MiB") as store:
        prefix = PrefixCache(store, build(), block_tokens=BLOCK)
        cache, report = prefix.restore(ids)
        assert report.tier_tokens == {Tier.SSD: 96}
        torch.testing.assert_close(prefix.prefill(ids, cache), want)
        assert torch.equal(want.argmax(-1), prefix.prefill(ids, prefix.restore(ids)[0]).argmax(-1))


def test_the_batch_gets_the_shortest_hit(store: Store) -> None:
    model, ids = build(), prompt(rows=2)
    prefix = PrefixCache(store, model, block_tokens=BLOCK, chunk_tokens=BLOCK)
    half = ids[1:, :50]
    for part in (ids[:1], half):
        cache, _ = prefix.restore(part)
        prefix.prefill(part, cache)
        prefix.store(part, cache)
    cache, report = prefix.restore(ids)
    assert report.restored_tokens == 48
    assert torch.equal(restored(model, ids, prefix, cache), plain(model, ids))


def test_the_last_token_is_always_computed(store: Store) -> None:
    model, ids = build(), prompt(tokens=64)
    prefix = PrefixCache(store, model, block_tokens=BLOCK)
    cache, _ = prefix.restore(ids)
    prefix.prefill(ids, cache)
    assert prefix.store(ids, cache).stored_blocks == 4
    assert prefix.restore(ids)[1].restored_tokens == 48
    assert prefix.restore(ids[:, :5])[1].restored_tokens == 0
    with pytest.raises(ConfigError, match="at least the last one must be computed"):
        prefix.prefill(ids, cache)


@dataclass
class FaultyStore:
    """The real store, but reads of some blocks end otherwise, or calls raise."""

    store: Store
    bad: dict[int, GetOutcome] = field(default_factory=dict)
    error: Exception | None = None

    def match(self, chain: KeyChain) -> Any:
        if self.error is not None:
            raise self.error
        return self.store.match(chain)

    def get(
        self, chain: KeyChain, out: Any, *, start: int = 0, stop: int | None = None, deadline_s: float | None = None
    ) -> Any:
        return self.store.get(chain, out, start=start, stop=stop, deadline_s=deadline_s)

    def put(
        self, chain: KeyChain, blocks: Any, *, start: int = 0, stop: int | None = None, sequence: bytes = b""
    ) -> Any:
        return self.store.put(chain, blocks, start=start, stop=stop, sequence=sequence)

    def hint(self, sequence: bytes, kind: Hint, *, seconds: float | None = None) -> None:
        if self.error is not None:
            raise self.error
        self.store.hint(sequence, kind, seconds=seconds)

    def wait(self, transfer: Any, timeout_s: float | None = None) -> Sequence[Any]:
        return [self.bad.get(i, outcome) for i, outcome in enumerate(self.store.wait(transfer, timeout_s))]


@pytest.mark.parametrize("sequence", [b"", b"chat 7"])
def test_a_closed_conversation_is_not_written_and_an_open_one_is(sequence: bytes, tmp_path: Path) -> None:
    """Both rows of a batch; the tokens have grown since they were stored, and still name the same conversation."""
    model, closed, kept = build(), prompt(rows=2), prompt(seed=3)
    with open_store(tmp_path / "kv", dram_bytes="64MiB", ssd_bytes="64MiB", write_behind_s=1000.0) as store:
        prefix = PrefixCache(store, model, block_tokens=BLOCK, chunk_tokens=BLOCK)
        for ids, name in ((closed, sequence), (kept, b"another")):
            cache, _ = prefix.restore(ids)
            prefix.prefill(ids, cache)
            assert prefix.store(ids, cache, sequence=name).missed_blocks == 0
        longer = torch.cat([closed, closed[:, :5]], dim=1)
        prefix.hint(longer, Hint.CLOSED, sequence=sequence)
        prefix.hint(kept[:, : BLOCK - 1], Hint.CLOSED)  # less than a block names nothing
    with open_store(tmp_path / "kv", dram_bytes="64MiB", ssd_bytes="64MiB") as store:
        whole = TOKENS // BLOCK
        found = [store.match(prefix.chain(row.tolist())).blocks for row in (*closed, *kept)]
        assert found == [0, 0, whole]


def test_a_store_that_fails_is_not_told_and_nothing_else_happens(store: Store) -> None:
    prefix = PrefixCache(FaultyStore(store), build(), block_tokens=BLOCK)
    faulty = PrefixCache(FaultyStore(store, error=KVTerraceError("gone")), build(), block_tokens=BLOCK)
    faulty.hint(prompt(), Hint.CLOSED)
    with pytest.raises(ConfigError, match="seconds"):
        prefix.hint(prompt(), Hint.RETURNS)


@pytest.mark.parametrize(
    "outcome",
    [Corrupt("f@0", "crc"), Miss(), Stale("f@0", "key"), DeviceFailed("f@0", "EIO"), Expired(), Busy()],
    ids=lambda outcome: type(outcome).__name__,
)
def test_a_block_that_fails_cuts_the_prefix(outcome: GetOutcome, store: Store) -> None:
    model, ids = build(), prompt(rows=2)
    faulty = FaultyStore(store)
    prefix = PrefixCache(faulty, model, block_tokens=BLOCK, chunk_tokens=BLOCK)
    cache, _ = prefix.restore(ids)
    want = prefix.prefill(ids, cache)
    prefix.store(ids, cache)
    faulty.bad = {3: outcome}
    cache, report = prefix.restore(ids)
    assert report.restored_tokens == 48
    assert [(fault.row, fault.block, fault.outcome) for fault in report.faults] == [(0, 3, outcome), (1, 3, outcome)]
    assert torch.equal(prefix.prefill(ids, cache), want)
    cache, _ = prefix.restore(ids)
    assert torch.equal(restored(model, ids, prefix, cache), plain(model, ids))


def test_the_first_block_failing_restores_nothing(store: Store) -> None:
    model, ids = build(), prompt()
    faulty = FaultyStore(store)
    prefix = PrefixCache(faulty, model, block_tokens=BLOCK)
    cache, _ = prefix.restore(ids)
    prefix.prefill(ids, cache)
    prefix.store(ids, cache)
    faulty.bad = {0: Miss()}
    cache, report = prefix.restore(ids)
    assert (report.restored_tokens, cache.get_seq_length(), len(report.faults)) == (0, 0, 1)
    assert torch.equal(restored(model, ids, prefix, cache), plain(model, ids))


@pytest.mark.parametrize("error", [KVTerraceError("the store has failed"), OSError(5, "I/O error")])
def test_a_failing_store_never_fails_the_request(error: Exception, store: Store) -> None:
    model, ids = build(), prompt()
    prefix = PrefixCache(FaultyStore(store, error=error), model, block_tokens=BLOCK)
    cache, report = prefix.restore(ids)
    assert report.restored_tokens == 0
    assert str(error) in report.error
    answer = restored(model, ids, prefix, cache)
    assert torch.equal(answer, plain(model, ids))
    kept = prefix.store(answer, cache)
    assert (kept.stored_blocks, kept.missed_blocks) == (0, kept.blocks)
    assert str(error) in kept.error


def test_a_closed_store_is_survived_and_a_bug_is_not() -> None:
    model, ids = build(), prompt()
    store = open_store(None, dram_bytes="8MiB")
    prefix = PrefixCache(store, model, block_tokens=BLOCK)
    store.close()
    assert "closed" in prefix.restore(ids)[1].error
    prefix = PrefixCache(FaultyStore(store, error=LayoutError("bug")), model, block_tokens=BLOCK)
    with pytest.raises(LayoutError):
        prefix.restore(ids)


def test_nothing_crosses_weights_tenants_salts_epochs_or_grids(store: Store) -> None:
    model, ids = build(), prompt()
    prefix = PrefixCache(store, model, block_tokens=BLOCK)
    cache, _ = prefix.restore(ids)
    prefix.prefill(ids, cache)
    prefix.store(ids, cache)
    same = PrefixCache(store, build(), block_tokens=BLOCK)
    assert same.restore(ids)[1].restored_tokens == 96
    others = {
        "tenant": PrefixCache(store, model, block_tokens=BLOCK, tenant="b"),
        "salt": PrefixCache(store, model, block_tokens=BLOCK, salt=b"b"),
        "epoch": PrefixCache(store, model, block_tokens=BLOCK, epoch=1),
        "grid": PrefixCache(store, model, block_tokens=BLOCK, chunk_tokens=32),
        "fingerprint": PrefixCache(store, model, block_tokens=BLOCK, fingerprint="other"),
        "dtype": PrefixCache(store, build(dtype="bfloat16"), block_tokens=BLOCK),
    }
    changed = build()
    with torch.no_grad():
        changed.model.layers[1].mlp.up_proj.weight[0, 0] += 1
    others["one weight"] = PrefixCache(store, changed, block_tokens=BLOCK)
    theta = build()
    theta.config.rms_norm_eps *= 2
    others["config"] = PrefixCache(store, theta, block_tokens=BLOCK)
    eager = build()
    eager.set_attn_implementation("eager")
    others["attention"] = PrefixCache(store, eager, block_tokens=BLOCK)
    for reason, other in others.items():
        assert other.restore(ids)[1].restored_tokens == 0, reason


def test_padding_and_unequal_rows_are_refused(store: Store) -> None:
    prefix = PrefixCache(store, build(), block_tokens=BLOCK)
    with pytest.raises(ConfigError, match="rows of 2 to 3 tokens"):
        prefix.restore([[1, 2, 3], [1, 2]])
    mask = torch.ones(2, 100, dtype=torch.long)
    mask[0, :4] = 0
    with pytest.raises(ConfigError, match="padding is not supported"):
        prefix.restore(prompt(rows=2), attention_mask=mask)
    with pytest.raises(ConfigError, match="holds no token"):
        prefix.restore([])
    with pytest.raises(ConfigError, match="multiple of block_tokens"):
        PrefixCache(store, build(), block_tokens=BLOCK, chunk_tokens=24)


def test_foreign_caches_are_refused_on_store(store: Store) -> None:
    model, ids = build(), prompt()
    prefix = PrefixCache(store, model, block_tokens=BLOCK)
    static = transformers.StaticCache(config=model.config, max_cache_len=128)
    with pytest.raises(UnsupportedModelError, match="StaticCache"):
        prefix.store(ids, static)
    other = build("qwen3")
    cache = transformers.DynamicCache(config=other.config)
    with torch.no_grad():
        other(ids, **PrefixCache(store, other, block_tokens=BLOCK).cache_arguments(cache))
    with pytest.raises(UnsupportedModelError, match="layer 0 of the cache holds"):
        prefix.store(ids, cache)
    cache, _ = prefix.restore(ids)
    prefix.prefill(ids, cache)
    with pytest.raises(ConfigError, match="the cache holds 100 tokens"):
        prefix.store(ids[:, :50], cache)
