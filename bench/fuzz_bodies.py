"""Mutated bodies for every endpoint, made from valid ones: request `number` of a seed is the same
on every machine.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

_SAMPLING = {
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "repetition_penalty": 1.1,
    "logit_bias": {"5": 1.5, "6": -100},
    "stop": ["x", "yz"],
    "stop_token_ids": [7],
    "ignore_eos": True,
    "skip_special_tokens": False,
    "n": 2,
}
_OPENAI = {
    "model": "default",
    "seed": 1,
    "stream": False,
    "user": "u",
    "best_of": 2,
    "min_tokens": 1,
    "priority": 1,
}
_CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Hi"}], "name": "me"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "The fox"},
]
_BLOCKS = [
    {"role": "user", "content": [{"type": "text", "text": "The fox"}]},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "Hm", "signature": "s"},
            {"type": "tool_use", "id": "t", "name": "f", "input": {"a": 1}},
        ],
    },
    {
        "role": "user",
        "content": [{"type": "tool_result", "tool_use_id": "t", "content": "x", "is_error": True}],
    },
]
TEXT_SEEDS: dict[str, tuple[dict[str, Any], ...]] = {
    "/v1/completions": (
        {"prompt": "The fox", "max_tokens": 4},
        {"prompt": ["The fox", "Zwölf Boxkämpfer"], "max_tokens": 4, "echo": True, "logprobs": 2},
        {
            "prompt": [[5, 6, 7], [8]],
            "max_tokens": 3,
            "stream": True,
            "stream_options": {"include_usage": True},
        },
        {"prompt": "The fox", "max_tokens": 4, **_SAMPLING, **_OPENAI},
    ),
    "/v1/chat/completions": (
        {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4},
        {
            "messages": _CHAT,
            "max_completion_tokens": 4,
            "logprobs": True,
            "top_logprobs": 2,
            "stream": True,
        },
        {
            "messages": _CHAT,
            "max_tokens": 4,
            "continue_final_message": True,
            "add_generation_prompt": False,
        },
        {
            "messages": _CHAT,
            "max_tokens": 4,
            "chat_template_kwargs": {"a": 1},
            **_SAMPLING,
            **_OPENAI,
        },
    ),
    "/generate": (
        {"text": "The fox", "sampling_params": {"max_new_tokens": 4}},
        {
            "text": ["The fox", "Hi"],
            "sampling_params": [{"max_new_tokens": 4}, {"max_new_tokens": 3, **_SAMPLING}],
        },
        {
            "input_ids": [[5, 6], [7]],
            "sampling_params": {"max_new_tokens": 4},
            "return_logprob": True,
            "top_logprobs_num": [1, 2],
        },
        {
            "text": "The fox",
            "sampling_params": {"max_new_tokens": 4, "no_stop_trim": True},
            "stream": True,
            "logprob_start_len": 0,
        },
    ),
    "/v1/messages": (
        {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4},
        {
            "messages": _BLOCKS,
            "max_tokens": 4,
            "system": [{"type": "text", "text": "Be brief."}],
            "stream": True,
            "temperature": 0.7,
            "top_k": 5,
            "top_p": 0.9,
            "stop_sequences": ["x"],
            "tools": [{"name": "f", "input_schema": {"type": "object"}, "strict": True}],
            "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
            "thinking": {"type": "adaptive"},
            "metadata": {"user_id": "u"},
        },
    ),
    "/v1/messages/count_tokens": ({"messages": _BLOCKS, "system": "Be brief."},),
    "/v1/responses": (
        {"model": "default", "input": "Hi", "max_output_tokens": 4, "store": False},
        {
            "model": "default",
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
                {
                    "type": "reasoning",
                    "summary": [],
                    "content": [{"type": "reasoning_text", "text": "Hm."}],
                },
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "x"},
                {"type": "custom_tool_call", "call_id": "d", "name": "c", "input": "x"},
            ],
            "instructions": "Be brief.",
            "tools": [
                {"type": "function", "name": "f", "strict": True},
                {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "f"}]},
                {"type": "custom", "name": "c"},
            ],
            "tool_choice": "auto",
            "text": {"format": {"type": "text"}},
            "include": ["message.output_text.logprobs"],
            "top_logprobs": 2,
            "metadata": {"a": "b"},
            "max_output_tokens": 4,
            "stream": True,
        },
        {"model": "default", "input": "Hi", "max_output_tokens": 4, "background": True},
        {"model": "default", "input": "Hi", "previous_response_id": "resp_1"},
    ),
    "/v1/responses/input_tokens": ({"model": "default", "input": "Hi"},),
    "/v1/tokenize": (
        {"prompt": "The fox"},
        {"messages": _CHAT},
        {"prompt": ["a", "b"], "add_special_tokens": False},
    ),
    "/v1/detokenize": ({"tokens": [5, 6]}, {"tokens": [[5], [6, 7]], "skip_special_tokens": False}),
    "/abort_request": ({"rid": "nobody"},),
    "/flush_cache": ({},),
}
"""Valid bodies of the endpoints of a language model; the first of each is the least that it takes.
"""
IMAGE_SEEDS: dict[str, tuple[dict[str, Any], ...]] = {
    "/v1/images/generations": (
        {"prompt": "a fox", "size": "64x64", "num_inference_steps": 1},
        {
            "prompt": "a fox",
            "width": 64,
            "height": 64,
            "num_inference_steps": 1,
            "n": 2,
            "seed": 3,
            "guidance_scale": 2.0,
            "response_format": "url",
        },
    ),
}
GETS = (
    "/health", "/ready", "/metrics", "/version", "/v1/models", "/v1/models/default", "/server_info",
    "/get_model_info", "/health_generate",
    "/docs", "/openapi.json", "/v1/completions", "/nothing", "/v1/models/%00%ff", "/?a=%", "//",
    "/v1/images/files/x",
)  # fmt: skip
METHODS = ("GET", "GET", "GET", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH")
HOSTILE: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 0.0, -0.0, 0.5, 1e-46, 1e-40, 5e-324, 3.5e38, 1e308, 2**31,
    2**63, -(2**63), 10**400,
    "", "\x00", "a", "\ud7ff", "😀" * 50, "a" * 5000, "<|im_start|>", "<|endoftext|>", "default",
    "user", "text", "nan", "Infinity", "1e400",
    [], {}, [[]], [{}], {"": None}, [0], [-1], [511], [699], [49151], [2**40], ["a"], [None],
    {"type": "text", "text": "x"}, [["a"], [1]],
    {"role": "user", "content": "x"}, {"role": "tool", "content": None}, [1] * 300, ["a"] * 300,
    [[5]] * 40, {"5": 1e300}, {"a": 1},
)  # fmt: skip
"""What a member may become."""
_LARGEST = {
    **dict.fromkeys(
        ("max_tokens", "max_completion_tokens", "max_new_tokens", "min_tokens", "min_new_tokens"),
        16,
    ),
    **{"n": 4, "best_of": 4, "num_inference_steps": 2, "width": 64, "height": 64},
}
"""Numbers that are work honestly asked for: in the range that is taken they are kept small, so that
slow answers mean something.
"""
_TAKEN = 2**20
_LENGTHS = ("max_tokens", "max_completion_tokens", "max_new_tokens")


class FuzzRequest(NamedTuple):
    """`body` None: a request without one."""

    method: str
    path: str
    body: bytes | None


def fuzz_request(
    seeds: Mapping[str, Sequence[dict[str, Any]]], seed: int, number: int
) -> FuzzRequest:
    """One request of the campaign that `seed` names, whatever was asked for before it."""
    draw = random.Random(f"{seed}-{number}")
    if draw.random() < 0.08:
        return FuzzRequest(draw.choice(METHODS), draw.choice([*GETS, *seeds]), None)
    path = draw.choice(list(seeds))
    # Now and then the body of another endpoint.
    body = copy.deepcopy(
        draw.choice(seeds[path if draw.random() < 0.95 else draw.choice(list(seeds))])
    )
    names = sorted({name for bodies in seeds.values() for one in bodies for name in one})
    for _ in range(draw.randint(0, 4)):
        body = _mutated(body, names, draw)
    content = json.dumps(modest(body), ensure_ascii=draw.random() < 0.5).encode(
        errors="surrogatepass"
    )
    return FuzzRequest("POST", path, _spoiled(content, draw) if draw.random() < 0.25 else content)


def _mutated(body: Any, names: Sequence[str], draw: random.Random) -> Any:
    """One change at a random place."""
    holders = _holders(body)
    if not holders:
        return _hostile(draw)
    holder = draw.choice(holders)
    keys: list[Any] = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
    change: Callable[[Any, Any, Sequence[str], random.Random], None] = draw.choice(
        (_replace, _replace, _remove, _add, _wrap, _nudge)
    )
    change(holder, draw.choice(keys), names, draw)
    return body


def _holders(body: Any) -> list[Any]:
    """The outermost lists and objects of `body` that hold something, at most 200."""
    found = [body] if isinstance(body, dict | list) and body else []
    for holder in found:
        inner = holder.values() if isinstance(holder, dict) else holder[:50]
        found += [one for one in inner if isinstance(one, dict | list) and one]
        if len(found) >= 200:
            break
    return found


def _hostile(draw: random.Random) -> Any:
    """A value of one's own: it may be changed later."""
    return copy.deepcopy(draw.choice(HOSTILE))


