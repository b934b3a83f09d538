"""What is never served for something else: weights, salts, adapters, images, tenants, epochs (R32, C7, C8, C9)."""

from __future__ import annotations

import contextlib
import hashlib
import os
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.vllm.machine import BLOCK, machine, model_folder, plain_seed, prompt, reference
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.worker.cpu_worker import CPUWorker

from kvterrace.integrations.vllm.request_keys import RequestKeys, encode_extra
from kvterrace.keys import Namespace
from kvterrace.layout import KVLayout

PLAIN = plain_seed()
OTHER = prompt(2, 200)
TOKENS = prompt(1, 200)  # 12 whole blocks of 16, and 8 tokens
ALL, REST = 203, 11  # computed without a hit, and with the whole one

Extra = dict[str, Any]


def test_other_weights_in_the_same_folder_match_nothing(tmp_path: Path, extra: Extra) -> None:
    with machine(model_folder(tmp_path / "m", b"one"), extra) as engine:
        engine.ask(TOKENS)
    with machine(model_folder(tmp_path / "m", b"two"), extra, weights=1) as engine:
        assert engine.ask(TOKENS) == (reference(TOKENS, 4, plain_seed(1)), ALL)
    with machine(model_folder(tmp_path / "m", b"one"), extra) as engine:
        assert engine.ask(TOKENS) == (reference(TOKENS, 4, PLAIN), REST)


def test_a_commit_of_the_hub_names_the_weights(tmp_path: Path, extra: Extra) -> None:
    commits = [tmp_path / "models--a--b" / "snapshots" / (letter * 40) for letter in "01"]
    with machine(model_folder(commits[0]), extra) as engine:
        engine.ask(TOKENS)
        assert engine.worker.get_handshake_metadata().namespace.model == "hub:" + "0" * 40
    with machine(model_folder(commits[1]), extra, weights=1) as engine:
        assert engine.ask(TOKENS)[1] == ALL


LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 2,
    "long_factor": [2.0] * 2,
    "original_max_position_embeddings": 512,
}


def test_longrope_takes_other_factors_for_another_longest_context(tmp_path: Path, extra: Extra) -> None:
    """vLLM rotates K by the long factors in all requests as soon as `--max-model-len` is above the original length."""
    model = model_folder(tmp_path / "m", rope_parameters=LONG_ROPE)
    for longest, want in ((512, ALL), (1024, ALL), (512, REST)):
        with machine(model, extra, longest=longest) as engine:
            assert engine.ask(TOKENS)[1] == want


def test_other_models_may_change_their_longest_context(model: Path, extra: Extra) -> None:
    for longest, want in ((512, ALL), (1024, REST)):
        with machine(model, extra, longest=longest) as engine:
            assert engine.ask(TOKENS)[1] == want


def test_the_code_of_another_library_computes_other_kv(model: Path, extra: Extra) -> None:
    for implementation, want in (("vllm", ALL), ("transformers", ALL), ("vllm", REST)):
        with machine(model, extra, implementation=implementation) as engine:
            assert engine.ask(TOKENS)[1] == want


@pytest.mark.parametrize(("implementation", "want"), [("vllm", REST), ("transformers", ALL)])
def test_another_transformers_computes_other_kv_where_it_computes(
    model: Path, extra: Extra, monkeypatch: pytest.MonkeyPatch, implementation: str, want: int
) -> None:
    with machine(model, extra, implementation=implementation) as engine:
        engine.ask(TOKENS)
    found = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "0.0" if name == "transformers" else found(name))
    with machine(model, extra, implementation=implementation) as engine:
        assert engine.ask(TOKENS)[1] == want


def test_tenants_match_nothing_of_each_other(model: Path, extra: Extra) -> None:
    for tenant, want in (("one", ALL), ("two", ALL), ("one", REST), ("two", REST)):
        with machine(model, {**extra, "tenant": tenant}) as engine:
            assert engine.ask(TOKENS)[1] == want


def test_salts_match_nothing_of_each_other(model: Path, extra: Extra) -> None:
    for salt, want in ((None, ALL), ("a", ALL), ("b", ALL), ("a", REST), (None, REST)):
        with machine(model, extra) as engine:
            seed = plain_seed(salt=salt)
            assert engine.ask(TOKENS, cache_salt=salt) == (reference(TOKENS, 4, seed), want)


def image(name: str, offset: int) -> MultiModalFeatureSpec:
    place = PlaceholderRange(offset=offset, length=BLOCK)
    return MultiModalFeatureSpec(data=None, modality="image", identifier=name, mm_position=place)


