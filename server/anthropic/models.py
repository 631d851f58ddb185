"""Models as Anthropic's clients list them: https://docs.anthropic.com/en/api/models-list."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Literal

from msgspec import UNSET

from ..core.answers import Answer
from ..serving.state import ModelCard


class MessagesModel(Answer, kw_only=True):
    """`max_input_tokens` and `max_tokens` are set for language models."""

    type: Literal["model"] = "model"
    id: str
    display_name: str
    created_at: str
    lifecycle: Literal["active"] = "active"
    max_input_tokens: int | None
    max_tokens: int | None
    capabilities: None = None


class MessagesModels(Answer):
    data: list[MessagesModel]
    has_more: bool
    first_id: str | None
    last_id: str | None


def model_info(card: ModelCard) -> MessagesModel:
    """Return a model in Anthropic's format."""
    longest = None if card.max_model_len is UNSET else card.max_model_len
    return MessagesModel(
        id=card.id,
        display_name=card.id,
        created_at=datetime.fromtimestamp(card.created, UTC).isoformat(),
        max_input_tokens=longest,
        max_tokens=longest,
    )


def model_list(cards: Sequence[ModelCard]) -> MessagesModels:
    """Return all models in one page."""
    data = [model_info(card) for card in cards]
    return MessagesModels(data, False, data[0].id if data else None, data[-1].id if data else None)
