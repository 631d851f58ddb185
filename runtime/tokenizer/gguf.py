"""A tokenizer out of a GGUF file's metadata: byte-level BPE (`gpt2`) and SentencePiece BPE
(`llama`).

The keys are those of the GGUF specification (ggml-org/ggml, docs/gguf.md), under `tokenizer.ggml.`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any

from gguf import GGUFReader
from tokenizers import AddedToken, Tokenizer, decoders, normalizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

from ..loader.gguf_reader import FastGGUFReader, metadata, open_gguf
from .chat_template import DEFAULT
from .data import TokenizerData
from .gguf_pre_tokenizers import DEFAULT_PRE_TOKENIZER, PRE_TOKENIZERS, PreTokenizer
from .token_bytes import METASPACE

logger = logging.getLogger(__name__)

_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_SPECIAL_KEYS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
_END_TOKENS = {
    "<|endoftext|>", "<|im_end|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|end|>",
    "<end_of_turn>", "<EOT>", "<|END_OF_TURN_TOKEN|>",
}  # fmt: skip
"""Control tokens that end a turn or a text wherever they occur. The file names one or two, models
use more of them.
"""


class _TokenType(IntEnum):
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4


class _Metadata:
    """The tokenizer's part of a file's metadata. Raises `ValueError` where it contradicts
    itself.
    """

    def __init__(self, path: Path, reader: GGUFReader) -> None:
        self.path = path
        self._reader = reader
        self.tokens: list[str] = self.get("tokens", [])
        self.types: list[int] = self.one_each("token_type", _TokenType.NORMAL)

    def get(self, key: str, default: Any = None) -> Any:
        return metadata(self._reader, f"tokenizer.ggml.{key}", default)

    def one_each(self, key: str, default: Any) -> list[Any]:
        """A list with one entry a token; `default` for all of them where the file has no such
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
        """The token whose id stands under `key`."""
        token_id = self.get(key)
        return self.tokens[token_id] if token_id in range(len(self.tokens)) else None

    def of_type(self, *types: int) -> list[str]:
        return [token for token, kind in zip(self.tokens, self.types, strict=True) if kind in types]

    def end_token_ids(self) -> list[int]:
        named = [token_id for key in _END_KEYS if (token_id := self.get(key)) is not None]
        known = [
            index
            for index, token in enumerate(self.tokens)
            if token in _END_TOKENS and self.types[index] == _TokenType.CONTROL
        ]
        return list(dict.fromkeys([*named, *known]))

    def chat_templates(self) -> dict[str, str]:
        """The default one under `tokenizer.chat_template`, others under that and their name."""
        names = [DEFAULT, *metadata(self._reader, "tokenizer.chat_templates", [])]
        keys = {
            name: "tokenizer.chat_template" + ("" if name == DEFAULT else f".{name}")
            for name in names
        }
        templates = {name: metadata(self._reader, key) for name, key in keys.items()}
        return {name: template for name, template in templates.items() if template is not None}


def read_gguf_tokenizer(path: Path, pre_tokenizer: str | None = None) -> TokenizerData:
    """The tokenizer of a .gguf file. `pre_tokenizer`: the name used instead of the file's.

    Raises `ValueError` for a file without a tokenizer, or with one of another kind.
    """
    source = _Metadata(path, open_gguf(path))
    match source.get("model") if source.tokens else None:
        case "gpt2":
            backend, add_bos = _byte_level_bpe(source, pre_tokenizer)
        case "llama":
            backend, add_bos = _sentencepiece_bpe(source)
        case kind:
            raise ValueError(
                f"{path} has {f'a tokenizer of kind {kind}' if kind else 'no tokenizer'}; name one "
                "with --tokenizer-path"
            )
    _add_tokens(backend, source)
    special_tokens = {
        name: token
        for name, key in _SPECIAL_KEYS.items()
        if (token := source.token(key)) is not None
    }
    before = special_tokens.get("bos_token") if source.get("add_bos_token", add_bos) else None
    after = special_tokens.get("eos_token") if source.get("add_eos_token", False) else None
    around = [token for token in (before, "$A", after) if token is not None]
    ids = {token: backend.token_to_id(token) for token in around if token != "$A"}
    backend.post_processor = TemplateProcessing(
        single=around, pair=None, special_tokens=list(ids.items())
    )
    return TokenizerData(
        backend=backend,
        special_tokens=special_tokens,
        eos_token_ids=source.end_token_ids(),
        chat_templates=source.chat_templates(),
    )


def gguf_eos_token_ids(reader: FastGGUFReader) -> list[int]:
    """The tokens that end a turn or a text, the file's own end-of-sequence token first."""
    return _Metadata(reader.path, reader).end_token_ids()


