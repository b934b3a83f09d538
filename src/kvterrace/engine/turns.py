"""Which requests are turns of their own, and which go on with one: a prompt is got and then put, in several calls."""

from __future__ import annotations

from collections import OrderedDict

from kvterrace.keys import KeyChain

__all__ = ["OpenTurns"]

#: A turn that nothing was added to for this long is over.
_OPEN_S = 60.0
#: Turns that are remembered, at most: about 250 B each.
_MOST = 4096


class OpenTurns:
    """Turns to which a put may add, by the keys that their prompts, and what was known of these, end with. Not
    thread-safe: the ledger's owner serialises.
    """

    def __init__(self) -> None:
        self._since_s: OrderedDict[bytes, float] = OrderedDict()  # the oldest first

    def begin(self, chain: KeyChain, stop: int, known: int, now_s: float) -> None:
        """The policies were told of the first `stop` blocks of `chain`, of which the index knows the first `known`."""
        since_s = self._since_s
        for key in {chain.key(stop - 1), chain.key(max(known, 1) - 1)}:
            since_s[key] = now_s
            since_s.move_to_end(key)
        while since_s and (len(since_s) > 2 * _MOST or next(iter(since_s.values())) <= now_s - _OPEN_S):
            since_s.popitem(last=False)

    def has_told(self, chain: KeyChain, stop: int, now_s: float) -> bool:
        """Whether the policies were told of these blocks in a turn that is open."""
        return self._is_open(chain.key(stop - 1), now_s)

    def has_begun(self, chain: KeyChain, known: int, now_s: float) -> bool:
        """Whether a turn is open that knew the first `known` blocks, or one less: of a prompt that is all there, an
        engine computes the end anew.
        """
        return any(self._is_open(chain.key(index), now_s) for index in range(max(0, known - 2), known))

    def end(self, chain: KeyChain, stop: int, known: int) -> None:
        """All that the prompt has was put."""
        for index in {stop - 1, *range(max(0, known - 2), known)}:
            self._since_s.pop(chain.key(index), None)

    def _is_open(self, key: bytes, now_s: float) -> bool:
        return now_s - self._since_s.get(key, float("-inf")) < _OPEN_S
