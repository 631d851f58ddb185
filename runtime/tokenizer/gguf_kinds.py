"""The kinds of vocabularies in GGUF files, by `tokenizer.ggml.model`, and how each cuts a text.

| kind | llama.cpp calls it | models |
|---|---|---|
| `gpt2` | BPE | byte-level BPE: most |
| `llama` | SPM | SentencePiece BPE, merged by scores: Llama 2, Gemma to 3 |
| `gemma4` | BPE | SentencePiece BPE with its merges |
| `bert` | WPM | WordPiece: BERT and embedders made from it |
| `t5` | UGM | SentencePiece unigram: XLM-RoBERTa and T5 |

`byte_level_bpe` and the functions below build one kind each.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE, Unigram, WordPiece

from .gguf_pre_tokenizers import DEFAULT_PRE_TOKENIZER, PRE_TOKENIZERS, PreTokenizer
from .gguf_vocabulary import TokenType, Vocabulary
from .token_bytes import METASPACE

logger = logging.getLogger(__name__)


class Kind(NamedTuple):
    """A tokenizer without its special tokens.

    `add_bos` says whether a text begins with the bos token, unless the file says otherwise.
    """

    backend: Tokenizer
    add_bos: bool = True


def byte_level_bpe(source: Vocabulary, forced: str | None) -> Kind:
    pre = _pre_tokenizer(source, forced)
    backend = Tokenizer(_bpe(source, _merges(source), ignore_merges=pre.ignore_merges))
    if pre.normalizer is not None:
        backend.normalizer = pre.normalizer
    backend.pre_tokenizer = pre.build()
    backend.decoder = decoders.ByteLevel()
    return Kind(backend, add_bos=pre.add_bos)


def _pre_tokenizer(source: Vocabulary, forced: str | None) -> PreTokenizer:
    """Return the forced pre-tokenizer, or the file's. Raise `ValueError` for an unknown name."""
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


def scored_bpe(source: Vocabulary, _forced: str | None) -> Kind:
    """SentencePiece BPE. A blank is added before a text and after a special token.

    That is SentencePiece's `add_dummy_prefix`, and the rule of such models' tokenizer.json.
    """
    # The merges that replace SentencePiece's scores. SentencePiece joins the neighbours whose union
    # has the highest score, so every pair of tokens whose union is a token is a merge. The pairs of
    # one token have the order of transformers' converter.
    vocab = {token: index for index, token in enumerate(source.tokens)}
    ranked: list[tuple[float, int, int, int]] = []
    for index, (token, score, kind) in enumerate(
        zip(source.tokens, source.one_each("scores", 0.0), source.types, strict=True)
    ):
        if kind == TokenType.NORMAL:
            ranked += [
                (score, cut, len(token) - cut, index)
                for cut in range(1, len(token))
                if token[:cut] in vocab and token[cut:] in vocab
            ]
    ranked.sort(key=lambda entry: entry[:3], reverse=True)
    tokens = source.tokens
    merges = [(tokens[index][:cut], tokens[index][cut:]) for _, cut, _, index in ranked]
    backend = _spelled_bpe(source, merges)
    if source.get("add_space_prefix", True):
        backend.normalizer = normalizers.Sequence(
            [normalizers.Prepend(METASPACE), backend.normalizer]
        )
        backend.decoder = decoders.Sequence([*_SPELLED, decoders.Strip(" ", 1, 0)])
    return Kind(backend)


def merged_bpe(source: Vocabulary, _forced: str | None) -> Kind:
    """SentencePiece BPE with the file's merges. Lines are split.

    A run of line ends is one token if the vocabulary has it, whatever the merges say.
    """
    backend = _spelled_bpe(source, _merges(source), ignore_merges=True)
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n+"), "isolated")
    return Kind(backend)


_SPELLED: list[decoders.Decoder] = [
    decoders.Replace(METASPACE, " "),
    decoders.ByteFallback(),
    decoders.Fuse(),
]


