"""The loop of a chat: read a question or a slash command, ask the model, show the answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from .client import ChatClient, ChatError, Part, Unavailable
from .conversation import Content, Conversation
from .screen import Screen

LONGEST_WAIT = 60.0  # Seconds to wait for a server that does not answer.
_HELP = """\
/system [TEXT]      set the system prompt; without TEXT: remove it
/image FILE         send an image with the next question; several are possible
/model [NAME]       switch to another model of the server; without NAME: list them
/set [NAME VALUE]   set temperature, top_p, max_tokens, ...; without VALUE: the server's default
/retry              ask the last question again
/undo               remove the last question and its answer
/clear              remove all messages
/save FILE          write the chat to a file
/load FILE          continue the chat of a file
/help               show this help
/exit               end the chat (also Ctrl-D)
Ctrl-C stops an answer. \"\"\" begins and ends a question of several lines."""


class Session:
    """One user, one server, one conversation."""

    def __init__(
        self, client: ChatClient, model: str, conversation: Conversation, screen: Screen
    ) -> None:
        self.client, self.model = client, model
        self.conversation, self.screen = conversation, screen
        self.failed = False  # Whether the last question got no answer.
        self._commands: dict[str, Callable[[str], None]] = {
            "/system": self._system,
            "/image": lambda text: screen.note(f"{conversation.attach(_needed(text))} attached"),
            "/model": self._model,
            "/set": self._set,
            "/retry": lambda _: self.ask(conversation.again()),
            "/undo": lambda _: conversation.undo(),
            "/clear": lambda _: conversation.clear(),
            "/save": lambda text: screen.note(f"saved in {conversation.save(_needed(text))}"),
            "/load": lambda text: conversation.load(_needed(text)),
            "/help": lambda _: screen.note(_HELP),
        }

    @property
    def commands(self) -> list[str]:
        return [*self._commands, "/exit"]

    def run(self) -> None:
        """Run until the user ends the chat."""
        while True:
            try:
                text = self.screen.read().strip()
            except EOFError:
                return
            except KeyboardInterrupt:
                self.screen.note("Ctrl-D or /exit ends the chat")
                continue
            if text in ("/exit", "/quit", "/bye"):
                return
            if text:
                name, _, argument = text.partition(" ")
                try:
                    if not name.startswith("/") or "/" in name[1:]:
                        self.ask(text)
                    elif name in self._commands:
                        self._commands[name](argument.strip())
                    else:
                        raise ValueError(f"{name} is not a command; /help lists commands")
                except (ValueError, ChatError) as error:
                    self.screen.note(f"error: {error}")
                except KeyboardInterrupt:
                    self.screen.status("")
                    self.screen.note("stopped")

    def ask(self, asked: Content) -> None:
        """Ask the model and show its answer.

        After Ctrl-C, a partial answer stays in the conversation. If there is none, `/retry` asks
        again.
        """
        messages = self.conversation.ask(asked)
        answer, tokens, first, note = "", 0, 0.0, ""
        self.failed = True
        try:
            for part in self._parts(messages):
                first = first or time.perf_counter()
                if part.kind == "usage":
                    tokens = part.tokens
                elif part.kind == "reasoning":
                    self.screen.reasoning(part.text)
                else:
                    answer += part.text
                    self.screen.content(part.text)
            self.failed = False
            if tokens > 1:
                seconds = time.perf_counter() - first
                note = f"{tokens} tokens, {(tokens - 1) / max(seconds, 1e-3):.1f} per second"
        except KeyboardInterrupt:
            note, self.failed = "stopped", not answer
        except ChatError as error:
            note = f"error: {error}; /retry asks again"
        self.screen.end()
        if not self.failed:
            self.conversation.answered(answer)
        if note:
            self.screen.note(note)

    def _parts(self, messages: list[dict[str, Any]]) -> Iterator[Part]:
        """Yield the parts of an answer. If the server is unavailable, wait and retry once."""
        ask = partial(self.client.answer, self.model, messages, self.conversation.settings)
        try:
            yield from ask()
        except Unavailable:
            for seconds in self.client.wait(LONGEST_WAIT):
                self.screen.status(f"waiting for the server: {seconds:.0f} s (Ctrl-C stops)")
            self.screen.status("")
            yield from ask()

    def _system(self, text: str) -> None:
        self.conversation.system = text
        self.screen.note("system prompt set" if text else "no system prompt")

    def _model(self, name: str) -> None:
        served = self.client.models()
        if not name:
            for served_name in served:
                self.screen.note(f"{'*' if served_name == self.model else ' '} {served_name}")
        elif name in served:
            self.model = name
        else:
            raise ValueError(f"{name} is not served; choose one of {', '.join(served)}")

    def _set(self, text: str) -> None:
        name, _, value = text.partition(" ")
        if name:
            self.conversation.set(name, value.strip())
        else:
            for name, value in self.conversation.settings.items():
                self.screen.note(f"{name} {value}")


def _needed(name: str) -> str:
    if not name:
        raise ValueError("give a file name")
    return name
