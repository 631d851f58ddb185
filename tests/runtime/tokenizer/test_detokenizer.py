"""Incremental detokenization: whatever the ids and however they arrive, the text is that of
decoding them at once, in whole characters.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tiny_tokenizers import TEXT, byte_fallback, byte_level, word_level, word_piece
from tokenizers import Tokenizer as Backend
from tokenizers import decoders

from piecework.runtime.tokenizer.data import TokenizerData
from piecework.runtime.tokenizer.detokenizer import Detokenizer
from piecework.runtime.tokenizer.token_bytes import byte_alphabet
from piecework.runtime.tokenizer.tokenizer import Tokenizer


def tokenizer_of(backend: Backend) -> Tokenizer:
    return Tokenizer(TokenizerData(backend=backend))


TOKENIZERS = {
    "byte level": tokenizer_of(byte_level()),
    "byte fallback": tokenizer_of(byte_fallback()),
    "byte fallback without prefix": tokenizer_of(byte_fallback(prefix=False)),
    "word piece": tokenizer_of(word_piece()),
    "word level": tokenizer_of(word_level()),
}
every_tokenizer = pytest.mark.parametrize("name", list(TOKENIZERS))
BYTES = [name for name in TOKENIZERS if name.startswith("byte")]


def detokenizer(
    tokenizer: Tokenizer,
    prompt: Sequence[int] = (),
    *,
    stop: Sequence[str] = (),
    include_stop: bool = False,
    skip: bool = True,
    min_tokens: int = 0,
) -> Detokenizer:
    return Detokenizer(
        tokenizer,
        prompt,
        stop=stop,
        include_stop=include_stop,
        skip_special_tokens=skip,
        min_tokens=min_tokens,
    )


def ids_of(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    """Any ids: half characters, special tokens, ids without a token; runs of bytes more often than
    by chance.
    """
    a_byte = st.sampled_from(
        [
            tokenizer.backend.token_to_id(token) or 0
            for token in ("â", "Ĥ", "¬", "<0xE2>", "<0x82>", "<0xAC>")
        ]
    )
    return st.lists(
        st.integers(0, tokenizer.vocab_size + 2) | a_byte | st.integers(0, 3), max_size=30
    )


PARTS = {encoded[:length] for point in range(0x80, 0x110000, 0x40) if not 0xD800 <= point < 0xE000
         for encoded in [chr(point).encode()] for length in range(1, len(encoded))}  # fmt: skip
"""Every beginning of a character that is not all of it: code points whose last six bits differ
begin alike.
"""


def text_of(tokenizer: Tokenizer, ids: Sequence[int], *, skip: bool = True) -> str:
    """The text of ids, without the replacement character of one that is incomplete at the end."""
    text = tokenizer.decode(ids, skip_special_tokens=skip)
    hidden = tokenizer.special_token_ids if skip else frozenset[int]()
    content = b"".join(
        tokenizer.token_bytes(token_id) for token_id in ids if token_id not in hidden
    )
    return (
        text[:-1]
        if tokenizer.spelling is not None
        and any(content[-length:] in PARTS for length in (1, 2, 3))
        else text
    )


def split(data: st.DataObject, ids: list[int]) -> list[list[int]]:
    """The ids in pushes of any size, empty ones too."""
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=len(ids))))
    return [ids[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(ids)], strict=True)]


def run(stream: Detokenizer, pushes: list[list[int]]) -> tuple[str, str | None, int]:
    """All text, the stop string, and how many ids counted."""
    text, consumed = "", 0
    for push in pushes:
        decoded = stream.push(push)
        text, consumed = text + decoded.text, consumed + decoded.consumed
        if decoded.stop is not None:
            return text + stream.finish(), decoded.stop, consumed
    return text + stream.finish(), None, consumed


@every_tokenizer
@given(data=st.data(), skip=st.booleans())
def test_the_pieces_are_the_text_of_decoding_at_once(
    name: str, data: st.DataObject, skip: bool
) -> None:
    tokenizer = TOKENIZERS[name]
    ids = data.draw(ids_of(tokenizer))
    text, stop, consumed = run(detokenizer(tokenizer, skip=skip), split(data, ids))
    assert text == text_of(tokenizer, ids, skip=skip)
    assert (stop, consumed) == (None, len(ids))


@every_tokenizer
@given(data=st.data(), skip=st.booleans())
def test_the_text_goes_on_from_the_prompt(name: str, data: st.DataObject, skip: bool) -> None:
    tokenizer = TOKENIZERS[name]
    prompt = tokenizer.encode(
        data.draw(st.text(st.sampled_from("the quick over hello a b é"), max_size=30))
    )
    ids = data.draw(ids_of(tokenizer))
    text, _, _ = run(detokenizer(tokenizer, prompt, skip=skip), split(data, ids))
    before = tokenizer.decode(prompt, skip_special_tokens=skip)
    assert before + text == text_of(tokenizer, [*prompt, *ids], skip=skip)


def test_the_blank_before_the_first_word_depends_on_the_prompt() -> None:
    tokenizer = TOKENIZERS["byte fallback"]
    the = tokenizer.backend.token_to_id("▁the")
    assert detokenizer(tokenizer).push([the]).text == "the"
    assert detokenizer(tokenizer, [the]).push([the]).text == " the"
    assert detokenizer(tokenizer, [1, the, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2]).push([the]).text == " the"


@pytest.mark.parametrize("name", BYTES)
@given(text=st.text(st.sampled_from(TEXT + "¡ह한👩‍👩‍👧\ufeff")))
def test_no_character_is_given_before_it_is_whole(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    stream, given_so_far = detokenizer(tokenizer), ""
    for token_id in tokenizer.encode(text):
        given_so_far += stream.push([token_id]).text
        assert text.startswith(given_so_far)
    assert given_so_far == text  # nothing waits longer than it must


def rewriting_tokenizer() -> Tokenizer:
    """Its decoder takes back characters that bytes follow which are no character."""
    backend = byte_fallback()
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer_of(backend)


WITH_BYTES = {**{name: TOKENIZERS[name] for name in BYTES}, "rewriting": rewriting_tokenizer()}


def as_bytes(tokenizer: Tokenizer, text: str) -> list[int]:
    """The text a byte a token."""
    alphabet = byte_alphabet()
    names = ([f"<0x{byte:02X}>", alphabet[byte]] for byte in text.encode())
    return [
        next(found for name in both if (found := tokenizer.backend.token_to_id(name)) is not None)
        for both in names
    ]


@pytest.mark.parametrize("name", list(WITH_BYTES))
@pytest.mark.parametrize("before", ["", "é", "a", "\ufffd", "a\ufffd\ufffd"])
@pytest.mark.parametrize("cut", ["€", "é", "😀", "\ufffd"])
def test_a_character_that_is_cut_off_at_the_end_is_left_out(
    name: str, before: str, cut: str
) -> None:
    """And only that: a U+FFFD that the model wrote stays."""
    tokenizer = WITH_BYTES[name]
    for missing in range(1, len(cut.encode())):
        ids = [*as_bytes(tokenizer, before), *as_bytes(tokenizer, cut)[:-missing]]
        assert run(detokenizer(tokenizer), [[token_id] for token_id in ids])[0] == before
    assert run(detokenizer(tokenizer), [as_bytes(tokenizer, before + cut)])[0] == before + cut


@pytest.mark.parametrize("name", list(WITH_BYTES))
def test_bytes_that_no_others_can_make_a_character_are_replaced(name: str) -> None:
    tokenizer = WITH_BYTES[name]
    stray = as_bytes(tokenizer, "€")[1:]
    assert run(detokenizer(tokenizer), [[token_id] for token_id in stray])[0] == "\ufffd\ufffd"


@pytest.mark.parametrize("name", ["word piece", "word level"])
def test_a_replacement_character_of_the_vocabulary_stays_at_the_end(name: str) -> None:
    backend = Backend.from_str(TOKENIZERS[name].backend.to_str())
    backend.add_tokens(["\ufffd"])
    tokenizer = tokenizer_of(backend)
    ids = [backend.token_to_id("the"), backend.token_to_id("\ufffd")]
    assert run(detokenizer(tokenizer), [[token_id] for token_id in ids])[0] == tokenizer.decode(ids)
    assert tokenizer.decode(ids).endswith("\ufffd")


def first_complete(text: str, stops: Sequence[str]) -> tuple[int, str] | None:
    """The stop string that is complete first and where it ends, by the definition."""
    ends = [
        (text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop and stop in text
    ]
    return (min(ends)[0], min(ends)[2]) if ends else None


@every_tokenizer
@given(data=st.data(), skip=st.booleans(), include=st.booleans())
def test_text_ends_at_the_stop_string_that_is_complete_first(
    name: str, data: st.DataObject, skip: bool, include: bool
) -> None:
    tokenizer = TOKENIZERS[name]
    ids = data.draw(ids_of(tokenizer))
    whole = text_of(tokenizer, ids, skip=skip)
    places = st.tuples(st.integers(0, len(whole)), st.integers(0, 6))
    stops = data.draw(
        st.lists(
            places.map(lambda place: whole[place[0] : place[0] + place[1]])
            | st.text("ab €\ufffd", max_size=3),
            max_size=5,
        )
    )
    text, stop, consumed = run(
        detokenizer(tokenizer, stop=stops, include_stop=include, skip=skip), split(data, ids)
    )
    expected = first_complete(whole, stops)
    if expected is None:
        assert (text, stop, consumed) == (whole, None, len(ids))
    else:
        end, matched = expected
        assert text == whole[: end if include else end - len(matched)]
        assert stop in (matched, None)
        # None: it was complete only with what came out at the end.
        assert stop is not None or consumed == len(ids)


@every_tokenizer
@given(data=st.data())
def test_consumed_ends_with_the_id_that_completed_the_stop_string(
    name: str, data: st.DataObject
) -> None:
    tokenizer = TOKENIZERS[name]
    ids = data.draw(ids_of(tokenizer))
    whole = tokenizer.decode(ids)
    place = data.draw(st.integers(0, len(whole)))
    stop = whole[place : place + data.draw(st.integers(1, 5))] or "x"
    _, matched, consumed = run(detokenizer(tokenizer, stop=[stop]), split(data, ids))
    plain, text, needed = detokenizer(tokenizer), "", None
    for count, token_id in enumerate(ids, 1):
        text += plain.push([token_id]).text
        if stop in text:
            needed = count
            break
    assert (consumed if matched is not None else None) == needed


@given(data=st.data(), stops=st.lists(st.text("ab ", min_size=1, max_size=5), max_size=4))
def test_nothing_is_held_back_but_the_beginning_of_a_stop_string(
    data: st.DataObject, stops: list[str]
) -> None:
    tokenizer = TOKENIZERS["byte level"]
    stream, shown, pushed = detokenizer(tokenizer, stop=stops), "", ""
    for char in data.draw(st.text("ab ")):
        decoded = stream.push(tokenizer.encode(char))
        pushed, shown = pushed + char, shown + decoded.text
        if decoded.stop is not None:
            break
        held = pushed[len(shown) :]
        assert pushed == shown + held and (not held or any(stop.startswith(held) for stop in stops))


@example(stops=["abcd", "bc"], text="xabcd", expected=("xa", "bc"))
@example(stops=["bc", "abc"], text="xabcd", expected=("x", "abc"))
@example(stops=["ab", "abc"], text="xabcd", expected=("x", "ab"))
@example(stops=["aab"], text="aaab", expected=("a", "aab"))
@example(stops=[""], text="aaab", expected=("aaab", None))
@given(stops=st.just(["b"]), text=st.just("ab"), expected=st.just(("a", "b")))
def test_which_of_several_stop_strings_counts(
    stops: list[str], text: str, expected: tuple[str, str | None]
) -> None:
    tokenizer = TOKENIZERS["byte level"]
    ids = tokenizer.encode(text)
    for pushes in ([ids], [[token_id] for token_id in ids]):
        shown, stop, _ = run(detokenizer(tokenizer, stop=stops), pushes)
        assert (shown, stop) == expected


def test_a_thousand_stop_strings() -> None:
    tokenizer = TOKENIZERS["byte level"]
    stops = [f"stop number {index}." for index in range(1000)]
    text, stop, _ = run(
        detokenizer(tokenizer, stop=stops),
        [[token_id] for token_id in tokenizer.encode("no stop number 9 but stop number 77. More")],
    )
    assert (text, stop) == ("no stop number 9 but ", "stop number 77.")


@pytest.mark.parametrize("least", range(12))
def test_stop_strings_are_text_before_the_least_number_of_tokens(least: int) -> None:
    tokenizer = TOKENIZERS["byte level"]
    ids = tokenizer.encode("one END two END three END")
    ends = [at + 1 for at in range(len(ids)) if tokenizer.decode(ids[: at + 1]).endswith("END")]
    assert len(ends) == 3
    end = next((end for end in ends if end >= least), None)
    watching = detokenizer(tokenizer, stop=["END"], min_tokens=least)
    shown, met, _ = run(watching, [[token_id] for token_id in ids])
    text = tokenizer.decode(ids[:end])
    assert (shown, met) == ((text.removesuffix("END"), "END") if end else (text, None))


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("stop", ["<|im_end|>", "<|im_end|>b", "a<|im_end|>"])
def test_the_text_of_a_special_token_counts_for_stop_strings(
    skip: bool, include: bool, stop: str
) -> None:
    tokenizer = TOKENIZERS["byte level"]
    text = "Hi a<|im_end|>b c"
    pushes = [[token_id] for token_id in tokenizer.encode(text)]
    shown, met, _ = run(
        detokenizer(tokenizer, stop=[stop], skip=skip, include_stop=include), pushes
    )
    assert met == stop
    assert shown == text[: text.index(stop)] + (stop if include else "")


def test_a_hidden_special_token_that_begins_a_stop_string_does_not_show() -> None:
    tokenizer = TOKENIZERS["byte level"]
    ids = tokenizer.encode("a<|im_end|>b<|im_end|>")
    pushes = [[token_id] for token_id in ids]
    watching = detokenizer(tokenizer, stop=["<|im_end|>c"], skip=True)
    assert run(watching, pushes)[:2] == ("ab", None)


def test_a_decoder_that_takes_text_back_does_not_end_the_stream() -> None:
    tokenizer = rewriting_tokenizer()
    ids = [
        tokenizer.backend.token_to_id(token)
        for token in ("the", "<0xE2>", "<0x82>", "<0xAC>", "<0xE2>", "a", "ver", "ing")
    ]
    text, _, _ = run(detokenizer(tokenizer), [[token_id] for token_id in ids])
    assert text.startswith("the€") and text.endswith("vering")


def test_a_prompt_that_ends_within_a_character_is_not_repeated() -> None:
    tokenizer = rewriting_tokenizer()
    prompt = [tokenizer.backend.token_to_id(token) for token in ("the", "<0xE2>")]
    assert (
        "the"
        not in run(detokenizer(tokenizer, prompt), [[tokenizer.backend.token_to_id("ing")]])[0]
    )


def seconds(stream: Detokenizer, ids: Sequence[int]) -> float:
    begin = time.thread_time()
    for token_id in ids:
        stream.push([token_id])
    return time.thread_time() - begin


STREAMS = {
    "text": ("byte level", [*TOKENIZERS["byte level"].encode(TEXT)]),
    "half characters": ("byte level", [TOKENIZERS["byte level"].backend.token_to_id("â")]),
    "hidden tokens": ("byte level", [0]),
    "bytes": ("byte fallback", [3 + 0xE2]),
    "words": ("word piece", [3, 4, 5, 7]),
    "hidden words": ("word piece", [1]),
    "no tokens": ("word level", [10_000]),
    "replacement characters": ("rewriting", [3 + 0xE2]),
}


@pytest.mark.parametrize("case", list(STREAMS))
def test_a_token_costs_as_much_after_ten_thousand(case: str) -> None:
    name, pattern = STREAMS[case]
    tokenizer = rewriting_tokenizer() if name == "rewriting" else TOKENIZERS[name]
    ids = [pattern[index % len(pattern)] for index in range(10_000)]
    early, late = [], []
    for _ in range(3):
        stream = detokenizer(tokenizer, stop=["\x00 never", "\ufffd" * 4 + "!"])
        early.append(seconds(stream, ids[:1000]))
        seconds(stream, ids[1000:-1000])
        late.append(seconds(stream, ids[-1000:]))
    assert min(late) < 5 * min(early)
