"""Converts text to token ids and back, and holds the chat templates. Does not import torch."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import tokenizers

from ..files.folder import config_eos_token_ids
from .chat_template import DEFAULT, ChatTemplateError, ChatTemplates, read_chat_template
from .data import TokenizerData
from .hf import read_hf_tokenizer
from .token_bytes import byte_level_bytes, spelling_of

_ANSWER = "Hello, what can I do for you?"


class Tokenizer:
    """A model's tokenizer."""

    backend: tokenizers.Tokenizer
    vocab_size: int  # Ids from 0 to vocab_size - 1 exist in the tokenizer, added tokens included.
    eos_token_ids: list[int]
    bos_token_id: int | None
    templates: ChatTemplates
    chat_template: str | None
    # `eos_token_ids`, and the special token with which the chat template ends an assistant's turn.
    end_token_ids: list[int]
    special_token_ids: frozenset[int]  # Ids of the tokens that `skip_special_tokens` removes.

    def __init__(self, data: TokenizerData) -> None:
        self.backend = data.backend
        added = self.backend.get_added_tokens_decoder()
        self.vocab_size = max(
            self.backend.get_vocab_size(with_added_tokens=False), 1 + max(added, default=-1)
        )
        self.eos_token_ids = list(data.eos_token_ids)
        bos = data.special_tokens.get("bos_token")
        self.bos_token_id = self.backend.token_to_id(bos) if bos is not None else None
        self.templates = ChatTemplates(data.chat_templates, data.special_tokens)
        self.chat_template = self.templates.default
        self.apply_chat_template = self.templates.render
        self.special_token_ids = frozenset(
            token_id for token_id, token in added.items() if token.special
        )
        self.spelling = spelling_of(self.backend)
        self._bytes: dict[int, bytes] = {}
        if self.spelling is not None and self.spelling.to_bytes is byte_level_bytes:
            # The decoder treats added tokens like others. Then "é" is a part of a character.
            contents = {token_id: token.content for token_id, token in added.items()}
            self._bytes = {
                token_id: content.encode()
                for token_id, content in contents.items()
                if "\ufffd" in byte_level_bytes(content).decode("utf-8", "replace")
            }
        self.end_token_ids = list(dict.fromkeys([*self.eos_token_ids, *self._turn_end()]))

    def _turn_end(self) -> list[int]:
        """Return the tokens after the assistant's text, with which a trained model ends its turn.

        If a model's files name another token, such as that of its base model, the model would
        continue with a turn of the user.
        """
        if self.chat_template is None:
            return []
        try:
            turns = self.apply_chat_template(
                [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": _ANSWER}],
                add_generation_prompt=False,
            )
        except ChatTemplateError:
            return []
        _, told, after = turns.rpartition(_ANSWER)
        ids = self.encode(after.lstrip(), add_special_tokens=False) if told else []
        return [token_id for token_id in ids[:1] if token_id in self.special_token_ids]

    def special_ids(self, marks: Iterable[str]) -> dict[str, int]:
        """Return the marks that are special tokens, with their ids."""
        ids = {mark: self.backend.token_to_id(mark) for mark in marks}
        return {mark: id for mark, id in ids.items() if id in self.special_token_ids}

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return token ids. Raise `ValueError` for a text that is not Unicode.

        `add_special_tokens` adds the tokens that the model expects around a text.
        """
        try:
            # On long texts the batch method without offsets takes little more than half of the time
            # of `encode`.
            return self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[
                0
            ].ids
        except TypeError:
            raise ValueError(
                "the text has half a surrogate pair in it, so it is not Unicode: send valid UTF-8"
            ) from None

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of `ids` like transformers. Bytes that are not UTF-8 become U+FFFD.

        In SentencePiece vocabularies a character keeps its text even if invalid bytes follow,
        unlike in transformers. Therefore a growing text never changes.
        """
        if self.spelling is None:
            return self.backend.decode(ids, skip_special_tokens=skip_special_tokens)
        hidden = self.special_token_ids if skip_special_tokens else frozenset()
        text = b"".join(
            [self.token_bytes(token_id) for token_id in ids if token_id not in hidden]
        ).decode("utf-8", "replace")
        return text.removeprefix(" ") if self.spelling.strips_blank else text

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token, which may be a part of a character. Empty for an unused
        id.
        """
        found = self._bytes.get(token_id)
        if found is None:
            token = self.backend.id_to_token(token_id)
            if token is None:
                found = b""
            elif self.spelling is None:
                found = self.backend.decode([token_id], skip_special_tokens=False).encode()
            else:
                found = self.spelling.to_bytes(token)
            self._bytes[token_id] = found
        return found


def load_tokenizer(
    model_path: str,
    tokenizer_path: str | None = None,
    chat_template: str | None = None,
    *,
    gguf_pre_tokenizer: str | None = None,
) -> Tokenizer:
    """Load the tokenizer of a model folder or .gguf file. Raise `ValueError` with a remedy.

    Args:
        tokenizer_path: A folder, tokenizer.json or .gguf file to use instead. The end tokens are
            then those of both.
        chat_template: A file or a template that replaces the model's.
        gguf_pre_tokenizer: Name of a pre-tokenizer that replaces the one of a .gguf file.
    """
    # Prompts arrive one at a time, and a thread pool in this process would warn whenever it starts
    # a child process.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if tokenizer_path is not None and not Path(tokenizer_path).exists():
        raise ValueError(f"--tokenizer-path {tokenizer_path} does not exist")
    # The readers of .gguf files are imported here, because the gguf library imports numpy.
    path, model = Path(tokenizer_path or model_path), Path(model_path)
    if path.suffix == ".gguf":
        from .gguf import read_gguf_tokenizer

        data = read_gguf_tokenizer(path, gguf_pre_tokenizer)
    else:
        data = read_hf_tokenizer(path)
    if tokenizer_path is not None:
        if model.suffix == ".gguf":
            from ..files.gguf_reader import open_gguf
            from .gguf import gguf_eos_token_ids

            ids = gguf_eos_token_ids(open_gguf(model))
        else:
            ids = config_eos_token_ids(model)
        data = replace(data, eos_token_ids=list(dict.fromkeys([*data.eos_token_ids, *ids])))
    if chat_template is not None:
        data = replace(data, chat_templates={DEFAULT: read_chat_template(chat_template)})
    return Tokenizer(data)
