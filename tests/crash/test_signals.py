"""The end of a process: SIGTERM, a normal exit, a fork."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from tests.crash.kit import MiB, all_hits, chain_of, checked, child, ended, opened, stored, until

from kvterrace import StoreLockedError


def test_sigterm_flushes_and_ends_with_143(tmp_path: Path) -> None:
    process = child("sigterm", tmp_path / "kv", "none")
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    code, _, err = ended(process)
    assert (code, err) == (143, "")
    with opened(tmp_path / "kv") as store:
        all_hits(store, chain_of(0, 50))


def test_more_signals_do_not_cut_the_flush_short(tmp_path: Path) -> None:
    process = child("sigterm", tmp_path / "kv", "none")
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    for _ in range(5):
        process.send_signal(signal.SIGTERM)
        time.sleep(0.001)
    code, _, err = ended(process)
    assert (code, err) == (143, "")
    with opened(tmp_path / "kv") as store:
        all_hits(store, chain_of(0, 50))


def test_sigterm_while_the_main_thread_closes(tmp_path: Path) -> None:
    for turn in range(5):
        path = tmp_path / str(turn)
        process = child("sigterm", path, "closing")
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        time.sleep(turn * 0.002)
        process.send_signal(signal.SIGTERM)
        code, _, err = ended(process)
        assert (code, err) == (143, "")
        with opened(path) as store:
            all_hits(store, chain_of(0, 50))


def test_a_handler_of_the_process_is_left_alone(tmp_path: Path) -> None:
    process = child("sigterm", tmp_path / "kv", "own")
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    code, _, err = ended(process)
    assert (code, err) == (7, "")


def test_sigterm_inside_a_put_does_not_deadlock(tmp_path: Path) -> None:
    for turn in range(8):
        path = tmp_path / str(turn)
        process = child("sigterm_in_put", path)
        assert process.stdout is not None and process.stdout.readline() == "put 0\n"
        time.sleep(0.003 * turn)
        process.send_signal(signal.SIGTERM)
        code, out, err = ended(process)
        assert code == 143, err
        with opened(path, ssd_bytes=256 * MiB) as store:
            for number in range(out.count("\n")):
                all_hits(store, chain_of(number, 4))


@pytest.mark.parametrize("how", ["kept", "dropped"])
def test_a_normal_exit_flushes_stores_that_nobody_closed(tmp_path: Path, how: str) -> None:
    code, out, err = ended(child("exits", tmp_path / "kv", how))
    assert (code, out, err) == (0, f"done {how == 'kept'}\n", "")
    with opened(tmp_path / "kv") as store:
        all_hits(store, chain_of(0, 50))


@pytest.mark.parametrize(("how", "code"), [("exit", 0), ("close", 0), ("sigterm", -signal.SIGTERM)])
def test_a_forked_child_ends_without_touching_its_parents_store(tmp_path: Path, how: str, code: int) -> None:
    process = child("forks", tmp_path / "kv", how)
    assert process.stdout is not None and process.stdout.readline() == f"child ended {code}\n", ended(process)
    with pytest.raises(StoreLockedError, match=str(process.pid)):  # the parent's lock stayed
        opened(tmp_path / "kv")
    status, out, err = ended(process)
    assert (status, out) == (0, "closed True\n"), err
    with opened(tmp_path / "kv") as store:
        all_hits(store, chain_of(0, 20))
        all_hits(store, chain_of(1, 20))


def test_a_forked_child_that_lives_on_does_not_keep_the_lock(tmp_path: Path) -> None:
    process = child("forks", tmp_path / "kv", "outlives")
    assert process.stdout is not None
    number = int(process.stdout.readline().split()[1])
    process.wait(60)
    try:
        with opened(tmp_path / "kv") as store:
            all_hits(store, chain_of(1, 20))
    finally:
        os.kill(number, signal.SIGKILL)


def test_a_second_writer_is_refused_and_nothing_changes(tmp_path: Path) -> None:
    process = child("locked", tmp_path / "kv")
    assert process.stdout is not None and process.stdout.readline() == "open\n", ended(process)
    with pytest.raises(StoreLockedError, match=rf"pid {process.pid}\b") as caught:
        opened(tmp_path / "kv")
    assert "\n" not in str(caught.value)
    with opened(tmp_path / "kv", partition="other") as store:
        stored(store, chain_of(1, 4))
    code, _, err = ended(process)  # closes its stdin, on which it waits
    assert code == 0, err
    with opened(tmp_path / "kv") as store:
        all_hits(store, chain_of(0, 4))


def test_a_killed_writer_leaves_no_lock(tmp_path: Path) -> None:
    process = child("locked", tmp_path / "kv")
    assert process.stdout is not None and process.stdout.readline() == "open\n"
    process.kill()
    ended(process)
    with opened(tmp_path / "kv") as store:
        checked(store, chain_of(0, 4))


def test_the_same_process_cannot_open_a_partition_twice(tmp_path: Path) -> None:
    store = opened(tmp_path / "kv")
    with pytest.raises(StoreLockedError):
        opened(tmp_path / "kv")
    stored(store, chain_of(0, 4))
    store.close()
    until(lambda: store.closed)
    with opened(tmp_path / "kv") as again:
        all_hits(again, chain_of(0, 4))
