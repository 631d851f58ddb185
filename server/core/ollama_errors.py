"""Errors in Ollama's format: `{"error": "what is wrong"}`."""

from __future__ import annotations

from .answers import Answer

_FOLDER = "/api/"


class OllamaErrorAnswer(Answer):
    """An error in Ollama's format."""

    error: str


def is_ollama(path: str) -> bool:
    """Return whether a path belongs to Ollama's API."""
    return path.startswith(_FOLDER)
