"""The messages of a chat: ask, retry, undo, save and load."""

from __future__ import annotations

import difflib
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

_MOST_BYTES = 2**24
# Request parameters that `/set` accepts. The server checks their values.
SETTINGS = (
    "temperature", "top_p", "top_k", "min_p", "max_tokens", "seed", "stop", "frequency_penalty",
    "presence_penalty", "repetition_penalty", "reasoning_effort",
)  # fmt: skip


class Conversation:
    """A chat as turns of question and answer. `unanswered` is a last question without answer."""

    def __init__(self, system: str = "") -> None:
        self.system = system
        self.turns: list[tuple[str, str]] = []
        self.unanswered: str | None = None
        self.settings: dict[str, Any] = {}
        self._own_file: Path | None = None

    def ask(self, text: str) -> list[dict[str, str]]:
        """Return the messages of a request with a new question.

        The question replaces one that got no answer.
        """
        self.unanswered = text
        spoken = [
            {"role": role, "content": said}
            for turn in [*self.turns, (text, None)]
            for role, said in zip(("user", "assistant"), turn, strict=True)
            if said is not None
        ]
        return [{"role": "system", "content": self.system}] * bool(self.system) + spoken

    def answered(self, text: str) -> None:
        assert self.unanswered is not None, "no question is open"
        self.turns.append((self.unanswered, text))
        self.unanswered = None

    def again(self) -> str:
        """Remove the last answer, and return its question. Raises `ValueError`."""
        if self.unanswered is None:
            self._need_a_turn()
            self.unanswered = self.turns.pop()[0]
        return self.unanswered

    def undo(self) -> None:
        """Remove the last question and its answer. Raises `ValueError`."""
        if self.unanswered is None:
            self._need_a_turn()
            self.turns.pop()
        self.unanswered = None

    def _need_a_turn(self) -> None:
        if not self.turns:
            raise ValueError("there is no question yet")

    def clear(self) -> None:
        """Remove all messages; keep the system prompt and the settings."""
        self.turns, self.unanswered = [], None

    def set(self, name: str, text: str) -> None:
        """Set a request parameter. An empty text unsets it. Raises `ValueError`."""
        if name not in SETTINGS:
            close = difflib.get_close_matches(name, SETTINGS, n=1)
            raise ValueError(
                f"{name} is not a setting; "
                + (f"did you mean {close[0]}?" if close else f"choose one of {', '.join(SETTINGS)}")
            )
        if not text:
            self.settings.pop(name, None)
            return
        self.settings[name] = text
        with suppress(ValueError):
            self.settings[name] = json.loads(text)

    def save(self, name: str) -> Path:
        """Write the chat to a file that only its owner can read. Raises `ValueError`.

        Overwrites only a file that this conversation has written.
        """
        path = _path(name)
        content = {"system": self.system, "turns": self.turns, "settings": self.settings}
        is_own = path == self._own_file
        # Keep the old file until the new one is complete.
        fresh = path.with_name(f"{path.name}.new") if is_own else path
        try:
            descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            raise ValueError(f"{fresh} exists; choose another name") from None
        except OSError as error:
            raise ValueError(f"{path} cannot be written: {error.strerror}") from None
        try:
            with open(descriptor, "w") as file:
                json.dump(content, file, indent=1)
            os.replace(fresh, path)
        except OSError as error:
            fresh.unlink(missing_ok=True)
            raise ValueError(f"{path} cannot be written: {error.strerror}") from None
        self._own_file = path
        return path

    def load(self, name: str) -> None:
        """Continue the chat of a file. If it raises `ValueError`, nothing has changed."""
        path = _path(name)
        try:
            with open(path, "rb") as file:
                content = file.read(_MOST_BYTES + 1)
            if len(content) > _MOST_BYTES:
                raise ValueError
            read = json.loads(content)
            system, settings = read["system"], read["settings"]
            turns = [(asked, said) for asked, said in read["turns"]]
            texts = [system, *(text for turn in turns for text in turn)]
            known = isinstance(settings, dict) and set(settings) <= {*SETTINGS}
            if not known or not all(isinstance(text, str) for text in texts):
                raise ValueError
        except OSError as error:
            raise ValueError(f"{path} cannot be read: {error.strerror}") from None
        except (ValueError, KeyError, TypeError, RecursionError):
            raise ValueError(f"{path} was not written by /save") from None
        self.system, self.turns, self.settings = system, turns, settings
        self.unanswered, self._own_file = None, path


def _path(name: str) -> Path:
    try:
        return Path(name).expanduser()
    except RuntimeError:
        raise ValueError(f"{name} begins with an unknown user; write the path out") from None