def _add_tokens(backend: Tokenizer, source: _Metadata) -> None:
    """Control tokens are special; user-defined ones are plain text that is never cut into
    pieces.
    """
    named = [
        token
        for key in (*_SPECIAL_KEYS.values(), *_END_KEYS)
        if (token := source.token(key)) is not None
    ]
    special = dict.fromkeys([*source.of_type(_TokenType.CONTROL, _TokenType.UNKNOWN), *named])
    backend.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in special]
    )
    backend.add_tokens(
        [
            AddedToken(token, special=False, normalized=False)
            for token in source.of_type(_TokenType.USER_DEFINED)
        ]
    )


def _pre_tokenizer(source: _Metadata, forced: str | None) -> PreTokenizer:
    """The pre-tokenizer that the file names, or the forced one. Raises `ValueError` for an unknown
    name.
    """
    named = source.get("pre")
    if named is None and forced is None:
        logger.warning(
            "%s names no pre-tokenizer, so texts are cut as by llama.cpp's default; if answers are "
            "poor, give the right one with --gguf-pre-tokenizer",
            source.path,
        )
    name = forced or named or DEFAULT_PRE_TOKENIZER
    if name in PRE_TOKENIZERS:
        return PRE_TOKENIZERS[name]
    if forced is not None:
        raise ValueError(
            f"--gguf-pre-tokenizer {forced} is not known; use one of {', '.join(PRE_TOKENIZERS)}"
        )
    raise ValueError(
        f"{source.path} names the pre-tokenizer {name!r}, which is not known: name a known one "
        "that cuts alike with --gguf-pre-tokenizer, or give the model's Hugging Face folder with "
        "--tokenizer-path"
    )


def _byte_level_bpe(source: _Metadata, forced: str | None) -> tuple[Tokenizer, bool]:
    """The tokenizer, and whether its texts begin with the bos token unless the file says
    otherwise.
    """
    pre = _pre_tokenizer(source, forced)
    merges = [
        (left, right)
        for left, _, right in (merge.partition(" ") for merge in source.get("merges", []))
    ]
    backend = Tokenizer(_bpe(source, merges, ignore_merges=pre.ignore_merges))
    if pre.normalizer is not None:
        backend.normalizer = pre.normalizer
    backend.pre_tokenizer = pre.build()
    backend.decoder = decoders.ByteLevel()
    return backend, pre.add_bos


def _sentencepiece_bpe(source: _Metadata) -> tuple[Tokenizer, bool]:
    """The tokenizer, and whether its texts begin with the bos token unless the file says otherwise.

    A blank is spelled U+2581; one is put before a text, and before what follows a special token, as
    by SentencePiece's `add_dummy_prefix` and in the tokenizer.json files of such models.
    """
    unknown = source.of_type(_TokenType.UNKNOWN)
    backend = Tokenizer(
        _bpe(
            source,
            _merges_of(source),
            byte_fallback=True,
            fuse_unk=True,
            unk_token=unknown[0] if unknown else source.token("unknown_token_id"),
        )
    )
    spell: list[normalizers.Normalizer] = [normalizers.Replace(" ", METASPACE)]
    read: list[decoders.Decoder] = [
        decoders.Replace(METASPACE, " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    ]
    if source.get("add_space_prefix", True):
        spell.insert(0, normalizers.Prepend(METASPACE))
        read.append(decoders.Strip(" ", 1, 0))
    backend.normalizer = normalizers.Sequence(spell)
    backend.decoder = decoders.Sequence(read)
    return backend, True


def _bpe(source: _Metadata, merges: Sequence[tuple[str, str]], **options: Any) -> BPE:
    vocab = {token: index for index, token in enumerate(source.tokens)}
    try:
        return BPE(vocab, merges, **options)
    except Exception as error:  # tokenizers raises no narrower class
        raise ValueError(f"{source.path}: its tokenizer is broken ({error})") from error


def _merges_of(source: _Metadata) -> list[tuple[str, str]]:
    """Merges that do what SentencePiece does with scores: join the neighbours whose union has the
    highest score.

    A token can be joined from any two others, so each such pair is a merge; the order among those
    of one token is that of transformers' converter.
    """
    vocab = {token: index for index, token in enumerate(source.tokens)}
    ranked: list[tuple[float, int, int, int]] = []
    for index, (token, score, kind) in enumerate(
        zip(source.tokens, source.one_each("scores", 0.0), source.types, strict=True)
    ):
        if kind == _TokenType.NORMAL:
            ranked += [
                (score, cut, len(token) - cut, index)
                for cut in range(1, len(token))
                if token[:cut] in vocab and token[cut:] in vocab
            ]
    ranked.sort(key=lambda entry: entry[:3], reverse=True)
    return [(source.tokens[index][:cut], source.tokens[index][cut:]) for _, cut, _, index in ranked]
