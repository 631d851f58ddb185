"""The vocabulary in a GGUF file's metadata: tokens, their types, and which of them end a text.

The keys are those of the GGUF specification (ggml-org/ggml, docs/gguf.md), under `tokenizer.ggml.`.
The names of tokens that end a text are those of llama.cpp (src/llama-vocab.cpp).
"""

from __future__ import annotations

from enum import IntEnum
from pathlib import Path
from typing import Any

from gguf import GGUFReader

from ..files.gguf_reader import metadata
from .chat_template import DEFAULT

END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
# Control tokens that end a turn or a text. The file names one or two, but models use more.
_END_TOKENS = {
    "<|endoftext|>", "<|im_end|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|end|>",
    "<|return|>", "<|call|>", "<|calls|>", "<|flush|>", "<end_of_turn>", "<turn|>",
    "<|tool_response>", "<end_of_utterance>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<eos>", "</s>",
    "<｜end▁of▁sentence｜>", "[e~[", "<|END_OF_TURN_TOKEN|>",
}  # fmt: skip
# If a vocabulary has one of the second tokens, the first token ends neither a turn nor a text.
_END_NOTHING = (
    ("<|end|>", {"<|return|>", "<|call|>"}),  # gpt-oss: it ends a message of several
    ("<|end|>", {"<|flush|>", "<|calls|>"}),  # Solar Open: as gpt-oss
    ("</s>", {"<|tool_response>"}),  # Gemma 4: it is HTML
)


class TokenType(IntEnum):
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4


class Vocabulary:
    """The tokenizer's part of a file's metadata. Raises `ValueError` if it contradicts itself."""

    def __init__(self, path: Path, reader: GGUFReader) -> None:
        self.path = path
        self._reader = reader
        self.tokens: list[str] = self.get("tokens", [])
        self.types: list[int] = self.one_each("token_type", TokenType.NORMAL)

    def get(self, key: str, default: Any = None) -> Any:
        return metadata(self._reader, f"tokenizer.ggml.{key}", default)

    def one_each(self, key: str, default: Any) -> list[Any]:
        """Return a list with one entry for each token; all are `default` if the file has no such
        list.
        """
        values = self.get(key, [default] * len(self.tokens))
        if len(values) != len(self.tokens):
            raise ValueError(
                f"{self.path} is broken: {len(self.tokens)} tokens, but {len(values)} entries in "
                f"{key}"
            )
        return list(values)

    def token(self, key: str) -> str | None:
        """Return the token whose id stands under `key`."""
        token_id = self.get(key)
        return self.tokens[token_id] if token_id in range(len(self.tokens)) else None

    def of_type(self, *types: int) -> list[str]:
        return [token for token, kind in zip(self.tokens, self.types, strict=True) if kind in types]

    def end_token_ids(self) -> list[int]:
        """Return the tokens that end a turn or a text, the file's own end-of-sequence token
        first.
        """
        named = [token_id for key in END_KEYS if (token_id := self.get(key)) is not None]
        known = {
            token: index
            for index, token in enumerate(self.tokens)
            if token in _END_TOKENS and self.types[index] == TokenType.CONTROL
        }
        nothing = {known.get(token) for token, others in _END_NOTHING if others <= known.keys()}
        return [one for one in dict.fromkeys([*named, *known.values()]) if one not in nothing]

    def chat_templates(self) -> dict[str, str]:
        """Return the default template under `tokenizer.chat_template`, and those under that key and
        their name.
        """
        names = [DEFAULT, *metadata(self._reader, "tokenizer.chat_templates", [])]
        keys = {
            name: "tokenizer.chat_template" + ("" if name == DEFAULT else f".{name}")
            for name in names
        }
        templates = {name: metadata(self._reader, key) for name, key in keys.items()}
        return {name: template for name, template in templates.items() if template is not None}