def _spelled_bpe(
    source: Vocabulary, merges: Sequence[tuple[str, str]], **options: Any
) -> Tokenizer:
    """BPE of a SentencePiece vocabulary.

    A blank is spelled U+2581. A character without a token is spelled by its bytes.
    """
    unknown = source.of_type(TokenType.UNKNOWN)
    options["unk_token"] = unknown[0] if unknown else source.token("unknown_token_id")
    backend = Tokenizer(_bpe(source, merges, byte_fallback=True, fuse_unk=True, **options))
    backend.normalizer = normalizers.Replace(" ", METASPACE)
    backend.decoder = decoders.Sequence(_SPELLED)
    return backend


def _bpe(source: Vocabulary, merges: Sequence[tuple[str, str]], **options: Any) -> BPE:
    vocab = {token: index for index, token in enumerate(source.tokens)}
    try:
        return BPE(vocab, merges, **options)
    except Exception as error:  # tokenizers raises no narrower class
        raise _broken(source, error) from error


def _broken(source: Vocabulary, error: Exception) -> ValueError:
    return ValueError(f"{source.path}: its tokenizer is broken ({error}); download the file again")


def _merges(source: Vocabulary) -> list[tuple[str, str]]:
    """Return the file's merges. A blank can only be the first character of a token."""
    cut = ((merge, merge.find(" ", 1)) for merge in source.get("merges", []))
    return [(merge[:at], merge[at + 1 :]) for merge, at in cut]


def word_piece(source: Vocabulary, _forced: str | None) -> Kind:
    """BERT's WordPiece. The file marks the beginning of a word by U+2581, BERT marks the rest by
    `##`.

    If the file does not say whether texts are put in lower case, its words tell.
    """
    source.tokens = [
        token
        if kind == TokenType.CONTROL
        else token.removeprefix(METASPACE)
        if token.startswith(METASPACE)
        else f"##{token}"
        for token, kind in zip(source.tokens, source.types, strict=True)
    ]
    words = source.of_type(TokenType.NORMAL)
    lower = source.get("normalizer.lowercase", all(word == word.lower() for word in words))
    vocab = {token: index for index, token in enumerate(source.tokens)}
    backend = Tokenizer(WordPiece(vocab, unk_token=source.token("unknown_token_id") or "[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(
        lowercase=lower, strip_accents=source.get("normalizer.strip_accents", lower)
    )
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    return Kind(backend)


def unigram(source: Vocabulary, _forced: str | None) -> Kind:
    """SentencePiece's unigram model: the split of a text with the highest sum of scores."""
    if source.get("treat_whitespace_as_suffix", False):
        raise ValueError(
            f"{source.path} has a vocabulary whose blanks end words, which is not supported; name "
            "the model's Hugging Face folder with --tokenizer-path"
        )
    unknown = source.of_type(TokenType.UNKNOWN)
    vocab = list(zip(source.tokens, source.one_each("scores", 0.0), strict=True))
    steps: list[pre_tokenizers.PreTokenizer] = []
    if source.get("remove_extra_whitespaces", False):
        steps.append(pre_tokenizers.WhitespaceSplit())
    scheme = "always" if source.get("add_space_prefix", True) else "never"
    steps.append(pre_tokenizers.Metaspace(METASPACE, prepend_scheme=scheme))
    try:
        backend = Tokenizer(
            Unigram(vocab, source.tokens.index(unknown[0]) if unknown else None, False)
        )
        if charsmap := source.get("precompiled_charsmap"):
            backend.normalizer = normalizers.Precompiled(bytes(one % 256 for one in charsmap))
    except Exception as error:  # tokenizers raises no narrower class
        raise _broken(source, error) from error
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.Metaspace(METASPACE, prepend_scheme=scheme)
    return Kind(backend, add_bos=False)


KINDS: Mapping[str, Callable[[Vocabulary, str | None], Kind]] = {
    "gpt2": byte_level_bpe,
    "llama": scored_bpe,
    "gemma4": merged_bpe,
    "bert": word_piece,
    "t5": unigram,
}
