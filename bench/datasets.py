"""Data sets from files: GSM8K's questions and ShareGPT's conversations."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

GSM8K_URL = "https://raw.githubusercontent.com/openai/grade-school-math/master/grade_school_math/data/test.jsonl"
# Stop strings of SGLang's harness.
GSM8K_STOPS = ("Question", "Assistant:", "<|separator|>")
_DOWNLOAD_TIMEOUT = 30.0


class Question(NamedTuple):
    """A question of GSM8K, and its worked answer, which ends in `#### NUMBER`."""

    question: str
    answer: str


class Conversation(NamedTuple):
    """The first exchange of a ShareGPT conversation."""

    prompt: str
    reply: str


def load_gsm8k(data_path: str | None, *, url: str = GSM8K_URL) -> list[Question]:
    """Return the questions of a JSONL file. Without a path, download GSM8K's test set once.

    Raises `ValueError`, whose text names the file to give.
    """
    path = Path(data_path) if data_path is not None else _cached_gsm8k(url)
    questions = []
    for number, line in enumerate(_read(path, "--data-path").splitlines(), 1):
        if line.strip():
            try:
                fields = json.loads(line)
                questions.append(Question(str(fields["question"]), str(fields["answer"])))
            except (ValueError, KeyError, TypeError):
                raise ValueError(
                    f"{path}, line {number}: a JSON object with question and answer is needed"
                ) from None
    if not questions:
        raise ValueError(f"{path} holds no questions")
    return questions


def load_sharegpt(data_path: str | None) -> list[Conversation]:
    """Return the first exchange of each conversation of a ShareGPT file.

    The file is a JSON list of objects whose `conversations` hold `value`s. Raises `ValueError`.
    """
    if data_path is None:
        raise ValueError("give the ShareGPT file with --data-path FILE")
    try:
        entries = json.loads(_read(Path(data_path), "--data-path"))
        turns = [entry.get("conversations") or entry.get("conversation") or [] for entry in entries]
        found = [
            Conversation(str(pair[0]["value"]), str(pair[1]["value"]))
            for pair in turns
            if len(pair) >= 2
        ]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(
            f'{data_path}: a JSON list of {{"conversations": [{{"value": ...}}, ...]}} is needed'
        ) from None
    found = [conversation for conversation in found if conversation.prompt]
    if not found:
        raise ValueError(f"{data_path} holds no conversation of two turns")
    return found


def few_shot_prompts(questions: Sequence[Question], num_shots: int, count: int) -> list[str]:
    """Return the first `count` questions as prompts, each after the first `num_shots` questions
    with their answers.

    The text is equal to that of SGLang's `few_shot_gsm8k`, which also takes its examples from the
    test set.
    """
    if num_shots > len(questions):
        raise ValueError(f"--num-shots {num_shots}: the file has {len(questions)} questions")
    shots = "".join(
        f"Question: {question}\nAnswer: {answer}\n\n" for question, answer in questions[:num_shots]
    )
    return [f"{shots}Question: {question}\nAnswer:" for question, _ in questions[:count]]


def _read(path: Path, flag: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ValueError(f"{flag} {path}: {reason}") from None


def _cached_gsm8k(url: str) -> Path:
    """Return the path of the test set in the user's cache. Download it if it is missing."""
    cache = (
        Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        / "piecework"
        / "gsm8k"
        / "test.jsonl"
    )
    if not cache.exists():
        _download(url, cache)
    return cache


def _download(url: str, path: Path) -> None:
    """Download the test set. Raises `ValueError` if there is no network; its text names the file to
    give.
    """
    import urllib.request  # Slow to import.

    try:
        with urllib.request.urlopen(url, timeout=_DOWNLOAD_TIMEOUT) as response:
            content: Any = response.read()
        path.parent.mkdir(parents=True, exist_ok=True)
        # Write to another name first, so that no process reads a partial file.
        part = path.with_suffix(f".{os.getpid()}.part")
        part.write_bytes(content)
        part.replace(path)
    except OSError as error:
        reason = getattr(error, "reason", None) or error
        raise ValueError(
            f"cannot download {url} ({reason}); give the file with --data-path FILE (JSONL with "
            "question and answer)"
        ) from None