def test_other_images_behind_the_same_placeholders_are_computed(model: Path, extra: Extra) -> None:
    # vLLM's scheduler would ask for an encoder here; the keys are what is looked at
    with machine(model, extra) as engine:
        space = engine.worker.get_handshake_metadata().namespace
        chains = []
        for images in ([], [image("cat", 40)], [image("dog", 40)], [image("cat", 41)], [image("cat", 40)]):
            request = engine.scheduler.requests.get("none") or fake_request(TOKENS, mm_features=images)
            chains.append(list(RequestKeys(request, space, b"").upto(12)))
    none, cat, dog, moved, again = chains
    assert cat == again
    # Tokens 40 to 55 lie in blocks 2 and 3: the two before are shared, and no other.
    for one, other in ((none, cat), (cat, dog), (cat, moved)):
        assert [a == b for a, b in zip(one, other, strict=True)] == [True] * 2 + [False] * 10


def fake_request(tokens: list[int], **facts: Any) -> Any:
    plain: dict[str, Any] = {"lora_request": None, "mm_features": [], "cache_salt": None, "prompt_embeds": None}
    return SimpleNamespace(
        request_id="fake", num_tokens=len(tokens), all_token_ids=tokens, _prompt_embeds_per_block_hashes={},
        **{**plain, **facts},
    )  # fmt: skip


def test_a_reset_forgets_what_was_kept_and_what_running_requests_computed(model: Path, extra: Extra) -> None:
    with machine(model, extra) as engine:
        engine.ask(TOKENS)
        engine.add("running", prompt(2, 100), answer=60)
        engine.step()
        engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        engine.weights = 1
        engine.run()
        assert engine.ask(TOKENS) == (reference(TOKENS, 4, plain_seed(1)), ALL)
        engine.scheduler.reset_prefix_cache()
        assert engine.ask(TOKENS) == (reference(TOKENS, 4, plain_seed(1)), REST)
    # After a restart the weights are as in the files: what they gave is there again, what others gave is not.
    with machine(model, extra) as engine:
        assert engine.ask(TOKENS) == (reference(TOKENS, 4, PLAIN), REST)


def test_what_a_request_computed_before_a_reset_is_not_kept_after_it(model: Path, extra: Extra) -> None:
    with machine(model, extra) as engine:
        engine.add("running", TOKENS, answer=40)
        for _ in range(2):  # 200 tokens in steps of 128
            engine.step()
        engine.scheduler.reset_prefix_cache(reset_connector=True)  # goes on with its KV, as vLLM has it
        engine.run()
        assert engine.answers["running"] == reference(TOKENS, 40, PLAIN)
        engine.scheduler.reset_prefix_cache()
        assert engine.ask(TOKENS)[1] == ALL
        engine.scheduler.reset_prefix_cache()
        assert engine.ask(TOKENS)[1] == REST