def _replace(holder: Any, key: Any, names: Sequence[str], draw: random.Random) -> None:
    holder[key] = _hostile(draw)


def _remove(holder: Any, key: Any, names: Sequence[str], draw: random.Random) -> None:
    del holder[key]


def _add(holder: Any, key: Any, names: Sequence[str], draw: random.Random) -> None:
    value = _hostile(draw)
    if isinstance(holder, dict):
        holder[draw.choice(names)] = value
    else:
        holder.append(value)


def _wrap(holder: Any, key: Any, names: Sequence[str], draw: random.Random) -> None:
    value = holder[key]
    for _ in range(draw.choice((1, 1, 2, 180, 250))):
        value = [value]
    holder[key] = value


def _nudge(holder: Any, key: Any, names: Sequence[str], draw: random.Random) -> None:
    """A value much like the one that was there."""
    value = holder[key]
    if isinstance(value, bool):
        holder[key] = not value
    elif isinstance(value, int) and abs(value) > 2**64:
        holder[key] = draw.choice((-value, value + 1, str(value)))
    elif isinstance(value, int | float):
        holder[key] = draw.choice(
            (-value, value + 1, value * 1.5, float(value), str(value), value * 10.0**-46)
        )
    elif isinstance(value, str):
        holder[key] = draw.choice(
            (
                value[:1000] * 40,
                value[::-1],
                value + draw.choice("\x00\u202e😀\uffff"),
                value.upper(),
                [value],
            )
        )
    elif isinstance(value, list):
        holder[key] = copy.deepcopy(value[:50]) * draw.choice((0, 2, 20))


