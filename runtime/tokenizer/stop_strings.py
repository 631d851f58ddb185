"""Cuts a text that comes in pieces at the first of many stop strings."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """The stop strings of one sequence, and the end of its text that may still become one.

    There is at least one. The string that is complete first ends the text, and of those that are
    complete with the same character the longest, so the result does not depend on how the text is
    cut into pieces.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = [string for string in strings if string]
        self._held = ""

    def push(self, piece: str, *, may_stop: bool = True) -> tuple[str, str | None]:
        """Go on with `piece`: the text that is certain, a stop string at its end included, and that
        string.

        Without `may_stop` stop strings that are complete with this piece are text.
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
        """What was held back; the text has ended."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, string: str) -> int:
    """How many characters at the end of `text` begin `string`, short of all of it."""
    begin = text.find(string[0], max(0, len(text) - len(string) + 1))
    while begin >= 0:
        if string.startswith(text[begin:]):
            return len(text) - begin
        begin = text.find(string[0], begin + 1)
    return 0