def test_what_cannot_be_encoded_is_not_kept_and_is_told_once(
    model: Path, extra: Extra, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unknown(value: object) -> bytes:
        raise TypeError("part of a block's hash of an unknown kind")

    monkeypatch.setattr("kvterrace.integrations.vllm.request_keys.encode_extra", unknown)
    with machine(model, extra) as engine:
        for salt in ("a", "b"):
            assert engine.ask(TOKENS, cache_salt=salt) == (reference(TOKENS, 4, plain_seed(salt=salt)), ALL)
        assert "blocks.saved" not in engine.counts
        assert sum("is not cached" in one.getMessage() for one in caplog.records) == 1


def test_what_vllm_has_kept_over_a_reset_is_not_kept_as_new(model: Path, extra: Extra) -> None:
    """vLLM empties its own prefix cache only if no request holds blocks, and resets the connector all the same."""
    with machine(model, extra, blocks=60) as engine:
        engine.ask(TOKENS)
        engine.add("running", OTHER, answer=30)
        engine.step()
        assert not engine.scheduler.reset_prefix_cache(reset_connector=True)
        assert engine.ask(TOKENS)[1] < ALL  # with the rest of the other; begins on blocks from before the reset
        engine.run()
        assert engine.scheduler.reset_prefix_cache()
        assert engine.ask(TOKENS)[1] == ALL  # none of them was stored
        assert engine.scheduler.reset_prefix_cache()
        assert engine.ask(TOKENS)[1] == REST


def test_a_request_that_ran_over_a_reset_loads_nothing_when_it_is_preempted(model: Path, extra: Extra) -> None:
    with machine(model, extra) as engine:
        engine.add("running", TOKENS, answer=20)
        for _ in range(4):
            engine.step()
        engine.scheduler.reset_prefix_cache(reset_connector=True)
        engine.scheduler.reset_prefix_cache(reset_running_requests=True)
        engine.weights = 1
        before = engine.computed_tokens
        engine.run()  # whatever it loaded of the old weights would be seen
        assert engine.computed_tokens - before >= 200


def test_loads_under_way_at_a_reset_are_not_believed(model: Path, extra: Extra) -> None:
    from tests.vllm.stores import between

    with machine(model, extra, blocks=14) as engine:
        engine.ask(TOKENS)
        engine.ask(prompt(2, 200))
        store = between(engine)
        store.holding = True
        engine.add("loading", TOKENS)
        engine.step()
        assert len(store.held) == 1
        engine.scheduler.reset_prefix_cache(reset_connector=True)
        engine.weights = 1
        store.let_go()
        engine.run()
        assert engine.answers["loading"] == reference(TOKENS, 4, plain_seed(1))


class FakeWorker(CPUWorker):
    def __init__(self) -> None:
        pass

    def load_model(self, *args: Any, **kwargs: Any) -> None: ...


def reloaded() -> None:
    """What `collective_rpc("reload_weights")` calls, without a model."""
    FakeWorker.model_runner = SimpleNamespace(reload_weights=lambda *args, **kwargs: None)
    FakeWorker.vllm_config = None
    with contextlib.suppress(AttributeError):  # what vLLM makes of half a worker does not matter
        FakeWorker().reload_weights()


def test_new_weights_without_a_reset_pause_the_cache(
    model: Path, extra: Extra, caplog: pytest.LogCaptureFixture
) -> None:
    with machine(model, extra) as engine:
        engine.ask(TOKENS)
        reloaded()
        engine.weights = 1
        engine.scheduler.reset_prefix_cache()  # vLLM's own alone
        for tokens in (TOKENS, OTHER, TOKENS):
            assert engine.ask(tokens) == (reference(tokens, 4, plain_seed(1)), ALL)
            engine.scheduler.reset_prefix_cache()
        assert "tokens.dram" not in engine.counts
        assert sum("has changed the weights" in one.getMessage() for one in caplog.records) == 1
        engine.scheduler.reset_prefix_cache(reset_connector=True)
        assert engine.ask(TOKENS)[1] == ALL
        engine.scheduler.reset_prefix_cache()
        assert engine.ask(TOKENS) == (reference(TOKENS, 4, plain_seed(1)), REST)
    with machine(model, extra) as engine:
        assert engine.ask(TOKENS) == (reference(TOKENS, 4, PLAIN), REST)
        assert engine.ask(OTHER) == (reference(OTHER, 4, PLAIN), ALL)  # nothing was kept in between


def test_a_reset_before_the_weights_change_is_as_good(model: Path, extra: Extra) -> None:
    with machine(model, extra) as engine:
        engine.ask(TOKENS)
        engine.scheduler.reset_prefix_cache(reset_connector=True)
        reloaded()
        engine.weights = 1
        assert engine.ask(TOKENS)[1] == ALL
        engine.scheduler.reset_prefix_cache()
        assert engine.ask(TOKENS) == (reference(TOKENS, 4, plain_seed(1)), REST)


# -- the encoding ------------------------------------------------------------------------------------------------------

LAYOUT = KVLayout(layers=1, kv_heads=1, head_dim=1, dtype="float32", block_tokens=2, parts_per_layer=1)
SPACE = Namespace("weights", LAYOUT)


def lp(data: bytes) -> bytes:
    return len(data).to_bytes(4, "little") + data


def test_keys_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """The documented encoding written a second time: so no hash seed and no pickle is in it."""
    monkeypatch.setitem(os.environ, "PYTHONHASHSEED", "7")
    tokens = [1, 2, 3, 4, 5]
    request = fake_request(tokens, cache_salt="salt")
    parent = hashlib.sha256(b"kvterrace/root/1\0" + SPACE.digest + lp(b"") + lp(b"")).digest()
    salt = b"t" + (2).to_bytes(4, "little") + b"s" + lp(b"cache_salt") + b"s" + lp(b"salt")
    extras = [b"t" + (2).to_bytes(4, "little") + b"b" + lp(b"") + salt, b""]
    want = []
    for block, extra in enumerate(extras):
        ids = b"".join(token.to_bytes(4, "little") for token in tokens[2 * block : 2 * block + 2])
        parent = hashlib.sha256(b"kvterrace/block/1\0" + parent + lp(extra) + (2).to_bytes(4, "little") + ids).digest()
        want.append(parent)
    assert list(RequestKeys(request, SPACE, b"").upto(9)) == want


def test_a_chain_grows_with_its_request() -> None:
    request = fake_request([1, 2, 3, 4, 5], cache_salt="s")
    keys = RequestKeys(request, SPACE, b"a")
    first = keys.upto(1)
    request.all_token_ids, request.num_tokens = [1, 2, 3, 4, 5, 6], 6
    assert list(keys.upto(3)) == list(RequestKeys(request, SPACE, b"a").upto(3))
    assert list(keys.upto(1)) == list(first) and len(keys.upto(2)) == 2


def test_no_two_values_have_one_encoding() -> None:
    values = [
        None,
        True,
        False,
        0,
        1,
        -1,
        b"",
        b"n",
        "",
        "n",
        (),
        (None,),
        ((),),
        ("a", "b"),
        ("ab",),
        ("a", ("b",)),
        (b"a", "b"),
    ]
    assert len({encode_extra(value) for value in values}) == len(values)
    with pytest.raises(TypeError, match="float"):
        encode_extra(("mm", 1.5))
