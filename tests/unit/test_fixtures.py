"""Disk images that earlier versions wrote (`tests/fixtures/`) stay readable, byte for byte, and newer ones are refused.

What must be found is in each folder's manifest: nothing of it is worked out here.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import struct
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.unit.store_images import PAGE, page_sum, patch, segments, snapshot

from kvterrace import FormatVersionError, KeyChain, KVLayout, Namespace, Store, chain_keys, open_store
from kvterrace.format.record import FORMAT_VERSION
from kvterrace.observe.verification import verify_store

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"
ROOT = FIXTURES.parents[1]
UNTOUCHED = 0xEE
IMAGES = {
    f"{folder.name}-{name}": (folder, image)
    for folder in sorted(FIXTURES.glob("v*"))
    for name, image in json.loads((folder / "manifest.json").read_text())["images"].items()
}


@pytest.fixture(params=IMAGES)
def image(request: pytest.FixtureRequest) -> dict[str, Any]:
    """What the manifest says of one image."""
    found: dict[str, Any] = IMAGES[request.param][1]
    return found


@pytest.fixture
def root(request: pytest.FixtureRequest, image: dict[str, Any], tmp_path: Path) -> Path:
    """The image, unpacked."""
    folder = next(folder for folder, each in IMAGES.values() if each is image)
    with tarfile.open(folder / image["archive"]) as archive:
        for entry in archive:
            path = tmp_path / "kv" / entry.name
            assert path.resolve().is_relative_to(tmp_path)
            if entry.isdir():
                path.mkdir(parents=True)
            else:
                file = archive.extractfile(entry)
                assert file is not None
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(file.read())
            path.chmod(entry.mode)
    return tmp_path / "kv"


def opened(root: Path) -> Store:
    return open_store(root, dram_bytes="1MiB", ssd_bytes="16MiB", sigterm_flush=False)


def namespace_of(chain: dict[str, Any]) -> Namespace:
    said = dict(chain["namespace"])
    return Namespace(layout=KVLayout(**said.pop("layout")), **said)


def keys_of(chain: dict[str, Any]) -> KeyChain:
    """The keys as the manifest has them, not as they would be made today."""
    data = b"".join(bytes.fromhex(block["key"]) for block in chain["blocks"])
    return KeyChain(namespace_of(chain), bytes.fromhex(chain["root"]), data)


def ends_of(store: Store, chain: dict[str, Any]) -> list[str]:
    """Read a whole chain, compare what arrived, and tell how each block ended."""
    nbytes = chain["block_nbytes"]
    out = np.full((len(chain["blocks"]), nbytes), UNTOUCHED, np.uint8)
    ends = [type(end).__name__ for end in store.wait(store.get(keys_of(chain), out), 60.0)]
    for end, block, found in zip(ends, chain["blocks"], out, strict=True):
        if end == "Hit":
            assert hashlib.sha256(found.tobytes()).hexdigest() == block["sha256"], f"wrong bytes in {chain['name']}"
        else:
            assert (found == UNTOUCHED).all()
    return ends


def wanted(chain: dict[str, Any]) -> list[str]:
    return [block["ends"] for block in chain["blocks"]]


def blocks_that(image: dict[str, Any], end: str) -> set[str]:
    return {block["key"] for chain in image["chains"] for block in chain["blocks"] if block["ends"] == end}


def test_every_format_version_has_images() -> None:
    assert [folder.name for folder in sorted(FIXTURES.glob("v*"))] == [f"v{n + 1}" for n in range(FORMAT_VERSION)]
    ends = {block["ends"] for _, image in IMAGES.values() for chain in image["chains"] for block in chain["blocks"]}
    assert ends == {"Hit", "Miss", "Corrupt"}


def test_the_archives_are_those_of_the_manifest() -> None:
    for folder, image in IMAGES.values():
        assert hashlib.sha256((folder / image["archive"]).read_bytes()).hexdigest() == image["sha256"]
    assert sum((folder / image["archive"]).stat().st_size for folder, image in IMAGES.values()) < 300 << 10


@pytest.mark.parametrize("version", range(1, FORMAT_VERSION + 1))
def test_images_are_written_once(version: int) -> None:
    before = snapshot(FIXTURES / f"v{version}")
    command = [sys.executable, "-m", f"tests.fixtures.make_v{version}"]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert answer.returncode == 1, answer
    assert answer.stderr.count("\n") == 1 and "is there already" in answer.stderr
    assert snapshot(FIXTURES / f"v{version}") == before


def test_keys_are_made_as_they_were_then(image: dict[str, Any]) -> None:
    for chain in image["chains"]:
        namespace = namespace_of(chain)
        assert namespace.digest.hex() == chain["namespace_digest"]
        assert namespace.describe() == chain["namespace"]
        assert namespace.layout.block_nbytes == chain["block_nbytes"]
        tokens = list(itertools.chain.from_iterable(range(start, stop) for start, stop in chain["tokens"]))
        extra = [bytes.fromhex(each) for each in chain["extra"]] or b""
        assert chain_keys(namespace, tokens, salt=bytes.fromhex(chain["salt"]), extra=extra) == keys_of(chain)


def test_every_block_is_found_as_it_was_written(image: dict[str, Any], root: Path) -> None:
    with opened(root) as store:
        for chain in image["chains"]:
            there = [end != "Miss" for end in wanted(chain)]
            assert store.match(keys_of(chain)).blocks == sum(there), chain["name"]
        for chain in image["chains"]:
            assert ends_of(store, chain) == wanted(chain), chain["name"]
        assert store.stats().get_corrupt_blocks == len(blocks_that(image, "Corrupt"))


def test_one_block_alone_is_found_as_well(image: dict[str, Any], root: Path) -> None:
    with opened(root) as store:
        for chain in image["chains"]:
            for index in reversed(
                range(len(chain["blocks"]))
            ):  # from the end: a bad block takes what hangs on it along
                out = np.full(chain["block_nbytes"], UNTOUCHED, np.uint8)
                (end,) = store.wait(store.get(keys_of(chain), out, start=index, stop=index + 1), 60.0)
                assert type(end).__name__ == chain["blocks"][index]["ends"], (chain["name"], index)


def test_opening_and_closing_keeps_them(image: dict[str, Any], root: Path) -> None:
    for _ in range(2):
        with opened(root) as store:
            assert store.match(keys_of(image["chains"][0])).blocks
        assert store.close()
    for turn in range(2):
        with opened(root) as store:
            for chain in image["chains"]:
                for found, end in zip(ends_of(store, chain), wanted(chain), strict=True):
                    # what was found to be bad once may be forgotten, and is never served
                    assert found == end or (turn and end == "Corrupt" and found == "Miss"), chain["name"]


def test_they_can_be_added_to(image: dict[str, Any], root: Path) -> None:
    chain = image["chains"][0]
    keys = chain_keys(namespace_of(chain), range(90_000, 90_064))
    blocks = np.random.default_rng(1).bytes(len(keys) * chain["block_nbytes"])
    with opened(root) as store:
        store.wait(store.put(keys, blocks), 60.0)
    out = bytearray(len(blocks))
    with opened(root) as store:
        assert {type(end).__name__ for end in store.wait(store.get(keys, out), 60.0)} == {"Hit"}
        assert bytes(out) == blocks
        assert [ends_of(store, each) for each in image["chains"]] == [wanted(each) for each in image["chains"]]


def test_verify_finds_what_is_wrong_and_nothing_else(image: dict[str, Any], root: Path) -> None:
    before = snapshot(root)
    found = verify_store(root)
    assert {fault.key.hex() for fault in found.faults if fault.key} == blocks_that(image, "Corrupt")
    assert found.clean == (not blocks_that(image, "Corrupt"))
    assert snapshot(root) == before


@pytest.mark.parametrize("version", [FORMAT_VERSION + 1, 65535])
def test_a_newer_store_is_refused_and_left_as_it_is(root: Path, version: int) -> None:
    marker = root / "store.json"
    said = json.loads(marker.read_text())
    marker.write_text(json.dumps({**said, "format_version": version}))
    before = snapshot(root)
    with pytest.raises(FormatVersionError, match=f"format {version}"):
        opened(root)
    assert snapshot(root) == before


@pytest.mark.parametrize("which", [0, -1])
@pytest.mark.parametrize("version", [FORMAT_VERSION + 1, 65535])
def test_a_newer_segment_is_refused_and_left_as_it_is(root: Path, which: int, version: int) -> None:
    path = segments(root)[which]
    last = path.stat().st_size - PAGE
    pages = [0, last] if path.read_bytes()[last:].startswith(b"KVTFOOTR") else [0]
    for at in pages:  # docs/design.md: version and CRC lie there in every version
        patch(path, at + 8, struct.pack("<H", version))
        page_sum(path, at, PAGE, 12)
    before = snapshot(root)
    for _ in range(2):  # the second time, too: the lock was given back
        with pytest.raises(FormatVersionError, match=f"{path.name} .* format {version}"):
            opened(root)
    after = snapshot(root)
    lock = "partitions/main/lock"  # says who had it last
    assert before.pop(lock)[0] == after.pop(lock)[0]
    assert after == before
