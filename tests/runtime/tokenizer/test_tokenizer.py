"""Tokenizers of model folders: the ids, texts and special tokens that transformers gives."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizers import (
    CHATML,
    SPECIAL,
    TEXT,
    begin_with,
    byte_fallback,
    byte_level,
    word_level,
    word_piece,
    write_byte_level_gguf,
    write_folder,
)
from tokenizers import AddedToken, processors
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer, LlamaTokenizer, Qwen2Tokenizer

from piecework.runtime.tokenizer.data import TokenizerData
from piecework.runtime.tokenizer.detokenizer import Detokenizer
from piecework.runtime.tokenizer.tokenizer import Tokenizer, load_tokenizer

TEXTS = [
    "",
    " ",
    TEXT,
    "a<|im_end|>b <think>x",
    "  two  blanks ",
    "</s>x<s> y",
    "\n\n",
    "日本語 😀",
]
CHATML_CONFIG = {
    "bos_token": "<|im_start|>",
    "eos_token": "<|im_end|>",
    "tokenizer_class": "PreTrainedTokenizerFast",
}
LLAMA_CONFIG = {
    "bos_token": "<s>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
    "tokenizer_class": "PreTrainedTokenizerFast",
}


def assert_same_as_transformers(folder: Path) -> None:
    ours, theirs = load_tokenizer(str(folder)), AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        for special in (True, False):
            assert ours.encode(text, add_special_tokens=special) == theirs.encode(
                text, add_special_tokens=special
            ), (text, special)
    assert ours.eos_token_ids[:1] == [theirs.eos_token_id]
    assert ours.bos_token_id == theirs.bos_token_id
    assert ours.vocab_size == len(theirs)
    assert ours.special_token_ids >= set(theirs.all_special_ids)


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"add_bos_token": True},
        {"add_bos_token": False},
        {"add_bos_token": True, "add_eos_token": True},
    ],
)
@pytest.mark.parametrize("processor", ["none", "byte level", "bos"])
def test_special_tokens_around_a_text_are_transformers_ones(
    tmp_path: Path, flags: dict[str, bool], processor: str
) -> None:
    backend = byte_level()
    if processor != "none":
        backend.post_processor = (
            processors.ByteLevel(trim_offsets=False)
            if processor == "byte level"
            else begin_with(backend, SPECIAL[1])
        )
    assert_same_as_transformers(
        write_folder(tmp_path, backend, tokenizer_config={**CHATML_CONFIG, **flags})
    )


@pytest.mark.parametrize("prefix", [True, False])
def test_a_sentencepiece_folder_encodes_as_in_transformers(tmp_path: Path, prefix: bool) -> None:
    backend = byte_fallback(prefix=prefix)
    backend.post_processor = begin_with(backend, "<s>")
    assert_same_as_transformers(write_folder(tmp_path, backend, tokenizer_config=LLAMA_CONFIG))


@pytest.mark.parametrize("tokenizer_class", [LlamaTokenizer, Qwen2Tokenizer])
def test_a_folder_saved_by_transformers_encodes_as_there(
    tmp_path: Path, tokenizer_class: type
) -> None:
    backend = byte_fallback() if tokenizer_class is LlamaTokenizer else byte_level()
    merges = [tuple(merge) for merge in json.loads(backend.to_str())["model"]["merges"]]
    saved = tokenizer_class(vocab=backend.get_vocab(), merges=merges, add_bos_token=True)
    saved.save_pretrained(tmp_path)
    assert_same_as_transformers(tmp_path)


def test_tokens_that_the_config_adds_or_changes(tmp_path: Path) -> None:
    backend = byte_level()
    size = backend.get_vocab_size()
    plain = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    config = {
        **CHATML_CONFIG,
        "added_tokens_decoder": {
            str(size): {"content": "<tool>", "special": False, **plain},
            str(size + 1): {"content": "<secret>", "special": True, **plain},
            "2": {"content": "<|im_end|>", "special": True, **plain, "lstrip": True},
        },
        "additional_special_tokens": ["<more>"],
    }
    folder = write_folder(tmp_path, backend, tokenizer_config=config)
    assert_same_as_transformers(folder)
    ours, theirs = load_tokenizer(str(folder)), AutoTokenizer.from_pretrained(folder)
    text = "a <tool> b <secret>c   <|im_end|><more>"
    ids = ours.encode(text)
    assert ids == theirs.encode(text)
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


def test_end_tokens_come_from_every_file_that_names_them(tmp_path: Path) -> None:
    folder = write_folder(
        tmp_path,
        byte_level(),
        tokenizer_config=CHATML_CONFIG,
        generation_config={"eos_token_id": [2, 0]},
        config={"eos_token_id": 7, "model_type": "llama"},
    )
    assert load_tokenizer(str(folder)).eos_token_ids == [2, 0, 7]


@pytest.mark.parametrize(
    ("template", "ends"),
    [
        (CHATML, [0, 2]),
        (CHATML.replace("<|im_end|>", ""), [0]),
        (CHATML.replace("<|im_end|>", "<end>"), [0]),
        ("{{ raise_exception('no') }}", [0]),
        ("{% for m in messages %}{{ m.content[:3] }}<|im_end|>{% endfor %}", [0]),
        (None, [0]),
    ],
)
def test_the_special_token_that_ends_a_turn_in_the_chat_template_is_an_end_token(
    tmp_path: Path, template: str | None, ends: list[int]
) -> None:
    config = {**CHATML_CONFIG, "eos_token": "<|endoftext|>", "chat_template": template}
    tokenizer = load_tokenizer(str(write_folder(tmp_path, byte_level(), tokenizer_config=config)))
    assert (tokenizer.eos_token_ids, tokenizer.end_token_ids) == ([0], ends)


def test_another_tokenizer_ends_texts_as_the_model_does_too(tmp_path: Path) -> None:
    model = write_folder(tmp_path / "model", byte_level(), config={"eos_token_id": 11})
    other = write_folder(tmp_path / "other", byte_level(), tokenizer_config=CHATML_CONFIG)
    for path in (other, other / "tokenizer.json"):
        assert load_tokenizer(str(model), str(path)).eos_token_ids == [2, 11]


def test_a_folder_without_tokenizer_json_is_converted(tmp_path: Path) -> None:
    saved = write_folder(
        tmp_path / "saved",
        byte_level(),
        tokenizer_config={**CHATML_CONFIG, "tokenizer_class": "GPT2Tokenizer"},
    )
    byte_level().model.save(str(saved))
    expected = load_tokenizer(str(saved)).encode(TEXT)
    (saved / "tokenizer.json").unlink()
    converted = load_tokenizer(str(saved))
    assert converted.encode(TEXT) == expected
    assert converted.eos_token_ids == [2]


def test_limits_in_tokenizer_json_do_not_cut_prompts(tmp_path: Path) -> None:
    backend = byte_level()
    backend.enable_truncation(4)
    backend.enable_padding(length=50)
    tokenizer = load_tokenizer(str(write_folder(tmp_path, backend)))
    assert tokenizer.encode(TEXT) == byte_level().encode(TEXT).ids
    assert tokenizer.encode("a") == byte_level().encode("a").ids


def test_loading_imports_neither_torch_nor_transformers(tmp_path: Path) -> None:
    folder = write_folder(
        tmp_path / "model",
        byte_level(),
        tokenizer_config={**CHATML_CONFIG, "chat_template": CHATML},
    )
    file = write_byte_level_gguf(tmp_path / "model.gguf", byte_level(), pre="smollm")
    program = f"""
