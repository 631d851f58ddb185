"""What the readers of tokenizers, `hf` and `gguf`, find out."""

from __future__ import annotations

from dataclasses import dataclass, field

import tokenizers


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerData:
    """What a model's files say of its tokenizer.

    `special_tokens`: by name, such as `bos_token`. `eos_token_ids`: every token that ends a turn or
    a text. `chat_templates`: Jinja templates by name; the usual one is called "default".
    """

    backend: tokenizers.Tokenizer
    special_tokens: dict[str, str] = field(default_factory=dict)
    eos_token_ids: list[int] = field(default_factory=list)
    chat_templates: dict[str, str] = field(default_factory=dict)
