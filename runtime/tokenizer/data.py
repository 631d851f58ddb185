"""The result of the readers of tokenizers, `hf` and `gguf`."""

from __future__ import annotations

from dataclasses import dataclass, field

import tokenizers


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerData:
    """The facts in a model's files about its tokenizer.

    Attributes:
        special_tokens: By name, such as `bos_token`.
        eos_token_ids: Every token that ends a turn or a text.
        chat_templates: Jinja templates by name. The usual name is "default".
    """

    backend: tokenizers.Tokenizer
    special_tokens: dict[str, str] = field(default_factory=dict)
    eos_token_ids: list[int] = field(default_factory=list)
    chat_templates: dict[str, str] = field(default_factory=dict)
