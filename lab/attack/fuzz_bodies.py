"""Mutated bodies for every endpoint. Request `number` of a seed is the same on every machine."""

from __future__ import annotations

import copy
import gzip
import json
import random
import zlib
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple

from ...server.anthropic.requests import MessagesRequest
from ...server.llama_cpp.requests import CompletionBody, InfillBody
from ...server.native.requests import GenerateBody, NativeSampling
from ...server.ollama.requests import OllamaChatRequest, OllamaGenerateRequest, OllamaOptions
from ...server.openai.requests import ChatCompletionRequest, CompletionRequest
from ...server.openai.responses.requests import ResponsesRequest
from .forms import FORM, FORM_PATHS, form
from .fuzz_seeds import GETS, HOSTILE
from .kinds import SEEDS, Seeds

METHODS = ("GET", "GET", "GET", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH")
# Numbers that determine the work of a request. They are kept small, so that a slow answer is a
# fault.
_LARGEST = {
    **dict.fromkeys(
        (
            *("max_tokens", "max_completion_tokens", "max_new_tokens", "max_output_tokens"),
            *("min_tokens", "min_new_tokens", "num_predict"),
        ),
        16,
    ),
    **{"n": 4, "best_of": 4, "num_inference_steps": 2, "width": 64, "height": 64},
}
_TAKEN = 2**20
_LENGTHS = (
    *("max_tokens", "max_completion_tokens", "max_new_tokens", "max_output_tokens"),
    "num_predict",
)
_UNLIMITED = (0, -1, -2, -4)  # Ollama generates as much as the context holds.
_MODELS = (
    ChatCompletionRequest,
    CompletionRequest,
    ResponsesRequest,
    MessagesRequest,
    GenerateBody,
    NativeSampling,
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaOptions,
    CompletionBody,
    InfillBody,
)
# Codings of bodies: supported, broken and unknown ones.
_CODINGS: Mapping[str, Callable[[bytes], bytes]] = {
    "gzip": lambda content: gzip.compress(content, mtime=0),
    "deflate": zlib.compress,
    "zstd": lambda content: b"\x28\xb5\x2f\xfd" + content,
    "br": bytes,
    "gzip, gzip": lambda content: gzip.compress(gzip.compress(content, mtime=0), mtime=0),
    "identity": bytes,
}


Names = Mapping[str, tuple[Any, ...]]


class FuzzRequest(NamedTuple):
    """A request. `body` None means no body. `coding` is the value of `Content-Encoding`."""

    method: str
    path: str
    body: bytes | None
    coding: str = ""
    content_type: str = "application/json"


def fuzz_request(seeds: Seeds, seed: int, number: int) -> FuzzRequest:
    """Return one request of the campaign of `seed`, independent of all others."""
    draw = random.Random(f"{seed}-{number}")
    if draw.random() < 0.08:
        return FuzzRequest(draw.choice(METHODS), draw.choice([*GETS, *seeds]), None)
    path = draw.choice(list(seeds))
    # Now and then the body of another endpoint.
    body = copy.deepcopy(
        draw.choice(seeds[path if draw.random() < 0.95 else draw.choice(list(seeds))])
    )
    names = _names(tuple(seeds))
    for _ in range(draw.randint(0, 4)):
        body = _mutated(body, names, draw)
    body, is_ascii, is_form = modest(body), draw.random() < 0.5, path in FORM_PATHS
    if is_form:
        content = form(body)
    else:
        content = json.dumps(body, ensure_ascii=is_ascii).encode(errors="surrogatepass")
    spoils, coding = draw.random() < 0.25, ""
    if draw.random() < 0.05:
        coding = draw.choice(list(_CODINGS))
        content = _CODINGS[coding](content)
    sent = _spoiled(content, draw) if spoils else content
    return FuzzRequest("POST", path, sent, coding, *([FORM] if is_form else []))


@cache
def _names(paths: tuple[str, ...]) -> Names:
    """Return every known parameter, with its values in the bodies of `paths`."""
    known: dict[str, list[Any]] = {
        name: [] for model in _MODELS for name in (*model.model_fields, *model.others)
    }
    bodies = {path: seeds[path] for seeds in SEEDS.values() for path in seeds}
    for path in paths:
        for body in bodies[path]:
            for name, value in body.items():
                known.setdefault(name, []).append(value)
    return {name: tuple(values) for name, values in sorted(known.items())}


def _mutated(body: Any, names: Names, draw: random.Random) -> Any:
    """Change a random place."""
    holders = _holders(body)
    if not holders:
        return _hostile(draw)
    holder = draw.choice(holders)
    keys: list[Any] = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
    change: Callable[[Any, Any, Names, random.Random], None] = draw.choice(
        (_replace, _replace, _remove, _add, _wrap, _nudge)
    )
    change(holder, draw.choice(keys), names, draw)
    return body


def _holders(body: Any) -> list[Any]:
    """Return at most 200 of the outermost lists and objects of `body` that are not empty."""
    found = [body] if isinstance(body, dict | list) and body else []
    for holder in found:
        inner = holder.values() if isinstance(holder, dict) else holder[:50]
        found += [one for one in inner if isinstance(one, dict | list) and one]
        if len(found) >= 200:
            break
    return found


def _hostile(draw: random.Random) -> Any:
    """Return a new value, which may be changed later."""
    return copy.deepcopy(draw.choice(HOSTILE))


def _replace(holder: Any, key: Any, names: Names, draw: random.Random) -> None:
    holder[key] = _hostile(draw)


def _remove(holder: Any, key: Any, names: Names, draw: random.Random) -> None:
    del holder[key]


def _add(holder: Any, key: Any, names: Names, draw: random.Random) -> None:
    if isinstance(holder, dict):
        name = draw.choice(list(names))
        known = names[name] if draw.random() < 0.5 else ()
        holder[name] = copy.deepcopy(draw.choice(known)) if known else _hostile(draw)
    else:
        holder.append(_hostile(draw))


def _wrap(holder: Any, key: Any, names: Names, draw: random.Random) -> None:
    value = holder[key]
    for _ in range(draw.choice((1, 1, 2, 180, 250))):
        value = [value]
    holder[key] = value


def _nudge(holder: Any, key: Any, names: Names, draw: random.Random) -> None:
    """Return a value similar to the given one."""
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
        holder[key] = value[:50] * draw.choice((0, 2, 20))


def _spoiled(content: bytes, draw: random.Random) -> bytes:
    """Change, cut or repeat bytes. If the result is JSON, it must not ask for more work than
    before.
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
    """Return `body` with small numbers in place of valid lengths and samples. Add a length if none
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
        if "model" in body:
            options = body["options"] = body.get("options") or {}
            _give_length(options, "num_predict")
            if isinstance(options, dict) and options.get("num_predict") in _UNLIMITED:
                options["num_predict"] = 4
    if "input" in body:
        _give_length(body, "max_output_tokens")
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
