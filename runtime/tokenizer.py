"""Text to token ids and back, chat templates included; no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tokenizers


class ChatTemplateError(ValueError):
    """The model has no chat template, or its template refuses these messages."""


class Tokenizer:
    """A model's tokenizer."""

    backend: tokenizers.Tokenizer
    vocab_size: int
    """Ids from 0 to vocab_size - 1 exist in the tokenizer (added tokens included)."""
    eos_token_ids: list[int]
    bos_token_id: int | None
    chat_template: str | None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        raise NotImplementedError

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        raise NotImplementedError

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for, also where they are part of a character."""
        raise NotImplementedError

    def apply_chat_template(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[dict[str, Any]] | None = None,
        template_kwargs: dict[str, Any] | None = None,
    ) -> str:
        raise NotImplementedError


def load_tokenizer(model_path: str, tokenizer_path: str | None = None, chat_template: str | None = None) -> Tokenizer:
    """The tokenizer of a resolved model folder or .gguf file."""
    raise NotImplementedError
