"""Each step of a plan's arithmetic, with its numbers and units: what `--explain` shows.

The expression of a step, with `x` for times, evaluates to its result: a test does so.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby

from kvterrace.planner.cost import AMORTISED_YEARS
from kvterrace.planner.layers import Layer, Model
from kvterrace.planner.plan import Plan
from kvterrace.planner.sizing import KV_SHARE_OF_FREE
from kvterrace.planner.timing import attended_tokens, prefill_flops
from kvterrace.planner.units import bandwidth, duration, gb, gib, share, usd

__all__ = ["Step", "steps"]


@dataclass(frozen=True, slots=True)
class Step:
    """One step.

    Attributes:
        title: what is worked out.
        expression: with numbers; `x` is times, `floor` rounds down.
        result: its value, in `unit`.
        shown: the value for people, in powers of two and of ten where it is bytes.
        source: of the formula or of its figures.
    """

    title: str
    expression: str
    result: float
    unit: str
    shown: str
    source: str


def steps(plan: Plan) -> list[Step]:
    """All of them, in the order of the work."""
    made = [*_kv(plan), *_hbm(plan), *_time(plan), *_paths(plan), *_point(plan), *_wear(plan), *_cost(plan)]
    return list(made)


def _bytes(title: str, expression: str, result: float, source: str) -> Step:
    return Step(title, expression, result, "bytes", f"{result:,.0f} B = {gib(result)} = {gb(result)}", source)


def _seconds(title: str, expression: str, result: float, source: str) -> Step:
    return Step(title, expression, result, "seconds", duration(result), source)


def _rate(title: str, expression: str, result: float, source: str) -> Step:
    return Step(title, expression, result, "bytes a second", bandwidth(result), source)


def _groups(layers: Iterable[Layer]) -> list[tuple[int, Layer]]:
    """How many layers there are of each kind that caches."""
    key = [one for one in layers if one.caches]
    kinds = sorted(key, key=lambda one: (one.kind, one.window, one.elements_per_token()))
    grouped = groupby(kinds, key=lambda one: (one.kind, one.window, one.elements_per_token(), one.state, one.conv))
    found = []
    for _, members in grouped:
        listed = list(members)
        found.append((len(listed), listed[0]))
    return found


def _elements(layer: Layer, tp: int = 1) -> str:
    heads = layer.kv_heads if layer.replicated else -(-layer.kv_heads // tp)
    dims = f"{heads} x ({layer.key_dim} + {layer.value_dim})" if layer.value_dim else f"{layer.key_dim}"
    return f"({dims} + {layer.indexer_dim})" if layer.indexer_dim else f"({dims})"


def _on_fullest_rank(plan: Plan) -> str:
    """A sequence on the rank that holds most of it."""
    setup = plan.setup
    model, tp, tokens = setup.model, setup.parallel.tp, setup.workload.context_tokens
    element, terms = model.element_nbytes, []
    fullest = max(model.stages(setup.parallel.pp), key=lambda stage: model.sequence_nbytes(tokens, tp, stage))
    for count, layer in _groups(fullest):
        if layer.elements_per_token():
            terms.append(f"{count} x {_elements(layer, tp)} x {element} x {layer.kept_tokens(tokens)}")
        if layer.state or layer.conv:
            terms.append(f"{count} x {layer.state_nbytes(element, tp)}")
    return " + ".join(terms) or "0"


def _kv(plan: Plan) -> Iterator[Step]:
    setup = plan.setup
    model, load = setup.model, setup.workload
    element, tokens = model.element_nbytes, load.context_tokens
    per_token, per_sequence = [], []
    for count, layer in _groups(model.layers):
        if layer.elements_per_token():
            one = f"{count} x {_elements(layer)} x {element}"
            per_token.append(one)
            yield _bytes(
                f"{count} layers of {layer.kind}, KV of one token",
                one,
                count * layer.elements_per_token() * element,
                f"layers x KV heads x (K + V elements) x bytes of {model.kv_dtype}; {model.source}",
            )
            per_sequence.append(f"{one} x {layer.kept_tokens(tokens)}")
        if layer.state or layer.conv:
            state = f"{count} x ({layer.state} x {layer.state_nbytes_per_element} + {layer.conv} x {element})"
            per_sequence.append(state)
            yield _bytes(
                f"{count} layers of {layer.kind}, state of a sequence",
                state,
                count * layer.state_nbytes(element),
                "layers x (elements of the state + of the convolution's)",
            )
    if per_token:
        yield _bytes(
            "KV of one token, all layers", " + ".join(per_token), model.nbytes_per_token(), "sum over the layers"
        )
    sequence = model.sequence_nbytes(tokens)
    source = "tokens that each layer keeps: all, or its window"
    yield _bytes(f"KV of a sequence of {tokens:,} tokens", " + ".join(per_sequence) or "0", sequence, source)
    total = f"{load.concurrency} x {sequence}"
    yield _bytes(f"KV of all {load.concurrency}", total, plan.total_nbytes, "concurrency x sequence")
    for tier, nbytes in plan.split.items():
        part = nbytes / plan.total_nbytes if plan.total_nbytes else 0.0
        shown = f"{plan.total_nbytes} x {part:.12g}"
        yield _bytes(f"  of it in {tier}, if idle or sparsely read ({share(part)})", shown, nbytes, plan.split_source)


def _hbm(plan: Plan) -> Iterator[Step]:
    budget, model, parallel = plan.budget, plan.setup.model, plan.setup.parallel
    yield _bytes(
        "weights on one accelerator",
        f"{model.weights_nbytes} / {parallel.ranks}",
        model.weights_nbytes / parallel.ranks,
        f"{model.params / 1e9:.1f} billion weights over tp {parallel.tp} x pp {parallel.pp}",
    )
    free = f"{budget.rank_memory_nbytes} - {budget.rank_weights_nbytes}"
    yield _bytes("  left beside them", free, budget.rank_free_nbytes, plan.setup.machine.accelerator.source)
    if not budget.weights_fit:
        return
    room = f"floor({KV_SHARE_OF_FREE} x {budget.rank_free_nbytes})"
    yield _bytes("  of it for KV", room, budget.rank_kv_nbytes, "70 %; the rest is for activations and workspace")
    yield _bytes(
        "KV of a sequence on the fullest accelerator",
        _on_fullest_rank(plan),
        budget.rank_sequence_nbytes,
        "KV heads divided over tp, latents and too few KV heads replicated; layers over pp",
    )
    if budget.rank_sequence_nbytes:
        fit = f"{budget.instances} x floor({budget.rank_kv_nbytes} / {budget.rank_sequence_nbytes})"
        shown = f"{budget.sequences:,}"
        yield Step("sequences that HBM holds", fit, budget.sequences, "sequences", shown, "instances x room / sequence")


def _attention(model: Model, tokens: int) -> str:
    """Attention's FLOPs, by kinds of layers."""
    kinds: dict[str, int] = {}
    for layer in model.layers:
        if layer.query_heads:
            pairs = attended_tokens(0, tokens, layer.chosen or layer.window)
            one = f"2 x {layer.query_heads} x ({layer.qk_dim} + {layer.v_dim}) x {pairs}"
            if layer.index_heads:
                one += f" + 2 x {layer.index_heads} x {layer.indexer_dim} x {attended_tokens(0, tokens, 0)}"
            kinds[one] = kinds.get(one, 0) + 1
    return " + ".join(f"{count} x ({one})" for one, count in kinds.items()) or "0"


