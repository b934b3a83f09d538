"""A layer with room shows, bit for bit, what the plain layer shows, whatever is done to it; and it joins nothing."""

from __future__ import annotations

import copy
import gc
import io
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvterrace.opening import open_store
from kvterrace.store import Store

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from transformers.cache_utils import DynamicLayer  # noqa: E402

from kvterrace.integrations.transformers import PrefixCache  # noqa: E402
from kvterrace.integrations.transformers.memory import HostMemory, carve, carved_nbytes  # noqa: E402
from kvterrace.integrations.transformers.roomy import Room, RoomyLayer  # noqa: E402

pytestmark = pytest.mark.integration

HEADS, DIM = 2, 8


def fresh(rows: int, tokens: int, **options: Any) -> tuple[Any, Any]:
    return torch.randn(rows, HEADS, tokens, DIM, **options), torch.randn(rows, HEADS, tokens, DIM, **options)


def rooms(tokens: int, *, rows: int = 1, **options: Any) -> list[Room]:
    return [Room(torch.empty(rows, HEADS, tokens, DIM, **options)) for _ in range(2)]


def append(layer: Any, new: tuple[Any, Any]) -> tuple[Any, Any]:
    with torch.no_grad():
        shown: tuple[Any, Any] = layer.update(*new)
    return shown


def same(mine: Any, theirs: Any) -> bool:
    if not theirs.is_initialized:
        return not mine.is_initialized
    return bool(torch.equal(mine.keys, theirs.keys) and torch.equal(mine.values, theirs.values))


@pytest.mark.parametrize("seed", range(30))
def test_any_history_shows_what_the_plain_layer_shows(seed: int) -> None:
    choose = random.Random(seed)
    torch.manual_seed(seed)
    rows = choose.choice([1, 2])
    lent = rooms(choose.choice([8, 300]), rows=rows) if choose.random() < 0.7 else None
    pairs = [(RoomyLayer(lent), DynamicLayer())]
    kept: list[tuple[Any, Any]] = []  # what was shown, and what it has to look like for ever
    for _ in range(120):
        which = choose.randrange(len(pairs))
        mine, theirs = pairs[which]
        held = theirs.get_seq_length()
        assert mine.get_seq_length() == held
        assert mine.get_mask_sizes(3) == theirs.get_mask_sizes(3)
        batch = theirs.keys.shape[0] if theirs.is_initialized and theirs.keys.ndim == 4 else rows
        match choose.choice(
            ["append"] * 8 + ["crop", "reorder", "repeat", "select", "reset", "copy", "deepcopy", "grad"]
        ):
            case "append":
                new = fresh(batch, choose.choice([1, 1, 1, 2, 7, 40]))
                for shown, want in zip(append(mine, new), append(theirs, new), strict=True):
                    assert torch.equal(shown, want)
                    kept.append((shown, want))
            case "grad":  # under grad mode it is the plain layer's own update
                new = fresh(batch, 1)
                mine.update(*new)
                theirs.update(*new)
            case "crop" if held:
                for layer in (mine, theirs):
                    layer.crop(-min(held, 1 + seed % 5))
            case "reorder" if held:
                order = torch.randint(batch, (batch,))
                for layer in (mine, theirs):
                    layer.reorder_cache(order)
            case "repeat" if held and batch < 4:
                for layer in (mine, theirs):
                    layer.batch_repeat_interleave(2)
            case "select" if held and batch > 1:
                for layer in (mine, theirs):
                    layer.batch_select_indices(torch.tensor([batch - 1]))
            case "reset" if choose.random() < 0.3 and not held:
                for layer in (mine, theirs):
                    layer.reset()
            case "copy" if len(pairs) < 4:
                pairs.append((copy.copy(mine), copy.copy(theirs)))
            case "deepcopy" if len(pairs) < 4:
                pairs.append((copy.deepcopy(mine), copy.deepcopy(theirs)))
            case _:
                pass
        assert all(same(*pair) for pair in pairs)
    assert all(torch.equal(shown, want) for shown, want in kept)


def test_tokens_are_written_into_the_room_until_it_is_full() -> None:
    lent = rooms(100)
    layer = RoomyLayer(lent)
    whole = [fresh(1, 90)]
    append(layer, whole[0])
    for _ in range(10):
        whole.append(fresh(1, 1))
        keys, values = append(layer, whole[-1])
        assert keys.data_ptr() == lent[0].buffer.data_ptr()
        assert values.data_ptr() == lent[1].buffer.data_ptr()
    whole.append(fresh(1, 1))
    keys, _ = append(layer, whole[-1])
    place = keys.data_ptr()
    assert place != lent[0].buffer.data_ptr()
    for _ in range(63):
        whole.append(fresh(1, 1))
        keys, values = append(layer, whole[-1])
        assert keys.data_ptr() == place
    assert torch.equal(keys, torch.cat([key for key, _ in whole], dim=2))
    assert torch.equal(values, torch.cat([value for _, value in whole], dim=2))


