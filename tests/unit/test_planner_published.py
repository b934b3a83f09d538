"""Figures that others published, predicted from their own set-ups: nothing here is fitted but where it says so."""

from __future__ import annotations

import pytest

from kvterrace.planner.compare import side_of
from kvterrace.planner.hardware import load_machine
from kvterrace.planner.models import load_model
from kvterrace.planner.plan import make_plan
from kvterrace.planner.restore import first_token_s
from kvterrace.planner.workload import Workload

#: The unit in which the bandwidths were published.
UNIT = 1.024e9
PROMPT = 30_208
#: Requests at once, bandwidth while busy in that unit, median time to first token in seconds.
LOCAL = [(8, 5.99, 10.17), (16, 6.17, 17.31), (32, 6.42, 35.73)]
ARRAY = [(8, 7.49, 7.53), (16, 8.12, 11.85), (32, 9.29, 26.35)]
THE_SIXTH = (16, 8.12, 11.85)


def predicted_s(requests: int, rate: float) -> float:
    nbytes = load_model("qwen3-coder-480b").sequence_nbytes(PROMPT)
    return first_token_s(requests, nbytes / (rate * UNIT), 0.0, local=requests)


@pytest.mark.parametrize(("requests", "rate", "ttft_s"), [*LOCAL, *(one for one in ARRAY if one != THE_SIXTH)])
def test_first_tokens_of_cold_restores(requests: int, rate: float, ttft_s: float) -> None:
    assert predicted_s(requests, rate) == pytest.approx(ttft_s, rel=0.15)


def test_the_sixth_does_not_follow_from_its_own_set_up() -> None:
    """16 x 7.67 GB at 8.31 GB/s take 14.8 s. In 11.85 s only 98.5 GB can have come, the KV of 12.8 requests: a median
    that is below the time for all bytes means that not all requests were served evenly.
    """
    requests, rate, ttft_s = THE_SIXTH
    nbytes = 253_952 * PROMPT
    assert predicted_s(requests, rate) == pytest.approx(14.76, abs=0.01)
    assert predicted_s(requests, rate) / ttft_s == pytest.approx(1.246, abs=0.001)
    assert rate * UNIT * ttft_s / nbytes == pytest.approx(12.84, abs=0.01)
    # Served strictly in turn, the median of 16 would have ended with the 8th or 9th: 8.5 / 16 of the time.
    assert 8.5 / 16 < ttft_s / predicted_s(requests, rate) < 1
    # No bandwidth that was published would do: all bytes in that time are 10.1 in that unit.
    assert requests * nbytes / ttft_s / UNIT > max(rate for _, rate, _ in ARRAY)


def test_serial_against_parallel_reads() -> None:
    """37.97 s at 0.98 GB/s, 9.30 s at 5.23 GB/s, 16 requests of Qwen2.5-32B: two equations, two unknowns."""
    nbytes = (37.97 - 9.30) / (1 / 0.98e9 - 1 / 5.23e9)
    fixed_s = 9.30 - nbytes / 5.23e9
    assert nbytes == pytest.approx(34.6e9, rel=0.002)
    assert fixed_s == pytest.approx(2.7, abs=0.02)
    per_token = load_model("qwen2.5-32b").nbytes_per_token()
    tokens = nbytes / 16 / per_token
    assert tokens == pytest.approx(8_243, abs=1)  # about 8.2 K
    # And back: 16 requests of so many tokens at either bandwidth are the published times.
    sequence = load_model("qwen2.5-32b").sequence_nbytes(round(tokens))
    for rate, ttft_s in ((0.98e9, 37.97), (5.23e9, 9.30)):
        ours = first_token_s(16, sequence / rate, 0.0, local=16, first_byte_s=fixed_s)
        assert ours == pytest.approx(ttft_s, rel=0.001)


def test_two_accelerators_and_a_drive_read_29_gb_for_each_token() -> None:
    """128 K of Llama-3.1-70B on 2 x 80 GB: 42.9 GB of KV, 70 % of 160 - 141.1 GB hold 13.2 of it, 29.7 are left."""
    load = Workload(131_072, concurrency=1, reuse=0.8)
    plan = make_plan(load_model("llama-3.1-70b"), load_machine("2x-80gb-ssd"), load)
    ssd = next(one for one in plan.decoding.spills if one.tier == "ssd")
    assert ssd.overflow_nbytes == pytest.approx(29.7e9, rel=0.002)
    assert ssd.exact_tpot_s == pytest.approx(29.72e9 / (7e9 * 0.9), rel=0.002)  # seconds a token
    # Sparse: 2,048 of 131,072 tokens, a 64th of it.
    assert ssd.sparse_tpot_s == pytest.approx(ssd.exact_tpot_s / 64, rel=0.01)
    two, eight = side_of(plan), side_of(make_plan(load_model("llama-3.1-70b"), load_machine("8x-80gb"), load))
    assert two.price_usd < eight.price_usd / 3
    assert eight.decodes_from == "hbm"
    assert eight.tpot_exact_s is not None
    assert eight.tpot_exact_s < 0.01
    assert two.ttft_loaded_s is not None
    assert two.ttft_loaded_s < two.ttft_computed_s / 5


def test_tiered_in_front_of_all_hbm_at_batch_8() -> None:
    """R36: 128 K of context, batch 8; 2 s from HBM. Eight requests of 40 GiB in 2 s are 172 GB/s: no drive does that, a
    machine of eight accelerators' links (384 GB/s) can.
    """
    nbytes = load_model("llama-3.1-70b").sequence_nbytes(131_072)
    assert 8 * nbytes / 2.0 == pytest.approx(171.8e9, rel=0.001)
    assert load_machine("8x-h100").accelerator_link.usable_bytes_per_s == pytest.approx(384e9)


#: Throughput of the array against the local drive, as published, by requests at once.
GAINS = {8: 0.29, 16: 0.40, 32: 0.355}


def test_gains_follow_from_the_first_tokens_and_one_decoding_time() -> None:
    """A closed loop answers requests / (first token + decoding) a second. One figure gives the decoding time; the two
    others follow from it.
    """
    local = {requests: ttft_s for requests, _, ttft_s in LOCAL}
    array = {requests: ttft_s for requests, _, ttft_s in ARRAY}
    decode_s = (local[8] - (1 + GAINS[8]) * array[8]) / GAINS[8]
    assert decode_s == pytest.approx(1.57, abs=0.01)
    for requests in (16, 32):
        gain = (local[requests] + decode_s) / (array[requests] + decode_s) - 1
        assert gain == pytest.approx(GAINS[requests], abs=0.025)


def test_18_times_the_tokens_do_not_follow_from_13_times_the_first_token() -> None:
    """149.5 s -> 11.85 s and 4.1 -> 74.9 tokens/s at 16 requests: in a closed loop n x answer / (first token +
    decoding) is the throughput, and both figures hold only for a decoding time below zero. A median is not a mean.
    """
    answer = (149.5 - 11.85) / (16 / 4.1 - 16 / 74.9)  # tokens, of both equations
    decode_s = 16 * answer / 74.9 - 11.85
    assert answer == pytest.approx(37.3, abs=0.1)
    assert decode_s == pytest.approx(-3.9, abs=0.1)
