"""Keys follow the encoding in `kvterrace.keys`, to the byte; what changes the KV changes the key (R32, R46, C7-C9)."""

import hashlib
import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvterrace.errors import ConfigError
from kvterrace.keys import KEY_NBYTES, KeyChain, Namespace, chain_keys, extend_keys
from kvterrace.layout import KVLayout

LAYOUT = KVLayout(layers=30, kv_heads=3, head_dim=64, dtype="float32", block_tokens=4)
NAMESPACE = Namespace(model="0123abcd", layout=LAYOUT)

# Known answers, computed with printf and `openssl dgst -sha256` from the documented encoding alone. If one of these
# changes, every store in the field goes cold: that is a new encoding version, not an edit of this table.
PLAIN_DIGEST = "cb52892c6d97d733ff5fabce95e2e412a7e3814dd1ec6777f13181ef987d14f5"
PLAIN_ROOT = "ef269716f2b73c1848ffc23d9e54c7f150cccc9fb02d70ba405f4993324d4b74"
PLAIN_KEYS = [
    "b0d4e98733d989e0cf4855313234adc1a5b45d9eb88ef06961ec987bcf3f46d8",
    "3f342bd8b920bb5bbccd806f2532f3df62a720a1e80481e5c40ca833bc9adee6",
]
FULL_DIGEST = "4dec3cd81246a5eb232d1067007b5e8d7b7d705c4a008fe9049dad902346b1e4"
FULL_ROOT = "c84797c289ab6040205fd32bac5d91d518a891e0771439100db44c122535e20d"
FULL_KEYS = [
    "ac173cfb8e05104d61c1841664f1fbbbd272caee37a2b9c4a5f1035abc00230e",
    "e222d7a855778a1d34a0a190aff61cd50221127a7959418fbd60ad3fcdeeb9af",
]


def lp(data: bytes) -> bytes:
    return len(data).to_bytes(4, "little") + data


def reference_keys(namespace: Namespace, tokens: list[int], salt: bytes, extras: list[bytes]) -> list[bytes]:
    """The documented encoding, written a second time."""
    plain = {
        "model": namespace.model,
        "layout": asdict(namespace.layout),
        "epoch": namespace.epoch,
        "codec": namespace.codec,
        "numerics": namespace.numerics,
        "tenant": namespace.tenant,
    }
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(b"kvterrace/namespace/1\x00" + lp(text.encode("ascii"))).digest()
    parent = hashlib.sha256(b"kvterrace/root/1\x00" + digest + lp(namespace.tenant.encode("utf-8")) + lp(salt)).digest()
    width = namespace.layout.block_tokens
    keys = []
    for index, extra in enumerate(extras):
        hashed = hashlib.sha256(b"kvterrace/block/1\x00")
        hashed.update(parent)
        hashed.update(lp(extra))
        hashed.update(width.to_bytes(4, "little"))
        for token in tokens[index * width : (index + 1) * width]:
            hashed.update(token.to_bytes(4, "little"))
        parent = hashed.digest()
        keys.append(parent)
    return keys


