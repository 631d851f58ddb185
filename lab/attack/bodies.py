"""Attacks by bodies: numbers that underflow, lists with a million wrong items, prompts that cannot
fit.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

from .arena import BODY_BYTES, Arena, Attack, together

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
COMPLETION, INFILL = "/completion", "/infill"
TOKENIZE, DETOKENIZE = "/v1/tokenize", "/v1/detokenize"
_NUMBERS = (1e-46, 1e-45, 1e-40, 1e-38, 5e-324, -1e-46, 3.5e38, 1e300)
_ROOM = BODY_BYTES - 1000
_LLAMA_CPP_NAMES = {"n": "n_cmpl", "repetition_penalty": "repeat_penalty"}


def generating(**members: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Return a request with these members for every endpoint that generates."""
    yield COMPLETIONS, {"prompt": "Once upon", "max_tokens": 4, **members}
    yield CHAT, {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, **members}
    llama_cpp = {_LLAMA_CPP_NAMES.get(name, name): value for name, value in members.items()}
    yield COMPLETION, {"prompt": "Once upon", "n_predict": 4, **llama_cpp}
    sampling = {"max_new_tokens": 4, **members}
    yield GENERATE, {"text": "Once upon", "sampling_params": sampling}


def filled(before: str, item: str, after: str) -> bytes:
    """Return a body of the maximum size, which repeats `item`, separated by commas."""
    count = (_ROOM - len(before) - len(after)) // (len(item) + 1)
    return f"{before}{','.join(itertools.repeat(item, count))}{after}".encode()


async def _numbers(arena: Arena) -> None:
    for value, name in itertools.product(
        _NUMBERS, ("temperature", "repetition_penalty", "top_p", "min_p", "presence_penalty")
    ):
        await together(arena.post(path, body) for path, body in generating(**{name: value}))


async def _stop_strings(arena: Arena) -> None:
    stops = [f"{number:04}{'ab' * 510}" for number in range(64)]
    for path, body in generating(n=128, stop=stops):
        await arena.post(path, body)


async def _wrong_items(arena: Arena) -> None:
    prompt = '{"prompt": "Hi", "max_tokens": 1, '
    for path, before, item, after in (
        (CHAT, '{"messages": [', "1", "]}"),
        (CHAT, '{"messages": [', "{}", "]}"),
        (CHAT, '{"messages": [{"role": "user", "content": [', "1", "]}]}"),
        (COMPLETIONS, f'{prompt}"stop_token_ids": [', '"a"', "]}"),
        (COMPLETIONS, f'{prompt}"stop": [', "1", "]}"),
        (COMPLETIONS, '{"prompt": [', "null", "]}"),
        (COMPLETIONS, '{"prompt": [', "[-1]", "]}"),
        (GENERATE, '{"text": "Hi", "sampling_params": [', "1", "]}"),
        (GENERATE, '{"text": "Hi", "return_logprob": [', "7", "]}"),
        (GENERATE, '{"input_ids": [', '["a"]', "]}"),
        (COMPLETION, '{"prompt": [', "null", "]}"),
        (COMPLETION, '{"prompt": [5,', '""', "]}"),
        (COMPLETION, '{"prompt": "Hi", "logit_bias": [', "[]", "]}"),
        (COMPLETION, '{"prompt": "Hi", "response_fields": [', '"a/b"', "]}"),
        (INFILL, '{"input_prefix": "", "input_suffix": "", "input_extra": [', "{}", "]}"),
        (TOKENIZE, '{"prompt": [', "1", "]}"),
        (DETOKENIZE, '{"tokens": [', "null", "]}"),
    ):
        await arena.post(path, filled(before, item, after))


async def _many_lists(arena: Arena) -> None:
    for item in ("[]", "[5]"):
        await arena.post(DETOKENIZE, filled('{"tokens": [', item, "]}"))
    await arena.post(DETOKENIZE, filled('{"tokens": [', "5", "]}"))
    for path, name in (
        (TOKENIZE, "prompt"),
        (COMPLETIONS, "prompt"),
        (COMPLETION, "prompt"),
        (GENERATE, "text"),
    ):
        await arena.post(path, filled(f'{{"{name}": [', '"a"', "]}"))
    await arena.post(COMPLETION, filled('{"n_predict": 1, "prompt": [5,', '"a"', "]}"))