def _time(plan: Plan) -> Iterator[Step]:
    engine, load = plan.setup.engine, plan.setup.workload
    model, tokens = engine.model, load.prompt_tokens
    matrices, attention = prefill_flops(model, 0, tokens)
    inner = model.active_params - model.output_params
    yield Step(
        f"FLOPs of the weights for a prompt of {tokens:,} tokens",
        f"2 x {tokens} x {inner} + 2 x {model.output_params}",
        matrices,
        "FLOP",
        f"{matrices:.3g}",
        "2 for each weight and token (arXiv 2001.08361); the output projection once",
    )
    yield Step(
        "FLOPs of attention",
        _attention(model, tokens),
        attention,
        "FLOP",
        f"{attention:.3g}",
        "layers x 2 x heads x (K + V elements) x attended tokens, all tokens added up (causal, windows)",
    )
    rates = f"{matrices} / {engine.matrix_flops:.12g} + {attention} / {engine.attention_flops:.12g}"
    read = f"{model.touched_nbytes(tokens):.12g} / {engine.memory_bytes_per_s:.12g}"
    efficiency = engine.accelerator.compute_efficiency
    yield _seconds(
        "time to compute that prompt",
        f"max({rates}, {read})",
        engine.prefill_s(0, tokens),
        f"roofline: {share(efficiency)} of the peak of {engine.parallel.ranks} accelerators, or reading the weights",
    )


