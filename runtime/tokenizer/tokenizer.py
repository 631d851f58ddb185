"""Text to token ids and back, chat templates included; no torch."""

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
    vocab_size: int
    """Ids from 0 to vocab_size - 1 exist in the tokenizer (added tokens included)."""
    eos_token_ids: list[int]
    bos_token_id: int | None
    templates: ChatTemplates
    chat_template: str | None
    end_token_ids: list[int]
    """`eos_token_ids`, and the special token that the chat template ends a turn of the assistant
    with.
    """
    special_token_ids: frozenset[int]
    """Ids of the tokens that `skip_special_tokens` leaves out of a text."""

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
            # The decoder reads added tokens as it reads others. Read so, "é" is half a character.
            contents = {token_id: token.content for token_id, token in added.items()}
            self._bytes = {
                token_id: content.encode()
                for token_id, content in contents.items()
                if "\ufffd" in byte_level_bytes(content).decode("utf-8", "replace")
            }
        self.end_token_ids = list(dict.fromkeys([*self.eos_token_ids, *self._turn_end()]))

    def _turn_end(self) -> list[int]:
        """What stands behind the assistant's text in a conversation: a model that learned the
        template says it when it is done.

        Files that name another token, a base model's, make it go on with a turn of the user.
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
        """Those of the marks that are special tokens, with their ids."""
        ids = {mark: self.backend.token_to_id(mark) for mark in marks}
        return {mark: id for mark, id in ids.items() if id in self.special_token_ids}

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids. `add_special_tokens` adds what the model expects around a text, such as its
        first token.

        Raises `ValueError` for a text that is not Unicode.
        """
        try:
            # The batch method without offsets takes little more than half of the time of `encode`
            # on long texts.
            return self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[
                0
            ].ids
        except TypeError:
            raise ValueError(
                "the text has half a surrogate pair in it, so it is not Unicode: send valid UTF-8"
            ) from None

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `ids`, as transformers gives it; bytes that are no UTF-8 become U+FFFD.

        For SentencePiece vocabularies a character keeps its text also where bytes that are none
        follow it (transformers takes it back), so that a text never changes while it grows.
        """
        if self.spelling is None:
            return self.backend.decode(ids, skip_special_tokens=skip_special_tokens)
        hidden = self.special_token_ids if skip_special_tokens else frozenset()
        text = b"".join(
            [self.token_bytes(token_id) for token_id in ids if token_id not in hidden]
        ).decode("utf-8", "replace")
        return text.removeprefix(" ") if self.spelling.strips_blank else text

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for, also where they are part of a character; none for an
        id without a token.
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
    """The tokenizer of a resolved model folder or .gguf file.

    `tokenizer_path`: the folder, tokenizer.json or .gguf file to take it from instead; what ends a
    text is then taken from both. `chat_template`: a file or a template, used instead of the
    model's. `gguf_pre_tokenizer`: the name of a pre-tokenizer, used instead of the one that a
    .gguf file names. Raises `ValueError` with a remedy.
    """
    # Prompts come one at a time, and a thread pool in this process would warn at every child
    # process it starts.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if tokenizer_path is not None and not Path(tokenizer_path).exists():
        raise ValueError(f"--tokenizer-path {tokenizer_path} does not exist")
    data = _read(Path(tokenizer_path or model_path), gguf_pre_tokenizer)
    if tokenizer_path is not None:
        ids = [*data.eos_token_ids, *_read_eos_token_ids(Path(model_path))]
        data = replace(data, eos_token_ids=list(dict.fromkeys(ids)))
    if chat_template is not None:
        data = replace(data, chat_templates={DEFAULT: read_chat_template(chat_template)})
    return Tokenizer(data)


def _read(path: Path, gguf_pre_tokenizer: str | None) -> TokenizerData:
    # Imported where needed: the gguf library brings numpy.
    if path.suffix == ".gguf":
        from .gguf import read_gguf_tokenizer

        return read_gguf_tokenizer(path, gguf_pre_tokenizer)
    return read_hf_tokenizer(path)


def _read_eos_token_ids(path: Path) -> list[int]:
    if path.suffix == ".gguf":
        from ..files.gguf_reader import open_gguf
        from .gguf import gguf_eos_token_ids

        return gguf_eos_token_ids(open_gguf(path))
    return config_eos_token_ids(path)