def _spoiled(content: bytes, draw: random.Random) -> bytes:
    """Bytes changed, cut, doubled; where it is JSON nevertheless, only if it asks for no more work
    than before.
    """
    spoiled = bytearray(content)
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(spoiled) + 1)
        match draw.randrange(4):
            case 0:
                spoiled[at : at + 1] = bytes([draw.randrange(256)])
            case 1:
                del spoiled[at : at + draw.randint(1, 8)]
            case 2:
                spoiled[at:at] = draw.choice(
                    (
                        b"\x00",
                        b"\xff\xfe",
                        b"{",
                        b"]",
                        b"NaN",
                        b"1e9999",
                        b'"\\ud800"',
                        b"\\u0000",
                        b",",
                        b"-",
                    )
                )
            case _:
                spoiled[at:at] = spoiled[max(0, at - 30) : at]
    try:
        read = json.loads(bytes(spoiled))
    except (ValueError, RecursionError):
        return bytes(spoiled)
    return bytes(spoiled) if modest(json.loads(bytes(spoiled))) == read else content


def modest(body: Any) -> Any:
    """`body` with lengths and numbers of samples that are valid kept small, and a length where none
    is given.
    """
    if not isinstance(body, dict):
        return body
    _shrink(body)
    params = body.get("sampling_params")
    if "text" in body or "input_ids" in body:
        if params is None:
            params = body["sampling_params"] = {}
        for one in params if isinstance(params, list) else [params]:
            _give_length(one, "max_new_tokens")
    if "messages" in body or "prompt" in body:
        _give_length(body, "max_tokens")
    return body


def _give_length(body: Any, name: str) -> None:
    if isinstance(body, dict) and all(body.get(one) is None for one in _LENGTHS):
        body[name] = 4


def _shrink(value: Any) -> None:
    if isinstance(value, dict):
        for name, largest in _LARGEST.items():
            number = value.get(name)
            if (
                isinstance(number, int | float)
                and not isinstance(number, bool)
                and largest < number <= _TAKEN
            ):
                value[name] = largest
    for one in (
        value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    ):
        _shrink(one)
