"""How byte-level BPE vocabularies cut a text before merging, by the names that GGUF files use
(`tokenizer.ggml.pre`).

Each is the pre-tokenizer of the tokenizer.json that the vocabulary was made with; llama.cpp
(src/llama-vocab.cpp) gives the names. The wrong one still encodes every text, but not as the model
has learned it.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence, Split

FALLBACK = "gpt-2"

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_QWEN35 = _QWEN2.replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(r"\s\p{L}", r"\s\p{L}\p{M}")
"""Marks belong to their letters."""
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK_CODER = (
    r"[\r\n]",
    r"\s?\p{L}+",
    r"\s?\p{P}+",
    "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
    r"\p{N}",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreTokenizer:
    """`splits`: regular expressions, each of which cuts out its matches; without any, GPT-2's own
    rule cuts.

    `digits`: every digit is a piece of its own. `ignore_merges`: a piece that is a token is not
    built by merges. `add_bos`: texts begin with the bos token unless the file says otherwise.
    """

    splits: tuple[str, ...] = ()
    digits: bool = False
    ignore_merges: bool = False
    add_bos: bool = False
    normalizer: normalizers.Normalizer | None = None

    def build(self) -> pre_tokenizers.PreTokenizer:
        steps: list[pre_tokenizers.PreTokenizer] = [
            Split(Regex(split), behavior="isolated") for split in self.splits
        ]
        if self.digits:
            steps.append(Digits(individual_digits=True))
        return Sequence([*steps, ByteLevel(add_prefix_space=False, use_regex=not self.splits)])


_LLAMA3_RULE = PreTokenizer(splits=(_LLAMA3,), ignore_merges=True, add_bos=True)
_DIGITS_RULE = PreTokenizer(digits=True)

PRE_TOKENIZERS = {
    **dict.fromkeys((FALLBACK, "default", "phi-2", "olmo"), PreTokenizer()),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r"), _DIGITS_RULE),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "lfm2", "pixtral"), _LLAMA3_RULE
    ),
    **dict.fromkeys(("smaug-bpe", "dbrx", "chatglm-bpe", "glm4"), PreTokenizer(splits=(_LLAMA3,))),
    "qwen2": PreTokenizer(splits=(_QWEN2,), normalizer=normalizers.NFC()),
    "qwen35": PreTokenizer(splits=(_QWEN35,), normalizer=normalizers.NFC()),
    "deepseek-r1-qwen": PreTokenizer(splits=(_QWEN2,)),
    "tekken": PreTokenizer(splits=(_TEKKEN,), ignore_merges=True, add_bos=True),
    "deepseek-coder": PreTokenizer(splits=_DEEPSEEK_CODER),
}