def _paths(plan: Plan) -> Iterator[Step]:
    setup = plan.setup
    load = setup.workload
    sequence = setup.model.sequence_nbytes(load.context_tokens)
    for path in setup.paths():
        terms = [f"{path.usable_bytes_per_s[name]:.12g} / {times:.12g}" for name, times in path.crossings.items()]
        links = ", ".join(f"{name} {times:g} x" for name, times in path.crossings.items())
        title = f"{path.tier} to HBM, through its narrowest link ({path.bottleneck})"
        yield _rate(title, f"min({', '.join(terms)})", path.bytes_per_s, f"usable bandwidth / crossings: {links}")
        expression = f"{path.first_byte_s:.12g} + {sequence} / {path.bytes_per_s:.12g}"
        title = f"  to load {load.context_tokens:,} tokens from {path.tier}"
        yield _seconds(title, expression, path.load_s(sequence), "first byte + bytes / bandwidth")
    active = plan.decoding.read_nbytes
    if active:
        yield _rate(
            f"reading the KV of all {load.concurrency} sequences in a step of {duration(plan.step_s)}",
            f"{active} / {plan.step_s:.12g}",
            active / plan.step_s,
            "dense attention reads all active KV at each step, sparse models what they choose",
        )


def _point(plan: Plan) -> Iterator[Step]:
    point, setup = plan.chosen, plan.setup
    if point is None:
        return
    local = -(-point.running // plan.budget.instances)
    own = max(point.own_link_s, point.compute_s)
    yield _seconds(
        f"time to first token, {point.running} at once",
        f"{point.first_byte_s:.12g} + max({point.restore_s:.12g}, {point.own_link_s:.12g}) + {point.compute_s:.12g} + "
        f"max({point.running - 1} x {point.restore_s:.12g}, {local - 1} x {own:.12g})",
        point.ttft_s,
        "first byte + the fuller of shared links and accelerators' own + compute + all others at the slowest of these",
    )
    output = setup.workload.output_tokens
    yield Step(
        "output tokens a second",
        f"{point.running} x {output} / ({point.ttft_s:.12g} + {output} x {point.tpot_s:.12g})",
        point.output_tokens_per_s,
        "tokens a second",
        f"{point.output_tokens_per_s:,.1f}",
        "requests x answer / (time to first token + answer x time per token)",
    )


def _wear(plan: Plan) -> Iterator[Step]:
    wear, drive = plan.wear, plan.setup.machine.tier("ssd")
    if wear is None or drive is None:
        return
    rated = f"{drive.capacity_nbytes} x {drive.dwpd:.12g} x {drive.rated_years:.12g} x 365"
    yield _bytes(
        "bytes that the drives are rated for", rated, wear.rated_nbytes, "capacity x DWPD x days; the datasheet"
    )
    if wear.written_bytes_per_s:
        days = f"{wear.rated_nbytes:.12g} / {wear.written_bytes_per_s:.12g} / 86400"
        shown = f"{wear.life_days:,.0f} days"
        source = f"rated bytes / {bandwidth(wear.written_bytes_per_s)} of new KV, 2 % rewritten by reclaim"
        yield Step("life of the drives", days, wear.life_days, "days", shown, source)


def _cost(plan: Plan) -> Iterator[Step]:
    price, point, machine = plan.usd_per_million_tokens, plan.chosen, plan.setup.machine
    if price is None or point is None:
        return
    seconds = f"({AMORTISED_YEARS:.12g} x 365 x 86400)"
    expression = f"{machine.price_usd:.12g} / {seconds} / {point.output_tokens_per_s:.12g} x 1000000"
    source = f"{usd(machine.price_usd)} over {AMORTISED_YEARS:g} years, always busy; power not counted"
    yield Step("a million output tokens", expression, price, "US dollars", usd(price), source)
