"""Reads the tokenizer of a GGUF file's metadata."""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken, Tokenizer
from tokenizers.processors import TemplateProcessing

from ..files.gguf_reader import FastGGUFReader, open_gguf
from .data import TokenizerData
from .gguf_kinds import KINDS
from .gguf_vocabulary import END_KEYS, TokenType, Vocabulary

_SPECIAL_KEYS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
    "cls_token": "cls_token_id",
    "sep_token": "seperator_token_id",  # spelled so in the files
    "mask_token": "mask_token_id",
}
# Tokens that files of BERT need not name.
_BERT = {"cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]"}


def read_gguf_tokenizer(path: Path, pre_tokenizer: str | None = None) -> TokenizerData:
    """Read the tokenizer of a .gguf file. `pre_tokenizer`: the name used instead of the file's.

    Raises `ValueError` for a file without a tokenizer, or with one of another kind.
    """
    source = Vocabulary(path, open_gguf(path))
    name: str = source.get("model", "") if source.tokens else ""
    if name not in KINDS:
        found = f"a vocabulary of kind {name!r}, which is not supported" if name else "no tokenizer"
        raise ValueError(
            f"{path} has {found} ({', '.join(KINDS)} are); name the model's Hugging Face folder "
            "with --tokenizer-path"
        )
    kind = KINDS[name](source, pre_tokenizer)
    _add_tokens(kind.backend, source)
    special_tokens = {
        name: token
        for name, key in _SPECIAL_KEYS.items()
        if (token := source.token(key)) is not None
    }
    first, last = "bos_token", "eos_token"
    if pairs_by_kind := name == "bert":
        special_tokens = {k: v for k, v in _BERT.items() if v in source.tokens} | special_tokens
        first = "bos_token" if "bos_token" in special_tokens else "cls_token"
        last = "sep_token"
    before, after = (
        [special_tokens[token]] if token in special_tokens and (pairs_by_kind or added) else []
        for token, added in (
            (first, source.get("add_bos_token", kind.add_bos)),
            (last, source.get("add_eos_token", False)),
        )
    )
    # BERT separates the texts of a pair by kinds, other models by two end tokens.
    second = ["$B:1", *(f"{one}:1" for one in after)] if pairs_by_kind else [*after, "$B", *after]
    ids = {token: kind.backend.token_to_id(token) for token in [*before, *after]}
    kind.backend.post_processor = TemplateProcessing(
        single=[*before, "$A", *after],
        pair=[*before, "$A", *after, *second],
        special_tokens=list(ids.items()),
    )
    return TokenizerData(
        backend=kind.backend,
        special_tokens=special_tokens,
        eos_token_ids=source.end_token_ids(),
        chat_templates=source.chat_templates(),
    )


def gguf_eos_token_ids(reader: FastGGUFReader) -> list[int]:
    """Return the tokens that end a turn or a text, the file's own end-of-sequence token first."""
    return Vocabulary(reader.path, reader).end_token_ids()


def _add_tokens(backend: Tokenizer, source: Vocabulary) -> None:
    """Add tokens. Control tokens are special. User-defined tokens are text that is never split."""
    named = [
        token
        for key in (*_SPECIAL_KEYS.values(), *END_KEYS)
        if (token := source.token(key)) is not None
    ]
    special = dict.fromkeys([*source.of_type(TokenType.CONTROL, TokenType.UNKNOWN), *named])
    backend.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in special]
    )
    backend.add_tokens(
        [
            AddedToken(token, special=False, normalized=False)
            for token in source.of_type(TokenType.USER_DEFINED)
        ]
    )
