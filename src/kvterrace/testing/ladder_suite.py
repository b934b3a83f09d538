"""What every ladder must keep, whatever its tiers: exercised through `Store`, as its users do."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import numpy as np

from kvterrace.errors import StoreClosedError
from kvterrace.keys import KeyChain, chain_keys
from kvterrace.testing.engine_suite import raises
from kvterrace.testing.ladder_kit import UNTOUCHED, WAIT_S, LadderKit, all_are
from kvterrace.types import Busy, Corrupt, DeviceFailed, Expired, Hit, Miss, Present, Rejected, Stale, Stored, Tier

__all__ = ["LadderConformance"]


class LadderConformance(LadderKit):
    """Subclass it and say how to open the ladder; pytest collects the subclass. See docs/guide/testing-a-tier.md."""

    # Put and get

    def test_every_byte_comes_back(self) -> None:
        chain = self.chain(1, 8)
        assert self.put(chain) == [Stored(Tier.DRAM)] * 8
        assert all_are(self.get(chain), Hit)
        assert all_are(self.get(chain, 3, 5), Hit)

    def test_part_arrays_of_any_strides(self) -> None:
        chain, layout = self.chain(1, 4), self.LAYOUT
        data = self.content(chain)
        parts, at = [], 0
        for nbytes in layout.part_nbytes:
            wide = np.zeros((4, 2, nbytes), np.uint8)
            wide[:, 1] = data[:, at : at + nbytes]
            parts.append(wide[:, 1])
            at += nbytes
        assert all_are(self.store.wait(self.store.put(chain, parts), WAIT_S), Stored)
        assert all_are(self.get(chain), Hit)
        back = [np.zeros((4, 2, nbytes), np.uint8)[:, 0] for nbytes in layout.part_nbytes]
        assert all_are(self.store.wait(self.store.get(chain, back), WAIT_S), Hit)
        assert all(np.array_equal(a, b) for a, b in zip(parts, back, strict=True))

    def test_a_block_is_stored_once(self) -> None:
        chain = self.chain(1, 4)
        self.put(chain, 0, 2)
        outcomes = self.put(chain)
        assert all_are(outcomes[:2], Present) and all_are(outcomes[2:], Stored)
        assert all_are(self.get(chain), Hit)

    def test_what_is_not_there_is_a_miss_and_not_a_fault(self) -> None:
        chain = self.chain(1, 8)
        assert self.get(chain) == [Miss()] * 8
        self.put(chain, 0, 5)
        outcomes = self.get(chain)
        assert all_are(outcomes[:5], Hit) and outcomes[5:] == [Miss()] * 3
        stats = self.store.stats()
        assert (stats.get_miss_blocks, stats.get_failed_blocks, stats.get_corrupt_blocks) == (11, 0, 0)

    def test_nothing_asked_is_nothing_answered(self) -> None:
        chain = self.chain(1, 2)
        assert self.get(chain, 1, 1) == []
        assert self.put(chain, 2, 2) == []
        assert self.store.match(chain[:0]).blocks == 0
        with raises(IndexError):
            self.get(chain, 0, 3)

    def test_match_is_the_longest_prefix(self) -> None:
        chain = self.chain(1, 8)
        self.put(chain, 0, 6)
        assert [self.store.match(chain[:n]).blocks for n in (0, 1, 6, 8)] == [0, 1, 6, 6]
        assert self.store.match(chain).tokens == 6 * self.LAYOUT.block_tokens
        assert self.store.match(self.chain(2, 8)).blocks == 0
        before = self.store.stats()
        self.store.match(chain)
        assert self.store.stats().get_miss_blocks == before.get_miss_blocks

    def test_match_never_reaches_past_a_hole(self) -> None:
        chain = self.chain(1, 8)
        outcomes = self.put(chain, 4, 8)  # their prefix is nowhere
        assert self.store.match(chain).blocks == 0
        self.put(chain, 0, 4)
        found = self.store.match(chain).blocks
        assert found == (8 if all_are(outcomes, Stored) else 4)
        assert all_are(self.get(chain, 0, found), Hit)

    def test_other_namespaces_tenants_and_salts_never_match(self) -> None:
        chain = self.chain(1, 4)
        self.put(chain)
        tokens = np.random.default_rng(1).integers(0, 50_000, 4 * self.LAYOUT.block_tokens)
        others = [self.chain(1, 4, tenant="b"), self.chain(1, 4, epoch=1), self.chain(1, 4, numerics="eager")]
        others.append(chain_keys(chain.namespace, tokens, salt=b"x"))
        others.append(chain_keys(chain.namespace, tokens, extra=b"lora"))
        for other in others:
            assert self.store.match(other).blocks == 0
            assert self.get(other) == [Miss()] * 4
        assert self.store.match(self.chain(1, 4)).blocks == 4

    # Layers

    def test_layers_are_read_by_themselves(self) -> None:
        chain = self.chain(1, 6)
        self.put(chain)
        self._check_layers(chain)
        if self.durable:
            self.restart()
            self._check_layers(chain)

    def _check_layers(self, chain: KeyChain) -> None:
        layout, right = self.LAYOUT, self.content(chain)
        sizes = layout.part_nbytes
        for layers in (range(1), range(1, 3), range(layout.layers)):
            first, last = layout.layer_parts(layers.start).start, layout.layer_parts(layers.stop - 1).stop
            out = np.full((len(chain), sum(sizes[first:last])), UNTOUCHED, np.uint8)
            outcomes = self.store.wait(self.store.get(chain, out, layers=layers), WAIT_S)
            assert all_are(outcomes, Hit)
            assert np.array_equal(out, right[:, sum(sizes[:first]) : sum(sizes[:last])])

    # Room

    def test_more_than_dram_holds(self) -> None:
        chains = [self.chain(name, 6) for name in range(1, 13)]  # three times DRAM
        accepted = [self.put(chain) for chain in chains]
        if self.has_lower_tier:
            assert all(all_are(outcomes, Stored) for outcomes in accepted)
        self._nothing_accepted_is_lost(chains, accepted)

    def test_a_burst_is_taken_or_told_to_wait(self) -> None:
        chains = [self.chain(name, 6) for name in range(1, 13)]
        contents = [self.content(chain) for chain in chains]
        transfers = [
            self.store.put(chain, content, deadline_s=WAIT_S) for chain, content in zip(chains, contents, strict=True)
        ]
        outcomes = [self.store.wait(transfer, WAIT_S) for transfer in transfers]
        assert all(transfer.done for transfer in transfers)
        assert all(isinstance(one, (Stored, Busy, Rejected)) for some in outcomes for one in some)
        self._nothing_accepted_is_lost(chains, outcomes)

    def _nothing_accepted_is_lost(self, chains: list[KeyChain], accepted: list[Any]) -> None:
        for chain, outcomes in zip(chains, accepted, strict=True):
            count = next((n for n, one in enumerate(outcomes) if not isinstance(one, (Stored, Present))), len(outcomes))
            found = self.get(chain, 0, count)
            assert all_are(found, Hit) if self.has_lower_tier else all(isinstance(one, (Hit, Miss)) for one in found)

    def test_no_room_is_busy_and_costs_nobody_anything(self) -> None:
        held = [self.chain(name, 6) for name in range(1, 5)]  # all of DRAM
        for chain in held:
            self.put(chain)
        pins = [self.store.pin(chain) for chain in held]
        more = self.chain(9, 4)
        outcomes = self.put(more, deadline_s=0.05)
        assert all(isinstance(one, (Stored, Busy, Rejected)) for one in outcomes)
        for chain, pin in zip(held, pins, strict=True):
            assert all_are(self.get(chain, 0, pin.blocks), Hit)
            pin.release()
        assert all_are(self.put(more), Stored | Present)
        assert all_are(self.get(more), Hit)

    def test_what_is_pinned_stays(self) -> None:
        chain = self.chain(1, 6)
        self.put(chain)
        with self.store.pin(chain) as pin:
            assert pin.blocks == 6
            for name in range(2, 14):
                self.put(self.chain(name, 6))
            assert self.store.match(chain).blocks == 6
            assert all_are(self.get(chain), Hit)
        pin.release()

    def test_prefetch_changes_nothing_but_the_tier(self) -> None:
        chains = [self.chain(name, 6) for name in range(1, 9)]
        for chain in chains:
            self.put(chain)
        transfer = self.store.prefetch(chains[0])
        outcomes = self.store.wait(transfer, WAIT_S)
        assert transfer.done and all(isinstance(one, (Hit, Miss, Busy)) for one in outcomes)
        assert all(isinstance(one, (Hit, Miss)) for one in self.get(chains[0]))

    # Giving up

    def test_invalidated_blocks_are_gone_and_can_come_back(self) -> None:
        chain, fork = self.chain(1, 8), self.chain(2, 4)
        self.put(chain)
        self.put(fork)
        if self.durable:
            self.restart()
        self.store.invalidate(chain, start=3)
        assert self.store.match(chain).blocks == 3
        outcomes = self.get(chain)
        assert all_are(outcomes[:3], Hit) and outcomes[3:] == [Miss()] * 5
        assert all_are(self.get(fork), Hit)
        if self.durable:
            self.restart()
            assert self.store.match(chain).blocks == 3
        assert all_are(self.put(chain, 3, 8), Stored)
        assert all_are(self.get(chain), Hit)
        if self.durable:
            self.restart()
            assert all_are(self.get(chain), Hit)

    # Time

    def test_a_deadline_is_kept_and_the_buffer_left_alone(self) -> None:
        chain = self.chain(1, 6)
        self.put(chain)
        assert all(isinstance(one, (Hit, Expired)) for one in self.get(chain, deadline_s=0.0))
        assert all_are(self.get(chain, deadline_s=WAIT_S), Hit)

    def test_a_lower_tier_that_stalls_ends_in_expired(self) -> None:
        stall = self.stall()
        if stall is None or not self.durable:
            return
        chain = self.chain(1, 6)
        self.put(chain)
        self.restart()
        out = np.full_like(self.content(chain), UNTOUCHED)
        with stall:
            transfer = self.store.get(chain, out, deadline_s=0.05)
            outcomes = self.store.wait(transfer, WAIT_S)
            assert transfer.done and outcomes == [Expired()] * 6
            assert self.store.match(chain).blocks == 6  # nobody else waits
        assert all_are(self.get(chain), Hit)
        assert (out == UNTOUCHED).all(), "a late completion has touched the caller's buffer"

    # Across restarts

    def test_what_was_flushed_is_there_after_a_restart(self) -> None:
        if not self.durable:
            return
        chains = [self.chain(name, 6) for name in range(1, 7)]
        for chain in chains:
            self.put(chain)
        for _ in range(3):
            self.restart()
            for chain in chains:
                match = self.store.match(chain)
                assert match.blocks == 6 and Tier.DRAM not in match.tiers, f"found {match.tiers}"
                assert all_are(self.get(chain), Hit)
                assert all_are(self.put(chain), Present)

    def test_damage_is_told_from_a_miss_and_from_a_hit(self) -> None:
        chain = self.chain(1, 6)
        self.put(chain)
        if not self.durable:
            return
        assert self.store.flush(WAIT_S)
        self.store.close()
        harmed = self.damage(chain.key(2))
        self.store = self.open_ladder()
        if not harmed:
            return
        outcomes = self.get(chain)
        assert isinstance(outcomes[2], (Corrupt, Stale, DeviceFailed)), f"damage answers {outcomes[2]}"
        assert outcomes[2].where and outcomes[2].reason
        assert all_are([*outcomes[:2], *outcomes[3:]], Hit)
        assert self.store.match(chain).blocks == 2
        assert self.get(chain, 2, 3) == [Miss()]
        assert all_are(self.put(chain, 2, 3), Stored)
        assert all_are(self.get(chain), Hit)

    # Threads, ends

    def test_threads_share_a_store(self) -> None:
        shared = self.chain(1, 6)
        faults: list[BaseException] = []

        def work(name: int) -> None:
            try:
                for turn in range(4):
                    mine = self.chain(100 * name + turn, 5)
                    for chain in (shared, mine):
                        self.put(chain, deadline_s=WAIT_S)
                        self.get(chain)
                        self.store.match(chain)
                    with self.store.pin(mine) as pin:
                        assert all_are(self.get(mine, 0, pin.blocks), Hit)
                    self.store.invalidate(mine, start=2)
            except BaseException as error:  # noqa: BLE001 - handed to the test's own thread
                faults.append(error)

        threads = [threading.Thread(target=work, args=(name,)) for name in range(2, 6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * WAIT_S)
            assert not thread.is_alive(), "a thread hangs"
        if faults:
            raise faults[0]
        assert all_are(self.put(shared), Stored | Present)
        assert all_are(self.get(shared), Hit)

    def test_every_block_is_counted_once(self) -> None:
        chain = self.chain(1, 6)
        for stop in (2, 4, 6):
            self.put(chain, 0, stop)
            self.get(chain)
        stats = self.store.stats()
        gets = [getattr(stats, name) for name in stats.__slots__ if name.startswith("get_")]
        puts = [getattr(stats, name) for name in stats.__slots__ if name.startswith("put_")]
        assert (sum(gets), sum(puts)) == (18, 12)

    def test_a_closed_store_says_so(self) -> None:
        chain = self.chain(1, 2)
        self.put(chain)
        self.store.close()
        assert self.store.closed
        self.store.close()
        with raises(StoreClosedError):
            self.store.match(chain)
        with raises(StoreClosedError):
            self.get(chain)
        with contextlib.suppress(StoreClosedError):
            self.store.flush(1.0)
        self.store.stats()
