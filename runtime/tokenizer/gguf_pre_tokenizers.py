"""Pre-tokenizers of byte-level BPE vocabularies, by the names that GGUF files give under
`tokenizer.ggml.pre`.

llama.cpp (src/llama-vocab.cpp) defines the names. Where the tokenizer.json of a family has another
expression than llama.cpp, the one of tokenizer.json stands here: the model was trained with it.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split

DEFAULT_PRE_TOKENIZER = "default"

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SYMBOLS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
_LLAMA3 = _CONTRACTION + "|" + _WORD + r"|\p{N}{1,3}" + _SYMBOLS + _SPACES
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
# Combining marks belong to their letters.
_QWEN35 = _QWEN2.replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(r"\s\p{L}", r"\s\p{L}\p{M}")
_JAIS2 = (
    _LLAMA3.removesuffix(r"|\s+(?!\S)|\s+")
    + "".join(
        rf"|\s{{{count}}}(?!\S)"
        for count in ("512", "256", "128", "64", "32", "16", "8", "4", "1,2")
    )
    + r"|\s{1}"
)


def _cased(end: str, numbers: str, *, but: str = "") -> str:
    """An expression that also cuts before a capital letter within a word. `end`: what may follow a
    word; `but`: an intersection that takes letters away.
    """
    upper = rf"[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}{but}]"
    lower = rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}{but}]"
    start = r"[^\r\n\p{L}\p{N}]?"
    words = f"{start}{upper}*{lower}+{end}|{start}{upper}+{lower}*{end}"
    return words + "|" + numbers + r"| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _SPACES


_TEKKEN = _cased("", r"\p{N}")
_GPT4O = _cased(_CONTRACTION + "?", r"\p{N}{1,3}")
_YOUTU = _cased(_CONTRACTION + "?", r"\p{N}")
_KIMI_K2 = r"\p{Han}+|" + _cased(_CONTRACTION + "?", r"\p{N}{1,3}", but=r"&&[^\p{Han}]").replace(
    "[\\r\\n/]", "[\\r\\n]"
)
_KANA_AND_HAN = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_DEEPSEEK_WORDS = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*" + _SPACES
)
_DEEPSEEK3 = (r"\p{N}{1,3}", _KANA_AND_HAN, _DEEPSEEK_WORDS)
_SPARK = (
    *_DEEPSEEK3[:2],
    _DEEPSEEK_WORDS.replace(r"+[\r\n]*|\s*[\r\n]+", r"+|[\r\n]"),
    r"\p{N}",
)
_HAN_AND_HANGUL = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
# Letters with case, as of the Unicode version of DeepSeek LLM's tokenizer.json.
_CASED_LETTERS = (
    "\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af"
    "\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1"
    "\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5"
    "\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a"
    "\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    "\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3"
    "\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115"
    "\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149"
    "\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d"
    "\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06"
    "\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df"
    "\U0001e900-\U0001e943"
)
_DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[A-Za-z{_CASED_LETTERS}]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    _HAN_AND_HANGUL,
    r"\p{N}+",
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN_AND_HANGUL, r"\p{N}")
_THREES_FROM_THE_RIGHT = r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"
_SCRIPTS_OF_ASIA = (
    "[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf"
    "\u0e00-\u0e7f\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff"
    "\uac00-\ud7af\u1100-\u11ff]+"
)
_BLOOM = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_SEED = _QWEN2.replace(_SYMBOLS, r"| ?[^\s\p{L}\p{N}\r\n]+")
_BAILING = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)
_EXAONE_MOE = (
    _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
_CHAMELEON = (
    "<sentinel:[0-9]+>",
    "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
    r"([\t\n]|    |  )",
    r"\p{N}",
    r"[\p{P}!-/:-@\[-`{-~]",
    _GPT2,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreTokenizer:
    """How a text is cut before merges.

    Attributes:
        splits: Regular expressions. Each of them cuts the pieces of the one before.
        ignore_merges: Whether a piece that is a token needs no merges.
        add_bos: Whether texts begin with the bos token unless the file says otherwise.
    """

    splits: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False
    normalizer: normalizers.Normalizer | None = None

    def build(self) -> pre_tokenizers.PreTokenizer:
        steps: list[pre_tokenizers.PreTokenizer] = [
            Split(Regex(split), behavior="isolated") for split in self.splits
        ]
        return Sequence([*steps, ByteLevel(add_prefix_space=False, use_regex=False)])


def _same(
    names: str, *splits: str, ignore_merges: bool = False, add_bos: bool = False
) -> dict[str, PreTokenizer]:
    """One rule under several names."""
    rule = PreTokenizer(splits=splits, ignore_merges=ignore_merges, add_bos=add_bos)
    return dict.fromkeys(names.split(), rule)


PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    **_same(
        "gpt-2 phi-2 jina-es jina-de jina-v2-es jina-v2-de jina-v1-en jina-v2-code roberta-bpe "
        "gigachat a.x-4.0 mellum modern-bert mpt olmo jais trillion granite-docling exaone4",
        _GPT2,
    ),
    **_same(
        "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2", r"\p{N}", _GPT2
    ),
    **_same(
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
        _LLAMA3,
        ignore_merges=True,
        add_bos=True,
    ),
    **_same("smaug-bpe dbrx chatglm-bpe", _LLAMA3),
    **_same("glm4 glm5", _LLAMA3, ignore_merges=True),
    **_same("jais-2", _JAIS2),
    "qwen2": PreTokenizer(splits=(_QWEN2,), normalizer=normalizers.NFC()),
    "qwen35": PreTokenizer(splits=(_QWEN35,), normalizer=normalizers.NFC()),
    **_same("deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2", _QWEN2),
    **_same("ufakzeka", _QWEN2.removeprefix(_CONTRACTION + "|")),
    **_same("laguna", r"[^\n]+|[\n]+", _QWEN2),
    **_same("minicpm5", r"\p{N}{1,3}", _QWEN2.replace(r"\p{N}|", r"\p{N}+|"), ignore_merges=True),
    **_same("seed-coder", _SEED),
    **_same("bailingmoe bailingmoe2 llada-moe", _BAILING),
    **_same("exaone-moe", _EXAONE_MOE),
    **_same("tekken", _TEKKEN, ignore_merges=True, add_bos=True),
    **_same("gpt-4o llama4 kanana2 talkie minimax-m2", _GPT4O),
    **_same("granite-embed-multi-97m", _GPT4O, ignore_merges=True),
    **_same("tiny_aya cohere2moe", r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O),
    **_same("kimi-k2", _KIMI_K2),
    **_same(
        "youtu",
        "[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c"
        "\u3001-\u303f\ufe30-\ufe4f]+|[\u3105-\u312f]+|" + _KANA_AND_HAN,
        _YOUTU,
        ignore_merges=True,
    ),
    **_same("deepseek-v3 hunyuan-dense joyai-llm hy_v4", *_DEEPSEEK3),
    **_same("spark2_5", *_SPARK),
    **_same("deepseek-llm", *_DEEPSEEK_LLM),
    **_same("deepseek-coder", *_DEEPSEEK_CODER),
    **_same("afmoe", _THREES_FROM_THE_RIGHT, _SCRIPTS_OF_ASIA, _DEEPSEEK_WORDS),
    **_same("falcon", r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]"),
    **_same("default", r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
    **_same("poro-chat bloom gpt3-finnish", _BLOOM),
    **_same("viking", _BLOOM, r"\p{N}"),
    **_same("superbpe", r"\p{N}+", r"(?=(\d{3})+(?!\d))"),
    **_same("chameleon", *_CHAMELEON, add_bos=True),
}
