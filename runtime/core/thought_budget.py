"""A bound on thoughts: how many tokens a model may think before its thought is closed for it."""

from __future__ import annotations

from collections.abc import Sequence

from .logits_processor import GrammarState
from .sampling_params import SamplingParams

_BLANKS = 2
"""Tokens that may stand before the mark that opens a thought."""


class ThoughtBudget:
    """Where one output stands: before its thought, in it or behind it. The thought is open from the
    first token where there are no `thought_begin_ids`. What it needs to know are the tokens, so it
    is made anew of those wherever a request goes on.
    """

    def __init__(self, params: SamplingParams, output: Sequence[int]) -> None:
        assert params.thinking_budget is not None
        self._budget = params.thinking_budget
        self._begin, self._end = params.thought_begin_ids, params.thought_end_ids
        self._spent = -1 if self._begin else 0
        """Tokens of the thought; -1 before it."""
        self._is_over = False
        self._recent: list[int] = []
        self.pass_over(output)

    def may_close(self, coming: int) -> bool:
        """Whether the budget may end with one of so many tokens that are not known yet."""
        return not self._is_over and self._spent + coming >= self._budget

    def follow(
        self, tokens: Sequence[int], grammar: GrammarState | None = None
    ) -> tuple[list[int], list[int]]:
        """Go on behind these tokens. Returns those that stay, and those that follow instead of the
        others: the mark that closes the thought, as soon as the grammar, which stands before all of
        them, takes it, which it does not within a character.
        """
        kept: list[int] = []
        for token in tokens:
            if self._closes(kept, grammar):
                break
            kept.append(token)
            self._advance(token)
        if not self._closes(kept, grammar):
            return kept, []
        self._is_over = True
        return kept, list(self._end)

    def pass_over(self, tokens: Sequence[int]) -> None:
        """These follow, whatever the budget."""
        for token in tokens:
            self._advance(token)

    def _closes(self, kept: list[int], grammar: GrammarState | None) -> bool:
        if self._is_over or self._spent < self._budget:
            return False
        return grammar is None or grammar.takes([*kept, *self._end])

    def _advance(self, token: int) -> None:
        if self._is_over:
            return
        self._recent.append(token)
        if self._spent >= 0:
            self._spent += 1
            self._is_over = self._recent[-len(self._end) :] == self._end
        elif self._recent[-len(self._begin) :] == self._begin:
            self._spent = 0
        else:
            # An answer that begins otherwise has no thought.
            self._is_over = len(self._recent) >= len(self._begin) + _BLANKS
        if self._is_over:
            self._recent = []
