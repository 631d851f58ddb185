"""Small tokenizers of each family, and folders and GGUF files that hold them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
from gguf import GGUFWriter, TokenType
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from tokenizers.processors import TemplateProcessing

TEXT = (
    "The quick brown fox jumps over the lazy dog; 1234 times in 56 days. naïve café, 東京, "
    "Ελλάδα, 😀 🤖!\n\nQ: what's that?\n"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content "
    "}}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_level() -> Tokenizer:
    """Byte-level BPE with every byte, some merges, three special tokens and a plain added one."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([TEXT] * 3, trainer)
    backend.add_tokens([AddedToken("<think>", normalized=False)])
    return backend


def sentencepiece_vocabulary() -> list[tuple[str, float, TokenType]]:
    """Token, score and type, as in a SentencePiece model: control tokens, bytes, words and their
    parts, characters.
    """
    vocabulary = [
        ("<unk>", 0.0, TokenType.UNKNOWN),
        ("<s>", 0.0, TokenType.CONTROL),
        ("</s>", 0.0, TokenType.CONTROL),
    ]
    vocabulary += [(f"<0x{byte:02X}>", 0.0, TokenType.BYTE) for byte in range(256)]
    words = [
        "▁t",
        "he",
        "▁the",
        "▁q",
        "ui",
        "ck",
        "▁quick",
        "▁qui",
        "in",
        "ing",
        "▁▁",
        "▁▁▁▁",
        "er",
        "▁o",
        "ver",
        "▁over",
        "ve",
        "th",
        "the",
    ]
    vocabulary += [(word, -float(rank), TokenType.NORMAL) for rank, word in enumerate(words)]
    chars = ["▁", *sorted(set("abcdefghijklmnopqrstuvwxyzéï東.,!?0123456789"))]
    return vocabulary + [
        (char, -1000.0 - rank, TokenType.NORMAL) for rank, char in enumerate(chars)
    ]


def byte_fallback(*, prefix: bool = True) -> Tokenizer:
    """BPE with byte tokens for what has none, as converted from SentencePiece; `prefix`: a blank
    goes before each text.
    """
    vocabulary = {token: index for index, (token, _, _) in enumerate(sentencepiece_vocabulary())}
    merges = [
        ("t", "h"),
        ("th", "e"),
        ("h", "e"),
        ("▁", "t"),
        ("▁t", "he"),
        ("u", "i"),
        ("c", "k"),
        ("▁", "▁"),
        ("i", "n"),
        ("▁", "q"),
    ]
    backend = Tokenizer(
        models.BPE(vocabulary, merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>")
    )
    steps: list[Any] = [normalizers.Replace(" ", "▁")]
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), *steps] if prefix else steps
    )
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return backend


def word_piece() -> Tokenizer:
    """Words and parts of words, put together by a decoder that is no row of bytes."""
    pieces = [
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "hello",
        "world",
        "##s",
        "##ly",
        "quick",
        "the",
        ".",
        ",",
        "!",
        "don",
        "'",
        "t",
        "日",
        "##本",
    ]
    backend = Tokenizer(
        models.WordPiece({piece: index for index, piece in enumerate(pieces)}, unk_token="[UNK]")
    )
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(cleanup=False)
    backend.add_special_tokens(["[UNK]", "[CLS]", "[SEP]"])
    return backend


def word_level() -> Tokenizer:
    """Whole words and no decoder: words are joined by blanks."""
    words = ["[UNK]", "[EOS]", "a", "b", "stop", "the", "word", "é"]
    backend = Tokenizer(
        models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="[UNK]")
    )
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(["[UNK]", "[EOS]"])
    return backend


def begin_with(backend: Tokenizer, token: str) -> TemplateProcessing:
    return TemplateProcessing(
        single=f"{token} $A", pair=None, special_tokens=[(token, backend.token_to_id(token))]
    )


def write_folder(folder: Path, backend: Tokenizer, **files: dict[str, Any]) -> Path:
    """A model folder: tokenizer.json and `files` by stem, such as `tokenizer_config={...}`."""
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    for stem, content in files.items():
        (folder / f"{stem}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def write_gguf(
    path: Path, vocabulary: list[tuple[str, float, TokenType]], *, kind: str, **entries: Any
) -> Path:
    """A GGUF file with a tokenizer and nothing else. `entries` go under `tokenizer.ggml.`."""
    writer = GGUFWriter(path, "llama")
    writer.add_tokenizer_model(kind)
    writer.add_token_list([token for token, _, _ in vocabulary])
    writer.add_token_scores([score for _, score, _ in vocabulary])
    writer.add_token_types([int(token_type) for _, _, token_type in vocabulary])
    for key, value in entries.items():
        name = f"tokenizer.ggml.{key}"
        match value:
            case bool():
                writer.add_bool(name, value)
            case int():
                writer.add_uint32(name, value)
            case str():
                writer.add_string(name, value)
            case list():
                writer.add_array(name, value)
    return _close(writer, path)


def write_byte_level_gguf(path: Path, backend: tokenizers.Tokenizer, **entries: Any) -> Path:
    """The GGUF file of a byte-level tokenizer, as llama.cpp's converter writes it."""
    model = json.loads(backend.to_str())
    added = {
        token["id"]: TokenType.CONTROL if token["special"] else TokenType.USER_DEFINED
        for token in model["added_tokens"]
    }
    tokens = sorted(backend.get_vocab().items(), key=lambda item: item[1])
    vocabulary = [(token, 0.0, added.get(index, TokenType.NORMAL)) for token, index in tokens]
    merges = [" ".join(merge) for merge in model["model"]["merges"]]
    return write_gguf(path, vocabulary, kind="gpt2", merges=merges, **entries)


def _close(writer: GGUFWriter, path: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
