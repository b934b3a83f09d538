"""Opening a store on a drive that does not answer: an error that names the drive, after a bounded wait."""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.harness import SMALL, Box, chain_of

from kvterrace import open_store
from kvterrace.errors import StoreUnusableError
from kvterrace.io.base import FileInfo, IoKind, IoRequest, IoResult
from kvterrace.io.fake import FakeDevice
from kvterrace.io.posix import PosixEngine
from kvterrace.tiers import answering


def hang(device: FakeDevice, nth: int) -> None:
    """The `nth` call that the device is asked for, from 1 on, does not return."""
    submit, calls = device.submit, 0

    def without_one(requests: Sequence[IoRequest]) -> None:
        nonlocal calls
        for request in requests:
            calls += request.kind is IoKind.CALL
            if request.kind is not IoKind.CALL or calls != nth:
                submit([request])

    device.submit = without_one  # type: ignore[method-assign]


@pytest.mark.parametrize("nth", [1, 2, 4, 5])  # the folder is listed, three segments read, the quarantine log
@pytest.mark.parametrize("silent", [0, 1])
def test_a_drive_that_hangs_while_a_store_is_opened_is_named(tmp_path: Path, silent: int, nth: int) -> None:
    box = Box(tmp_path, drives=2, segments=8, dram_blocks=40, after_s=0.0, batch_nbytes=8192)
    for number in range(30):
        box.put_now(chain_of(SMALL, [number, 1]))
    assert box.store.flush(10.0)
    assert [len(volume.space.segments) for volume in box.store._core.volumes] >= [3, 3]
    assert box.store.close(10.0)
    box.devices = [device.crash_image(lambda _: True) for device in box.devices]
    files = [sum(path.suffix == ".seg" for path in device.snapshot()) for device in box.devices]
    hang(box.devices[silent], nth if nth < 5 else files[silent] + 2)
    before_s = box.clock.monotonic_s()
    with pytest.raises(StoreUnusableError, match=re.escape(str(tmp_path / f"d{silent}"))) as caught:
        box._open()
    assert str(tmp_path / f"d{1 - silent}") not in str(caught.value)
    assert 60.0 <= box.clock.monotonic_s() - before_s <= 61.0


def test_a_slow_drive_has_all_the_time_as_long_as_it_answers(tmp_path: Path) -> None:
    """A segment every 50 s, all of them together longer than the bound."""
    box = Box(tmp_path, segments=8, dram_blocks=40, after_s=0.0)
    for number in range(12):
        box.put_now(chain_of(SMALL, [number, 1]))
        assert box.store.flush(10.0)
    assert len(box.store._core.volumes[0].space.segments) >= 3
    assert box.store.close(10.0)
    before_s = box.clock.monotonic_s()
    box.device = box.device.crash_image(lambda _: True)
    poll, held = box.device.poll, list[IoResult]()

    def slow(timeout_s: float) -> list[IoResult]:
        held.extend(poll(0.0))
        box.clock.advance(timeout_s)
        due = (box.clock.monotonic_s() - before_s) % 50.0 < timeout_s
        return [held.pop(0)] if held and due else []

    box.device.poll = slow  # type: ignore[method-assign]
    box.store = box._open()
    assert box.clock.monotonic_s() - before_s >= 200.0
    assert box.store.match(chain_of(SMALL, [11, 1])).blocks == 2


def test_open_store_gives_up_on_a_folder_that_hangs_and_can_be_called_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVTERRACE_ENGINE", "posix")
    monkeypatch.setattr(answering, "SILENT_S", 1)
    goes_on = threading.Event()

    def hanging(_engine: PosixEngine, _folder: Path) -> Sequence[FileInfo]:
        goes_on.wait(60.0)
        return []

    with monkeypatch.context() as patched:
        patched.setattr(PosixEngine, "list", hanging)
        with pytest.raises(StoreUnusableError, match=re.escape(str(tmp_path / "store"))):
            open_store(tmp_path / "store", dram_bytes="1MiB", ssd_bytes="4MiB")
    goes_on.set()
    with open_store(tmp_path / "store", dram_bytes="1MiB", ssd_bytes="4MiB") as store:
        assert store.stats().ssd_segments == 0
