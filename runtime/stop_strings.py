"""Finds the first of many strings in a text that comes in pieces, in constant time per character."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class StopStrings:
    """An Aho-Corasick automaton (Aho and Corasick, 1975): a state is the longest end of the text that begins a string.

    Its depth is therefore how many characters have to be held back. The string that is complete first is found, and of
    those that are complete with the same character the longest, so the result does not depend on how the text is cut.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self.depth = [0]
        """Of each state; state 0 is the beginning."""
        self.found: list[str | None] = [None]
        """For each state, the longest string that is complete there."""
        for string in strings:
            if string:
                self._insert(string)
        self._fall_back = [0] * len(self._next)
        self._link()

    def _insert(self, string: str) -> None:
        state = 0
        for char in string:
            if char not in self._next[state]:
                self._next[state][char] = len(self._next)
                self._next.append({})
                self.depth.append(self.depth[state] + 1)
                self.found.append(None)
            state = self._next[state][char]
        self.found[state] = string

    def _link(self) -> None:
        """Give each state the one to go on from when no string continues, nearest to the beginning first."""
        waiting = deque(self._next[0].values())
        while waiting:
            state = waiting.popleft()
            for char, child in self._next[state].items():
                self._fall_back[child] = self.advance(self._fall_back[state], char)
                if self.found[child] is None:
                    self.found[child] = self.found[self._fall_back[child]]
                waiting.append(child)

    def advance(self, state: int, char: str) -> int:
        """The state after one more character."""
        following = self._next[state].get(char)
        while following is None and state:
            state = self._fall_back[state]
            following = self._next[state].get(char)
        return following or 0
