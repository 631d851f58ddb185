"""Models as Anthropic's clients list them: https://docs.anthropic.com/en/api/models-list."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any


def model_info(card: Mapping[str, Any]) -> dict[str, Any]:
    """Return a model in Anthropic's format. `card` is its entry in OpenAI's format."""
    return {
        "type": "model",
        "id": card["id"],
        "display_name": card["id"],
        "created_at": datetime.fromtimestamp(card["created"], UTC).isoformat(),
        "lifecycle": "active",
        "max_input_tokens": card.get("max_model_len"),
        "max_tokens": card.get("max_model_len"),
        "capabilities": None,
    }


def model_list(cards: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return all models in one page."""
    data = [model_info(card) for card in cards]
    return {
        "data": data,
        "has_more": False,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
    }