async def _long_prompts(arena: Arena) -> None:
    text = json.dumps("The quick brown fox jumps over the lazy dog. " * (_ROOM // 45))
    word = json.dumps("a" * _ROOM)
    message = f'{{"messages": [{{"role": "user", "content": {text}}}]}}'
    bodies = [
        (COMPLETIONS, f'{{"prompt": {text}}}'),
        (CHAT, message),
        (GENERATE, f'{{"text": {text}}}'),
    ]
    bodies += [
        (COMPLETIONS, f'{{"prompt": {word}}}'),
        (CHAT, message),
        (COMPLETION, f'{{"prompt": [5, {word}]}}'),
        (INFILL, f'{{"input_prefix": {text}, "input_suffix": ""}}'),
        (TOKENIZE, f'{{"prompt": {text}}}'),
        (TOKENIZE, f'{{"content": {text[:1_000_000]}", "with_pieces": true}}'),
    ]
    await together(arena.post(path, body.encode()) for path, body in bodies)


async def _nesting(arena: Arena) -> None:
    deep = _ROOM // 2
    for path, before, opening, closing, after in (
        (COMPLETIONS, '{"prompt": ', "[", "]", "}"),
        (
            CHAT,
            '{"chat_template_kwargs": {"a": ',
            "[",
            "]",
            '}, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}',
        ),
        (GENERATE, '{"text": "Hi", "sampling_params": ', '{"a":', "}", "}"),
    ):
        for levels in (190, deep // len(opening)):
            await arena.post(
                path, f"{before}{opening * levels}1{closing * levels}{after}".encode()[:BODY_BYTES]
            )


async def _huge_numbers(arena: Arena) -> None:
    digits = "9" * _ROOM
    for number in (
        digits,
        f"-{digits}",
        f"0.{digits}"[:_ROOM],
        "1e999999999",
        f"1e{digits}"[:_ROOM],
        f"[{digits}]",
    ):
        for name in ("max_tokens", "temperature", "seed", "stop_token_ids", "prompt"):
            await arena.post(
                COMPLETIONS, f'{{"prompt": "Hi", "max_tokens": 1, "{name}": {number}}}'.encode()
            )


async def _many_members(arena: Arena) -> None:
    members = ",".join(f'"m{number}":0' for number in range(_ROOM // 11))[:_ROOM].rpartition(",")[0]
    for path, body in (
        (COMPLETIONS, f'{{"prompt": "Hi", {members}}}'),
        (COMPLETIONS, f'{{"prompt": "Hi", "logit_bias": {{{members}}}}}'),
        (CHAT, f'{{"messages": [{{"role": "user", "content": "Hi", {members}}}]}}'),
        (
            CHAT,
            f'{{"messages": [{{"role": "user", "content": "Hi"}}], "chat_template_kwargs": '
            f'{{{members}}}, "max_tokens": 1}}',
        ),
        (GENERATE, f'{{"text": "Hi", "sampling_params": {{{members}}}}}'),
    ):
        await arena.post(path, body.encode())
    biases = ",".join(f'"{number}":1' for number in range(_ROOM // 12))
    await arena.post(
        COMPLETIONS, f'{{"prompt": "Hi", "max_tokens": 1, "logit_bias": {{{biases}}}}}'.encode()
    )


async def _grammars(arena: Arena) -> None:
    comment = "// " + "x" * 250_000 + "\n"
    await together(
        arena.post(
            COMPLETIONS, {"prompt": "Hi", "max_tokens": 1, "ebnf": f'{comment}start: "a{n}"'}
        )
        for n in range(150)
    )
    patterns = [f"a.{{{number}}}b" for number in range(1, 22)]
    schema = {"allOf": [{"type": "string", "pattern": pattern} for pattern in patterns]}
    lark = "start: T\nT: " + " & ".join(f"/(.|\\n)*{pattern}(.|\\n)*/" for pattern in patterns)
    keyed = {f"^[a-z]*x{number}$": {"type": "string"} for number in range(500)}
    for asked in (
        {"json_schema": schema},
        {"ebnf": lark},
        {"json_schema": {"type": "object", "patternProperties": keyed}},
    ):
        await arena.post(COMPLETIONS, {"prompt": "Hi", "max_tokens": 1, **asked})


ATTACKS = (
    Attack(
        "vanishing-numbers",
        "temperature, penalties, top-p and min-p of 1e-46 and the like",
        _numbers,
    ),
    Attack("grammars", "150 grammars of comments; patterns that must hold together", _grammars),
    Attack("stop-strings", "66 kB of stop strings for 128 samples", _stop_strings),
    Attack("wrong-items", "4 MB of wrong items in messages, prompts, ids, stops", _wrong_items),
    Attack("many-lists", "a million lists to detokenise, texts to tokenise, prompts", _many_lists),
    Attack("long-prompts", "six prompts of 4 MB at once", _long_prompts),
    Attack("nesting", "2 million levels of lists and objects", _nesting),
    Attack("huge-numbers", "numbers of 4 million digits", _huge_numbers),
    Attack("many-members", "400,000 members of an object, known and unknown", _many_members),
)
