"""Input and output of a chat: plain text, for pipes, files and simple terminals."""

from __future__ import annotations

import sys
from typing import Protocol

from ..core.printable import printable

BLOCK = '"""'  # Begins and ends an input of several lines.


class Screen(Protocol):
    """The interface of a screen. Texts of a server must go through `printable`."""

    def read(self) -> str:
        """Return the user's input. Raises `EOFError`, and `KeyboardInterrupt` for Ctrl-C."""
        ...

    def reasoning(self, text: str) -> None: ...

    def content(self, text: str) -> None: ...

    def end(self) -> None:
        """End an answer that is complete or stopped."""
        ...

    def note(self, text: str) -> None:
        """Print one line of the program."""
        ...

    def status(self, text: str) -> None:
        """Show a line that the next one replaces. An empty text removes it."""
        ...


class PlainScreen:
    """A screen with answers on standard output and everything else on standard error."""

    def __init__(self) -> None:
        self._asks = sys.stdin.isatty()
        self._thinks = self._spoke = False

    def read(self) -> str:
        text = self._line(">>> ")
        if not text.startswith(BLOCK):
            return text
        lines = [text.removeprefix(BLOCK)]
        while not lines[-1].rstrip().endswith(BLOCK) or (len(lines) == 1 and not lines[0].strip()):
            lines.append(self._line("... "))
        return "\n".join(lines).rstrip().removesuffix(BLOCK).strip("\n")

    def _line(self, prompt: str) -> str:
        if not self._asks:
            line = sys.stdin.readline()
            if not line:
                raise EOFError
            return line.rstrip("\n")
        return input(prompt)

    def reasoning(self, text: str) -> None:
        if sys.stderr.isatty():
            self._thinks = True
            print(f"\x1b[2m{printable(text)}\x1b[0m", end="", file=sys.stderr, flush=True)

    def content(self, text: str) -> None:
        if self._thinks:
            self._thinks = False
            print("\n", file=sys.stderr, flush=True)
        self._spoke = True
        print(printable(text), end="", flush=True)

    def end(self) -> None:
        if self._thinks:
            print(file=sys.stderr, flush=True)
        if self._spoke:
            print(flush=True)
        self._thinks = self._spoke = False

    def note(self, text: str) -> None:
        print(printable(text), file=sys.stderr, flush=True)

    def status(self, text: str) -> None:
        if sys.stderr.isatty():
            print(f"\r\x1b[K{printable(text)}", end="", file=sys.stderr, flush=True)
