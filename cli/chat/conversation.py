"""The messages of a chat: ask, retry, undo, save and load."""

from __future__ import annotations

import difflib
import json
import os
from base64 import b64encode
from contextlib import suppress
from pathlib import Path
from typing import Any

_MOST_BYTES = 2**26
_MOST_IMAGE_BYTES = 16 * 2**20
_MOST_IMAGES = 16
# The first bytes of files of images, and their media types.
_IMAGES = {
    b"\x89PNG\r\n\x1a\n": "image/png",
    b"\xff\xd8\xff": "image/jpeg",
    b"GIF8": "image/gif",
    b"RIFF": "image/webp",
}
Content = str | list[dict[str, Any]]  # A text, or content parts of the API.
# Request parameters that `/set` accepts. The server checks their values.
SETTINGS = (
    "temperature", "top_p", "top_k", "min_p", "max_tokens", "seed", "stop", "frequency_penalty",
    "presence_penalty", "repetition_penalty", "reasoning_effort",
)  # fmt: skip


class Conversation:
    """A chat as turns of question and answer. `unanswered` is a last question without answer.

    `images` are the parts of images that the next question will have.
    """

    def __init__(self, system: str = "") -> None:
        self.system = system
        self.turns: list[tuple[Content, str]] = []
        self.unanswered: Content | None = None
        self.images: list[dict[str, Any]] = []
        self.settings: dict[str, Any] = {}
        self._own_file: Path | None = None

    def attach(self, name: str) -> str:
        """Add an image to the next question, and return its media type. Raises `ValueError`."""
        path = _path(name)
        try:
            with open(path, "rb") as file:
                content = file.read(_MOST_IMAGE_BYTES + 1)
        except OSError as error:
            raise ValueError(f"{path} cannot be read: {error.strerror}") from None
        kind = next((kind for head, kind in _IMAGES.items() if content.startswith(head)), None)
        if kind is None:
            raise ValueError(f"{path} is no PNG, JPEG, WebP or GIF")
        if len(content) > _MOST_IMAGE_BYTES:
            raise ValueError(f"{path} is larger than 16 MiB")
        if len(self.images) >= _MOST_IMAGES:
            raise ValueError(f"a question has at most {_MOST_IMAGES} images")
        url = f"data:{kind};base64,{b64encode(content).decode()}"
        self.images.append({"type": "image_url", "image_url": {"url": url}})
        return kind

    def ask(self, asked: Content) -> list[dict[str, Any]]:
        """Return the messages of a request with a new question, which gets the attached images.

        The question replaces one that got no answer.
        """
        if self.images and isinstance(asked, str):
            asked = [*self.images, {"type": "text", "text": asked}]
        self.images = []
        self.unanswered = asked
        spoken = [
            {"role": role, "content": said}
            for turn in [*self.turns, (asked, None)]
            for role, said in zip(("user", "assistant"), turn, strict=True)
            if said is not None
        ]
        return [{"role": "system", "content": self.system}] * bool(self.system) + spoken

    def answered(self, text: str) -> None:
        assert self.unanswered is not None, "no question is open"
        self.turns.append((self.unanswered, text))
        self.unanswered = None

    def again(self) -> Content:
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
        self.turns, self.unanswered, self.images = [], None, []

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
            texts = [system, *(said for _, said in turns)]
            known = isinstance(settings, dict) and set(settings) <= {*SETTINGS}
            if not known or not all(isinstance(text, str) for text in texts):
                raise ValueError
            if not all(_is_question(asked) for asked, _ in turns):
                raise ValueError
        except OSError as error:
            raise ValueError(f"{path} cannot be read: {error.strerror}") from None
        except (ValueError, KeyError, TypeError, RecursionError):
            raise ValueError(f"{path} was not written by /save") from None
        self.system, self.turns, self.settings = system, turns, settings
        self.unanswered, self.images, self._own_file = None, [], path


def _is_question(asked: Any) -> bool:
    """Whether this is a text, or a list of texts and images as `Conversation.ask` makes it."""
    if isinstance(asked, str):
        return True
    return isinstance(asked, list) and all(
        isinstance(part, dict) and part.get("type") in ("text", "image_url") for part in asked
    )


def _path(name: str) -> Path:
    try:
        return Path(name).expanduser()
    except RuntimeError:
        raise ValueError(f"{name} begins with an unknown user; write the path out") from None