def test_a_layer_that_holds_something_from_the_start() -> None:
    lent, held = rooms(50), fresh(1, 20)
    for room, one in zip(lent, held, strict=True):
        room.append(one)
    layer = RoomyLayer(lent)
    assert layer.is_initialized
    assert layer.get_seq_length() == 20
    new = fresh(1, 5)
    keys, _ = append(layer, new)
    assert torch.equal(keys, torch.cat([held[0], new[0]], dim=2))
    assert keys.data_ptr() == lent[0].buffer.data_ptr()


def test_gradients_flow_as_through_the_plain_layer() -> None:
    layer, (key, value) = RoomyLayer(rooms(50)), fresh(1, 4)
    append(layer, fresh(1, 8))
    key.requires_grad_()
    keys, _ = layer.update(key, value)
    append(layer, fresh(1, 1))
    append(layer, fresh(1, 1))  # would spoil `keys` for the backward pass, were it in the same memory
    (keys * keys).sum().backward()
    assert torch.equal(key.grad, 2 * key.detach())


def test_memory_of_inference_mode_is_left_alone_outside_of_it() -> None:
    layer, new = RoomyLayer(), [fresh(1, 4) for _ in range(5)]
    with torch.inference_mode():
        for one in new[:3]:
            layer.update(*one)
    for one in new[3:]:
        keys, _ = append(layer, one)
    assert torch.equal(keys, torch.cat([key for key, _ in new], dim=2))


def test_another_dtype_or_shape_is_joined_or_refused_as_by_the_plain_layer() -> None:
    for other in (fresh(1, 2, dtype=torch.float64), tuple(torch.randn(2, HEADS, 2, DIM) for _ in range(2))):
        mine, theirs, first = RoomyLayer(rooms(50)), DynamicLayer(), fresh(1, 8)
        for layer in (mine, theirs):
            append(layer, first)
        results = []
        for layer in (mine, theirs):
            try:
                results.append(append(layer, other)[0])
            except RuntimeError as error:
                results.append(str(error))
        if isinstance(results[1], str):
            assert results[0] == results[1]
        else:
            assert torch.equal(results[0], results[1])
        assert same(mine, theirs)


def test_a_cache_survives_saving() -> None:
    layer, new = RoomyLayer(rooms(50)), [fresh(1, 4) for _ in range(3)]
    append(layer, new[0])
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    for one in new[1:]:
        for each in (layer, again):
            append(each, one)
    assert same(again, layer)


def build(dtype: str, attention: str, **more: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=128, hidden_size=192, intermediate_size=96, num_hidden_layers=2, num_attention_heads=3,
        num_key_value_heads=1, max_position_embeddings=2048, **more,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config).to(getattr(torch, dtype)).eval()
    model.set_attn_implementation(attention)
    return model


