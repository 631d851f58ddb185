"""A screen with growing Markdown, line editing and history."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token
from prompt_toolkit import PromptSession
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import Segment
from rich.text import Text

from ..core.printable import printable
from .screen import BLOCK

_UPDATES = 10  # Redraws per second.
_FENCE = re.compile(r"^ {0,3}(```+|~~~+)", re.M)


class RichScreen:
    """A screen that prints each complete block once, and redraws only the growing block.

    So nothing flickers, and the whole answer stays in the terminal's scrollback.
    """

    def __init__(self, history: Path, commands: list[str]) -> None:
        self._console = Console(highlight=False)
        # Enter sends. Alt-Enter, or Enter inside three quotes, adds a line.
        keys = KeyBindings()

        @keys.add("enter")
        def _(event: KeyPressEvent) -> None:
            buffer = event.current_buffer
            text = buffer.text.rstrip()
            open_block = text.startswith(BLOCK) and (not text.endswith(BLOCK) or text == BLOCK)
            if open_block:
                buffer.insert_text("\n")
            else:
                buffer.validate_and_handle()

        @keys.add("escape", "enter")
        def _(event: KeyPressEvent) -> None:
            event.current_buffer.insert_text("\n")

        self._session: PromptSession[str] = PromptSession(
            history=_history(history),
            key_bindings=keys,
            completer=WordCompleter(commands, sentence=True),
            complete_while_typing=False,
            multiline=True,
            prompt_continuation="... ",
        )
        self._thinks = False
        self._growing = ""
        self._live: Live | None = None

    def read(self) -> str:
        text = self._session.prompt(">>> ")
        return text.strip().removeprefix(BLOCK).removesuffix(BLOCK) if BLOCK in text else text

    def reasoning(self, text: str) -> None:
        self._thinks = True
        self._console.print(Text(printable(text), style="dim"), end="", soft_wrap=True)

    def content(self, text: str) -> None:
        if self._thinks:
            self._thinks = False
            self._console.print("\n")
        self._growing += printable(text)
        # Blocks are complete up to the last empty line outside of fenced code.
        cut = self._growing.rfind("\n\n")
        while cut > 0 and len(_FENCE.findall(self._growing[:cut])) % 2:
            cut = self._growing.rfind("\n\n", 0, cut)
        if cut > 0:
            done, self._growing = self._growing[: cut + 2], self._growing[cut + 2 :]
            self._finish(done)
        if self._growing.strip():
            if self._live is None:
                self._live = Live(
                    console=self._console, refresh_per_second=_UPDATES, transient=True
                )
                self._live.start()
            self._live.update(_End(Answer(self._growing)))

    def end(self) -> None:
        if self._thinks:
            self._console.print()
        self._finish(self._growing)
        self._thinks, self._growing = False, ""

    def _finish(self, text: str) -> None:
        """Print a text that is final in place of the growing block."""
        if self._live is not None:
            self._live.stop()
            self._live = None
        if text.strip():
            self._console.print(Answer(text))
            self._console.print()

    def note(self, text: str) -> None:
        self._console.print(Text(printable(text), style="dim"))

    def status(self, text: str) -> None:
        self._console.file.write(f"\r\x1b[K{printable(text)}")
        self._console.file.flush()


class Answer(Markdown):
    """An answer as Markdown, with HTML shown as text.

    Markdown can encode control characters (`&#x202e;`, `<http://a/%1b>`), so they are removed after
    parsing.
    """

    _PARSER = MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"])

    def __init__(self, text: str) -> None:
        super().__init__("")
        self.markup, self.parsed = text, self._PARSER.parse(text)
        self._clean(self.parsed)

    def _clean(self, tokens: Sequence[Token]) -> None:
        for token in tokens:
            token.content = printable(token.content)
            self._clean(token.children or ())


class _End:
    """The last lines of a text, as many as the terminal shows."""

    def __init__(self, markdown: Markdown) -> None:
        self._markdown = markdown

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = console.render_lines(self._markdown, options, pad=False)
        for line in lines[-max(1, console.size.height - 2) :]:
            yield from line
            yield Segment.line()


def _history(path: Path) -> History:
    """Return a history in a file that only its owner can read, or in memory if that fails."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600))
    except OSError:
        return InMemoryHistory()
    return FileHistory(path)
