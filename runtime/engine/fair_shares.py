"""Divides the tokens of a step among prompts, so that a short prompt does not wait for a long one.

A step takes as long as its tokens. If a long prompt filled each step, a short prompt would wait for
all of them, or at least for the step that it is in. Therefore the shortest prompts have a step
almost to themselves, and the next steps make up for it to the longer ones. For example, with steps
of 2,048 tokens, prompts of 8,000 and 100 tokens get 0 and 100, and then the long one gets 2,048.
"""

from __future__ import annotations

from collections.abc import Sequence

_QUANTA = 32  # Number of quanta in a full step. Smaller steps waste a GPU's time.


class FairShares:
    """The shares of successive steps.

    The first prompt of the highest priority always ends: it gets at least a third of the tokens in
    the long run, however many shorter ones arrive.
    """

    def __init__(self, token_budget: int) -> None:
        self.quantum = max(1, token_budget // _QUANTA)
        self._owed = 0  # Twice the tokens that the longer prompts are to get.

    def divide(self, budget: int, lengths: Sequence[int], urgent: int) -> list[int]:
        """Return the tokens of each prompt, at most `budget` together.

        `lengths` are the tokens that are left, of prompts in order of precedence. The first
        `urgent` of them have the highest priority. Of these, prompts up to twice the shortest one
        get what they want. The others get half of what overtook them, in later steps, and fill
        this step up to a quantum. Prompts of lower priority take nothing from the urgent ones.
        """
        shares = [0] * len(lengths)
        if not lengths or budget <= 0:
            return shares
        limit = max(2 * min(lengths[:urgent]), self.quantum)
        short = [number for number in range(urgent) if lengths[number] <= limit]
        longer = [number for number in range(urgent) if lengths[number] > limit]
        others = longer + list(range(urgent, len(lengths)))
        due = min(self._owed // 2, max(1, budget // 3)) if others else 0
        taken = _fill(shares, lengths, short, budget - due if longer else budget)
        more = _fill(shares, lengths, others, min(max(due, self.quantum - taken), budget - taken))
        if not others:
            self._owed = 0
            return shares
        first = min(others) if len(lengths) == urgent else -1
        overtaking = sum(shares[number] for number in short if number > first)
        self._owed = max(0, self._owed + overtaking - 2 * more)
        return shares


def _fill(shares: list[int], lengths: Sequence[int], members: list[int], budget: int) -> int:
    """Give each of `members` in order what is left of `budget`. Return the tokens given."""
    left = budget
    for number in members:
        shares[number] = min(lengths[number], left)
        left -= shares[number]
    return budget - left