def ids_of(tokens: int, rows: int = 1) -> Any:
    return torch.randint(1, 128, (rows, tokens), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def store() -> Iterator[Store]:
    with open_store(None, dram_bytes="64MiB") as opened:
        yield opened


@pytest.mark.parametrize("grouped", ["0", "1"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_logits_are_those_of_a_plain_cache(
    dtype: str, attention: str, grouped: str, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ids = build(dtype, attention), ids_of(1043)
    monkeypatch.setenv("TRANSFORMERS_SDPA_FORCE_GQA", "0")
    plain = transformers.DynamicCache(config=model.config)
    parts = [ids[:, :512], ids[:, 512:1024], ids[:, 1024:], *(ids[:, i : i + 1] for i in range(30))]
    prefix = PrefixCache(store, model, block_tokens=64, chunk_tokens=512)
    want = [prefix.step(part, plain) for part in parts]
    monkeypatch.setenv("TRANSFORMERS_SDPA_FORCE_GQA", grouped)
    cache, _ = prefix.restore(ids, spare_tokens=8)
    assert [type(layer) for layer in cache.layers] == [RoomyLayer, RoomyLayer]
    for part, logits in zip(parts, want, strict=True):
        assert torch.equal(prefix.step(part, cache), logits)
    prefix.store(torch.cat(parts[:3], dim=1)[:, : cache.get_seq_length()], _cropped(cache, 30))
    again, report = prefix.restore(ids, spare_tokens=8)
    assert report.restored_tokens == 1024
    for part, logits in zip(parts[2:], want[2:], strict=True):
        assert torch.equal(prefix.step(part, again), logits)


def _cropped(cache: Any, tokens: int) -> Any:
    short = copy.copy(cache)
    short.layers = [copy.copy(layer) for layer in cache.layers]
    short.crop(-tokens)
    return short


@pytest.mark.parametrize(
    "how",
    [
        {"do_sample": False},
        {"do_sample": False, "num_beams": 3},
        {"do_sample": True, "num_return_sequences": 3},
        {"do_sample": True, "num_beams": 2, "num_return_sequences": 2},
        {"do_sample": False, "prompt_lookup_num_tokens": 4},
    ],
    ids=str,
)
def test_generate_gives_the_tokens_of_a_plain_cache(how: dict[str, Any], store: Store) -> None:
    model, ids = build("float32", "sdpa"), ids_of(120)
    prefix = PrefixCache(store, model, block_tokens=16, chunk_tokens=16)
    cache, _ = prefix.restore(ids)
    prefix.prefill(ids, cache)
    prefix.store(ids, cache)
    plain = transformers.DynamicCache(config=model.config)
    prefix.prefill(ids[:, :113], plain)
    plain.crop(-1)
    roomy, report = prefix.restore(ids, spare_tokens=4)
    assert report.restored_tokens == 112
    answers = []
    for held in (plain, roomy):
        torch.manual_seed(5)
        held.batch_repeat_interleave(how.get("num_beams", how.get("num_return_sequences", 1)))
        answers.append(
            model.generate(
                ids, max_new_tokens=24, pad_token_id=0, eos_token_id=None, **how, **prefix.cache_arguments(held)
            )
        )
    assert torch.equal(*answers)


def test_a_model_that_wants_k_in_one_piece_gets_the_plain_layer(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = ids_of(100)
    real: Callable[..., Any] = torch.nn.functional.scaled_dot_product_attention

    def picky(query: Any, key: Any, value: Any, **options: Any) -> Any:
        key.view(-1)
        return real(query, key, value, **options)

    # A KV head for each query head: what Transformers repeats for more would be in one piece again.
    config = transformers.GPTNeoXConfig(
        vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4
    )
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", picky)
    prefix = PrefixCache(store, model, block_tokens=16, chunk_tokens=16)
    cache, _ = prefix.restore(ids)
    assert {type(layer) for layer in cache.layers} == {DynamicLayer}
    want = prefix.prefill(ids, cache)
    prefix.store(ids, cache)
    cache, report = prefix.restore(ids)
    assert report.restored_tokens == 96
    assert torch.equal(prefix.prefill(ids, cache), want)


def test_the_reserve_is_lent_to_one_and_comes_back() -> None:
    memory = HostMemory(1 << 20)
    first = memory.take(1000)
    place = first.data_ptr()
    other = memory.take(1000)
    assert not place <= other.data_ptr() < place + (1 << 20)
    view = first.view(torch.float32)[10:20].numpy()
    del first, other
    gc.collect()
    assert memory.take(1000).data_ptr() != place, "an array on it is still there"
    del view
    gc.collect()
    again = memory.take(1 << 20)
    assert again.data_ptr() == place
    assert memory.take((1 << 20) + 1).numel() == (1 << 20) + 1


def test_carved_tensors_lie_apart_in_one_piece() -> None:
    shapes = [(1, 3, 5, 7), (1, 1, 1, 1), (2, 3, 1, 4)]
    for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn):
        flat = torch.empty(carved_nbytes(shapes, dtype), dtype=torch.uint8)
        tensors = carve(flat, shapes, dtype)
        assert [tuple(tensor.shape) for tensor in tensors] == shapes
        assert all(tensor.dtype is dtype and tensor.is_contiguous() for tensor in tensors)
        ends = [tensor.data_ptr() + tensor.numel() * tensor.element_size() for tensor in tensors]
        assert all(end <= tensor.data_ptr() for end, tensor in zip(ends, tensors[1:], strict=False))
        assert ends[-1] <= flat.data_ptr() + flat.numel()


def test_restores_reuse_the_reserve(store: Store) -> None:
    model, ids = build("float32", "sdpa"), ids_of(100)
    prefix = PrefixCache(store, model, block_tokens=16, chunk_tokens=16, reserve_tokens=120)
    cache, _ = prefix.restore(ids, spare_tokens=20)
    place = cache.layers[0]._rooms[0].buffer.data_ptr()
    want = prefix.prefill(ids, cache)
    prefix.store(ids, cache)
    second, _ = prefix.restore(ids, spare_tokens=20)
    assert second.layers[0].keys.data_ptr() != place
    assert torch.equal(prefix.prefill(ids, second), want)
    del cache
    gc.collect()
    third, _ = prefix.restore(ids, spare_tokens=20)
    assert third.layers[0].keys.data_ptr() == place
    assert torch.equal(prefix.prefill(ids, third), want)
