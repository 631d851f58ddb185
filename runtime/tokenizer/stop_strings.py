"""Cuts a text that arrives in pieces at the first of many stop strings."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """The stop strings of one sequence, and the end of its text that may become a stop string.

    There is at least one stop string. The stop string that is complete first ends the text. If
    several are complete with the same character, the longest counts. Therefore the result does not
    depend on how the text is cut into pieces.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = [string for string in strings if string]
        self._held = ""

    def push(self, piece: str, *, may_stop: bool = True) -> tuple[str, str | None]:
        """Add `piece`. Return the certain text, which includes a stop string at its end, and that
        string.

        Without `may_stop`, stop strings that are complete with this piece are text.
        """
        text, searched = self._held + piece, len(self._held)
        ends = []
        for string in self._strings if may_stop else ():
            begin = text.find(string, max(0, searched - len(string) + 1))
            if begin >= 0:
                ends.append((begin + len(string), begin))
        if ends:
            end, begin = min(ends)
            self._held = ""
            return text[:end], text[begin:end]
        certain = len(text) - max(_overlap(text, string) for string in self._strings)
        self._held = text[certain:]
        return text[:certain], None

    def finish(self) -> str:
        """End the text and return the part that was held back."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, string: str) -> int:
    """Return how many characters at the end of `text` begin `string`, but not all of it."""
    begin = text.find(string[0], max(0, len(text) - len(string) + 1))
    while begin >= 0:
        if string.startswith(text[begin:]):
            return len(text) - begin
        begin = text.find(string[0], begin + 1)
    return 0
