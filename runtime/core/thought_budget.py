"""Limits the number of tokens of a thought, after which the thought is closed."""

from __future__ import annotations

from collections.abc import Sequence

from .logits_processor import GrammarState
from .sampling_params import SamplingParams

_BLANKS = 2  # Tokens that may precede the mark that opens a thought.


class ThoughtBudget:
    """The position of one output: before its thought, inside it or after it.

    Without `thought_begin_ids` the thought is open from the first token. The state follows from the
    tokens alone, so a resumed request makes a new object from its tokens.
    """

    def __init__(self, params: SamplingParams, output: Sequence[int]) -> None:
        assert params.thinking_budget is not None
        self._budget = params.thinking_budget
        self._begin, self._end = params.thought_begin_ids, params.thought_end_ids
        self._spent = -1 if self._begin else 0  # Tokens of the thought; -1 before it.
        self._is_over = False
        self._recent: list[int] = []
        self.pass_over(output)

    def may_close(self, unknown: int) -> bool:
        """Whether the budget may end within the next `unknown` tokens, which are not known yet."""
        return not self._is_over and self._spent + unknown >= self._budget

    def follow(
        self, tokens: Sequence[int], grammar: GrammarState | None = None
    ) -> tuple[list[int], list[int]]:
        """Append these tokens. Return those that are kept, and those that replace the rest.

        If the budget ends, the replacement is the mark that closes the thought. It is inserted as
        soon as the grammar allows it, which is not the case inside a character. `grammar` is at the
        position before the tokens.
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
        """Append these tokens without checking the budget."""
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
            # An answer that begins in another way has no thought.
            self._is_over = len(self._recent) >= len(self._begin) + _BLANKS
        if self._is_over:
            self._recent = []
