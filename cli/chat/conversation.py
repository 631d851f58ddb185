"""What was said so far, with what it takes to ask again, take back, keep and read in."""

from __future__ import annotations

import difflib
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

_MOST_BYTES = 2**24
SETTINGS = (
    "temperature", "top_p", "top_k", "min_p", "max_tokens", "seed", "stop", "frequency_penalty",
    "presence_penalty", "repetition_penalty", "reasoning_effort",
)  # fmt: skip
"""Members of a request that `/set` sets; the server says which values they take."""


class Conversation:
    """Messages in turns. `unanswered`: what was asked last, where there is no answer to it yet."""

    def __init__(self, system: str = "") -> None:
        self.system = system
        self.turns: list[tuple[str, str]] = []
        self.unanswered: str | None = None
        self.settings: dict[str, Any] = {}
        self._own_file: Path | None = None

    def ask(self, text: str) -> list[dict[str, str]]:
        """The messages of a request with a new question, which takes the place of one that got no
        answer.
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
        assert self.unanswered is not None, "nothing was asked"
        self.turns.append((self.unanswered, text))
        self.unanswered = None

    def again(self) -> str:
        """The last question, taken back to be asked again. Raises `ValueError`."""
        if self.unanswered is None:
            self._need_a_turn()
            self.unanswered = self.turns.pop()[0]
        return self.unanswered

    def undo(self) -> None:
        """Take the last question back, and its answer. Raises `ValueError`."""
        if self.unanswered is None:
            self._need_a_turn()
            self.turns.pop()
        self.unanswered = None

    def _need_a_turn(self) -> None:
        if not self.turns:
            raise ValueError("nothing was asked yet")

    def clear(self) -> None:
        """All but the system prompt and the settings goes."""
        self.turns, self.unanswered = [], None

    def set(self, name: str, text: str) -> None:
        """Change a member of requests; an empty text leaves it to the server again. Raises
        `ValueError`.
        """
        if name not in SETTINGS:
            close = difflib.get_close_matches(name, SETTINGS, n=1)
            raise ValueError(
                f"{name} is no setting; "
                + (f"did you mean {close[0]}?" if close else f"there are {', '.join(SETTINGS)}")
            )
        if not text:
            self.settings.pop(name, None)
            return
        self.settings[name] = text
        with suppress(ValueError):
            self.settings[name] = json.loads(text)

    def save(self, name: str) -> Path:
        """Write all into a file that only its owner may read, no file but one of its own. Raises
        `ValueError`.
        """
        path = _path(name)
        content = {"system": self.system, "turns": self.turns, "settings": self.settings}
        is_own = path == self._own_file
        # What was saved before stays until the new one is whole.
        fresh = path.with_name(f"{path.name}.new") if is_own else path
        try:
            descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            raise ValueError(f"{fresh} is there already; choose another name") from None
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
        """Go on with what a file has. Raises `ValueError`, and changes nothing then."""
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
            raise ValueError(f"{path} is none that /save has written") from None
        self.system, self.turns, self.settings = system, turns, settings
        self.unanswered, self._own_file = None, path


def _path(name: str) -> Path:
    try:
        return Path(name).expanduser()
    except RuntimeError:
        raise ValueError(f"{name} begins with a user that is not there") from None