import sys
from piecework.runtime.tokenizer.tokenizer import load_tokenizer
from piecework.runtime.tokenizer.output_processor import RequestState
for path in ({str(folder)!r}, {str(file)!r}):
    tokenizer = load_tokenizer(path, chat_template={CHATML!r})
    assert tokenizer.encode(tokenizer.apply_chat_template([{{"role": "user", "content": "hi"}}]))
print("torch" in sys.modules, "transformers" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["False", "False"]


BACKENDS = {
    "byte level": byte_level(),
    "byte fallback": byte_fallback(),
    "word piece": word_piece(),
    "word level": word_level(),
}


def tokenizer_of(backend: Backend, **fields: Any) -> Tokenizer:
    return Tokenizer(TokenizerData(backend=backend, **fields))


@pytest.mark.parametrize("name", ["byte level", "word piece", "word level"])
@given(data=st.data(), skip=st.booleans())
def test_any_ids_decode_as_in_the_library(name: str, data: st.DataObject, skip: bool) -> None:
    backend = BACKENDS[name]
    ids = data.draw(st.lists(st.integers(0, backend.get_vocab_size() + 3)))
    assert tokenizer_of(backend).decode(ids, skip_special_tokens=skip) == backend.decode(
        ids, skip_special_tokens=skip
    )


@given(text=st.text(), prefix=st.booleans(), skip=st.booleans())
def test_sentencepiece_ids_of_any_text_decode_as_in_the_library(
    text: str, prefix: bool, skip: bool
) -> None:
    backend = BACKENDS["byte fallback"] if prefix else byte_fallback(prefix=False)
    ids = backend.encode(text).ids
    assert tokenizer_of(backend).decode(ids, skip_special_tokens=skip) == backend.decode(
        ids, skip_special_tokens=skip
    )


@pytest.mark.parametrize("name", ["byte level", "byte fallback"])
@given(text=st.text())
def test_any_text_survives_encode_and_decode(name: str, text: str) -> None:
    tokenizer = tokenizer_of(BACKENDS[name])
    text = text.replace("▁", "")  # a SentencePiece vocabulary cannot tell it from a blank
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


@given(text=st.text())
def test_token_bytes_are_the_text_in_pieces(text: str) -> None:
    tokenizer = tokenizer_of(BACKENDS["byte level"])
    assert b"".join(map(tokenizer.token_bytes, tokenizer.encode(text))) == text.encode()


def test_token_bytes_of_sentencepiece_and_added_tokens() -> None:
    tokenizer = tokenizer_of(byte_fallback())
    ids = {
        token: tokenizer.backend.token_to_id(token) for token in ("▁the", "<0xE2>", "</s>", "東")
    }
    assert {token: tokenizer.token_bytes(token_id) for token, token_id in ids.items()} == {
        "▁the": b" the",
        "<0xE2>": b"\xe2",
        "</s>": b"</s>",
        "東": "東".encode(),
    }
    assert tokenizer.token_bytes(tokenizer.vocab_size) == b""


def test_added_tokens_are_their_content_in_any_script() -> None:
    backend = byte_level()
    backend.add_tokens(["é!"])
    tokenizer = tokenizer_of(backend)
    assert tokenizer.token_bytes(backend.token_to_id("é!")) == "é!".encode()
    assert tokenizer.decode(tokenizer.encode("aé!b")) == "aé!b"


METASPACES = ["▁▁", "▁▁▁", "\n\n", "▁<PRE>", "<tag>"]


@given(
    text=st.lists(st.sampled_from(["a", " ", "  ", "   ", "\n", "▁", "<PRE>", "<tag>", "é", "😀"]))
)
def test_added_tokens_are_spelled_as_the_decoder_reads_them(text: list[str]) -> None:
    backend = byte_fallback(prefix=False)
    backend.add_tokens([AddedToken(token, normalized=False) for token in METASPACES])
    tokenizer = tokenizer_of(backend)
    ids = [*map(backend.token_to_id, METASPACES), *tokenizer.encode("".join(text))]
    expected = backend.decode(ids, skip_special_tokens=False)
    stream = Detokenizer(tokenizer, [0], stop=["\0"], include_stop=False, skip_special_tokens=False)
    streamed = "".join(stream.push([token_id]).text for token_id in ids) + stream.finish()
    assert tokenizer.decode(ids, skip_special_tokens=False) == expected == streamed
    assert b"".join(map(tokenizer.token_bytes, ids)).decode() == expected


def test_half_a_surrogate_pair_is_refused() -> None:
    with pytest.raises(ValueError, match="surrogate"):
        tokenizer_of(byte_level()).encode("a\ud83d")


@settings(max_examples=20)
@given(count=st.integers(0, 3))
def test_vocab_size_counts_added_tokens(count: int) -> None:
    backend = byte_level()
    size = tokenizer_of(backend).vocab_size
    backend.add_tokens([f"<new{index}>" for index in range(count)])
    tokenizer = tokenizer_of(backend)
    assert tokenizer.vocab_size == size + count
    assert (
        backend.id_to_token(tokenizer.vocab_size - 1) is not None
        and backend.id_to_token(tokenizer.vocab_size) is None
    )


def test_a_folder_without_a_tokenizer_says_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--tokenizer-path"):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"]
)
def test_a_broken_file_is_named(tmp_path: Path, name: str) -> None:
    write_folder(tmp_path, byte_level())
    (tmp_path / name).write_text('{"version": ')
    with pytest.raises(ValueError, match=name):
        load_tokenizer(str(tmp_path))


def test_what_transformers_cannot_convert_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"no model")
    with pytest.raises(ValueError, match=r"--tokenizer-path|pip install sentencepiece") as caught:
        load_tokenizer(str(tmp_path))
    assert "\n" not in str(caught.value)