def test_known_answers_with_defaults() -> None:
    chain = chain_keys(NAMESPACE, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert NAMESPACE.digest.hex() == PLAIN_DIGEST
    assert chain.root.hex() == PLAIN_ROOT
    assert [key.hex() for key in chain] == PLAIN_KEYS


def test_known_answers_with_every_field_set() -> None:
    layout = KVLayout(61, 1, 576, "bfloat16", 2, parts_per_layer=1, attention="mla", tp_rank=1, tp_size=2)
    namespace = Namespace("rev ü", layout, epoch=7, codec="int8", numerics="sdpa", tenant="Zoë")
    chain = chain_keys(namespace, [0, 2**32 - 1, 49151, 1], salt=b"salt", extra=b"lora")
    assert namespace.digest.hex() == FULL_DIGEST
    assert chain.root.hex() == FULL_ROOT
    assert [key.hex() for key in chain] == FULL_KEYS


token_ids = st.integers(0, 2**32 - 1)


@given(
    tokens=st.lists(token_ids, max_size=40),
    width=st.integers(1, 9),
    salt=st.binary(max_size=20),
    tenant=st.text(max_size=8),
    model=st.text(min_size=1, max_size=8),
    epoch=st.integers(0, 2**32 - 1),
    data=st.data(),
)
def test_keys_match_the_documented_encoding(
    tokens: list[int], width: int, salt: bytes, tenant: str, model: str, epoch: int, data: st.DataObject
) -> None:
    namespace = Namespace(model, replace(LAYOUT, block_tokens=width), epoch=epoch, tenant=tenant)
    count = len(tokens) // width
    extras = data.draw(st.lists(st.binary(max_size=12), min_size=count, max_size=count))
    assert list(chain_keys(namespace, tokens, salt=salt, extra=extras)) == reference_keys(
        namespace, tokens, salt, extras
    )


@pytest.mark.parametrize("dtype", [np.int32, np.uint32, np.int64, np.uint16, ">i8"])
def test_the_form_of_the_tokens_does_not_matter(dtype: Any) -> None:
    tokens = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert chain_keys(NAMESPACE, np.array(tokens, dtype=dtype)).data.hex() == "".join(PLAIN_KEYS)
    assert chain_keys(NAMESPACE, np.repeat(np.array(tokens, dtype=dtype), 2)[::2]).data.hex() == "".join(PLAIN_KEYS)
    assert chain_keys(NAMESPACE, tuple(tokens)).data.hex() == "".join(PLAIN_KEYS)


@pytest.mark.parametrize("seed", ["0", "1", "4294967295"])
def test_another_process_with_another_hash_seed_makes_the_same_keys(seed: str) -> None:
    script = (
        "from kvterrace.keys import Namespace, chain_keys\n"
        "from kvterrace.layout import KVLayout\n"
        "layout = KVLayout(layers=30, kv_heads=3, head_dim=64, dtype='float32', block_tokens=4)\n"
        "print(chain_keys(Namespace(model='0123abcd', layout=layout), list(range(1, 10))).data.hex())\n"
    )
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    answer = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    assert answer.stdout.strip() == "".join(PLAIN_KEYS)


def other_layout(**changes: Any) -> KeyChain:
    return chain_keys(replace(NAMESPACE, layout=replace(LAYOUT, **changes)), TOKENS)


def other_namespace(**changes: Any) -> KeyChain:
    return chain_keys(replace(NAMESPACE, **changes), TOKENS)


TOKENS = list(range(1, 10))
#: Keys of the same tokens where one thing that decides the KV, or who may see it, is another.
VARIANTS = {
    "plain": chain_keys(NAMESPACE, TOKENS),
    "dtype": other_layout(dtype="bfloat16"),
    "dtype of the same size": other_layout(dtype="float16"),
    "layers": other_layout(layers=29),
    "kv heads": other_layout(kv_heads=6),
    "head dim": other_layout(head_dim=128),
    "heads and dim swapped": other_layout(kv_heads=64, head_dim=3),
    "value head dim": other_layout(value_head_dim=32),
    "block size": other_layout(block_tokens=2),
    "fused parts": other_layout(parts_per_layer=1),
    "attention kind": other_layout(attention="sliding:4096"),
    "element order": other_layout(order="nhd"),
    "tp size": other_layout(tp_size=2),
    "tp rank": other_layout(tp_size=2, tp_rank=1),
    "weights": other_namespace(model="0123abce"),
    "epoch": other_namespace(epoch=1),
    "codec": other_namespace(codec="int8"),
    "numerics": other_namespace(numerics="sdpa"),
    "tenant": other_namespace(tenant="a"),
    "another tenant": other_namespace(tenant="b"),
    "salt": chain_keys(NAMESPACE, TOKENS, salt=b"a"),
    "another salt": chain_keys(NAMESPACE, TOKENS, salt=b"b"),
    "tenant and salt": chain_keys(replace(NAMESPACE, tenant="a"), TOKENS, salt=b"b"),
    "LoRA": chain_keys(NAMESPACE, TOKENS, extra=b"a"),
    "another LoRA": chain_keys(NAMESPACE, TOKENS, extra=b"b"),
    "extra that looks like a length": chain_keys(NAMESPACE, TOKENS, extra=bytes(4)),
    "image": chain_keys(NAMESPACE, TOKENS, extra=[b"image 1", b""]),
    "another image": chain_keys(NAMESPACE, TOKENS, extra=[b"image 2", b""]),
}


@pytest.mark.parametrize("name", [name for name in VARIANTS if name != "plain"])
def test_whatever_decides_the_kv_changes_every_key(name: str) -> None:
    mine = set(VARIANTS[name])
    assert len(mine) == len(VARIANTS[name]) >= 2
    for other, chain in VARIANTS.items():
        assert other == name or mine.isdisjoint(chain), f"{name} shares a key with {other}"


def test_an_image_in_the_second_block_leaves_the_first_block_shared() -> None:
    plain, image = VARIANTS["plain"], chain_keys(NAMESPACE, TOKENS, extra=[b"", b"image"])
    assert image.key(0) == plain.key(0)
    assert image.key(1) != plain.key(1)


@given(tokens=st.lists(token_ids, min_size=4, max_size=40), data=st.data())
def test_a_changed_token_changes_its_block_and_all_later_ones_only(tokens: list[int], data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(tokens) // 4 * 4 - 1))
    changed = list(tokens)
    changed[place] = data.draw(token_ids.filter(lambda token: token != tokens[place]))
    before, after = list(chain_keys(NAMESPACE, tokens)), list(chain_keys(NAMESPACE, changed))
    assert before[: place // 4] == after[: place // 4]
    assert set(before[place // 4 :]).isdisjoint(after[place // 4 :])


@given(tokens=st.lists(token_ids, max_size=40), more=st.lists(token_ids, max_size=12))
def test_keys_of_a_prefix_are_the_prefix_of_the_keys(tokens: list[int], more: list[int]) -> None:
    short, long = chain_keys(NAMESPACE, tokens), chain_keys(NAMESPACE, tokens + more)
    assert long[: len(short)] == short


def test_a_chain_is_read_by_index_and_cut_at_its_end() -> None:
    chain = VARIANTS["plain"]
    assert len(chain) == 2
    assert [chain.key(0), chain.key(1)] == list(chain)
    assert chain.key(-1) == chain.root == NAMESPACE.root_key()
    assert all(len(key) == KEY_NBYTES for key in chain)
    assert list(chain[:1]) == [chain.key(0)]
    assert chain[:5] == chain
    assert len(chain[:0]) == 0
    for outside in (2, -2):
        with pytest.raises(IndexError):
            chain.key(outside)
    for cut in (slice(1, None), slice(None, None, 2)):
        with pytest.raises(IndexError, match="chain"):
            chain[cut]
    index: Any = 0
    with pytest.raises(TypeError, match=r"chain\.key\(0\)"):
        chain[index]


def test_a_chain_of_no_whole_block_is_empty() -> None:
    for tokens in ([], [1, 2, 3]):
        chain = chain_keys(NAMESPACE, tokens)
        assert len(chain) == 0
        assert list(chain) == []


@pytest.mark.parametrize(
    "tokens",
    [
        [-1, 2, 3, 4],
        [2**32, 1, 2, 3],
        [2**64, 1, 2, 3],
        [1.0, 2.0, 3.0, 4.0],
        [1, 2.0, 3, 4],
        [True, False, True, True],
        [[1, 2], [3, 4]],
        [[1, 2], [3]],
        [None, 1],
        7,
        ["1", "2"],
        "1234",
        None,
    ],
)
def test_tokens_that_are_no_token_ids_are_refused(tokens: Any) -> None:
    with pytest.raises(ConfigError, match="token"):
        chain_keys(NAMESPACE, tokens)


@pytest.mark.parametrize("extra", [[], [b"one"], [b"one", b"two", b"three"]])
def test_extras_are_one_for_each_whole_block(extra: list[bytes]) -> None:
    with pytest.raises(ConfigError, match="2 whole blocks"):
        chain_keys(NAMESPACE, TOKENS, extra=extra)


@pytest.mark.parametrize(
    "extra", ["lora", bytearray(b"ab"), memoryview(b"ab"), ["a", "b"], [b"a", bytearray(b"b")], [1, 2], None, 7]
)
def test_an_extra_that_is_not_bytes_is_refused(extra: Any) -> None:
    with pytest.raises(ConfigError, match=r"extra.* must be bytes"):
        chain_keys(NAMESPACE, TOKENS, extra=extra)


@pytest.mark.parametrize("salt", ["salt", bytearray(b"salt"), None, 7])
def test_a_salt_that_is_not_bytes_is_refused(salt: Any) -> None:
    with pytest.raises(ConfigError, match="salt must be bytes"):
        chain_keys(NAMESPACE, TOKENS, salt=salt)


def test_bytes_of_numpy_keep_their_zeros() -> None:
    extra = np.bytes_(b"lora\0\0")
    assert chain_keys(NAMESPACE, TOKENS, extra=extra) == chain_keys(NAMESPACE, TOKENS, extra=bytes(extra))


@pytest.mark.parametrize(
    "changes",
    [
        {"model": ""},
        *({"epoch": value} for value in (-1, 2**32, True, 1.5, 1.0, "1", None, np.float64(1))),
        *(
            {field: value}
            for field in ("model", "codec", "numerics", "tenant")
            for value in (None, 7, b"bytes", "half a pair \ud800")
        ),
        *({"layout": value} for value in (None, {}, asdict(LAYOUT))),
    ],
)
def test_a_namespace_that_cannot_be_is_refused_naming_the_field(changes: dict[str, Any]) -> None:
    (field,) = changes
    with pytest.raises(ConfigError, match=field):
        replace(NAMESPACE, **changes)


@pytest.mark.parametrize("kind", [np.int64, np.uint8])
def test_an_epoch_of_numpy_is_the_same_epoch(kind: Any) -> None:
    namespace = replace(NAMESPACE, epoch=kind(3))
    assert namespace.digest == replace(NAMESPACE, epoch=3).digest
    assert type(namespace.epoch) is int


def test_values_as_wide_as_keys_give_the_keys_of_the_layout_that_does_not_say_so() -> None:
    assert list(other_layout(value_head_dim=LAYOUT.head_dim)) == list(VARIANTS["plain"])


@pytest.mark.parametrize(
    ("root", "data", "message"),
    [
        (bytes(KEY_NBYTES), b"short", "data is 5 bytes"),
        (b"short", bytes(KEY_NBYTES), "root is 5 bytes"),
        (bytes(KEY_NBYTES), bytearray(KEY_NBYTES), "data must be bytes, not a bytearray"),
        ("r" * KEY_NBYTES, b"", "root must be bytes, not a str"),
    ],
    ids=["short data", "short root", "bytearray", "text"],
)
def test_a_chain_is_whole_keys_and_a_root(root: Any, data: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        KeyChain(NAMESPACE, root, data)


@given(tokens=st.lists(st.integers(0, 2**32 - 1), max_size=40), first=st.integers(0, 5), salt=st.binary(max_size=3))
def test_a_chain_made_in_two_steps_is_the_chain_made_at_once(tokens: list[int], first: int, salt: bytes) -> None:
    extras = [bytes([index]) for index in range(len(tokens) // 4)]
    cut = min(first, len(extras))
    begun = chain_keys(NAMESPACE, tokens[: cut * 4], salt=salt, extra=extras[:cut])
    whole = extend_keys(begun, tokens[cut * 4 :], extra=extras[cut:])
    assert list(whole) == reference_keys(NAMESPACE, tokens, salt, extras)
    assert whole.root == begun.root and whole.namespace is NAMESPACE
