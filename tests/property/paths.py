"""Chains for the machines: of two namespaces, of up to 14 blocks, and with shared prefixes."""

from __future__ import annotations

import itertools

from hypothesis import strategies as st
from tests.harness import LARGE, SMALL, chain_of

from kvterrace.keys import KeyChain

#: Two ways at the 1st, 4th and 8th block, one elsewhere.
_FORKS = {0: 2, 3: 2, 7: 2}
#: The longest of each way.
ALL = [
    chain_of(namespace, [forks[0], 0, 0, forks[1], 0, 0, 0, forks[2], 0, 0, 0, 0, 0, 0][:length])
    for namespace, length in ((SMALL, 14), (LARGE, 5))
    for forks in itertools.product((0, 1), repeat=3)
]


@st.composite
def names(draw: st.DrawFn) -> str:
    """The name of a chain: S or L for its namespace, then which way it takes at each block."""
    name = draw(st.sampled_from("SSL"))
    length = draw(st.integers(1, 14 if name == "S" else 5))
    return name + "".join(str(draw(st.integers(0, _FORKS.get(at, 1) - 1))) for at in range(length))


def named(name: str) -> KeyChain:
    """The chain of this name."""
    return chain_of({"S": SMALL, "L": LARGE}[name[0]], [int(way) for way in name[1:]])
