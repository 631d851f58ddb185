"""Messages in the form that a chat template reads.

messages = linked(joined(messages, reads), reads)
text = templates.render(native(messages, reads, turns), tools=tools)
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from typing import Any

import pydantic_core

from .template_reads import ABSENT, NAMED_IDS, SHORT_IDS, Message, TemplateReads, in_parts

_SHORT_ID = re.compile(r"[a-zA-Z0-9]{9}")
_BETWEEN = "\n\n"


def joined(messages: Sequence[Message], reads: TemplateReads) -> list[Message]:
    """The messages with each content as one text, joined as the template joins text parts."""
    found = []
    for message in messages:
        if isinstance(content := message.get("content"), list):
            joiner = reads.joiners.get(message["role"], "\n")
            message = {**message, "content": joiner.join([part["text"] for part in content])}
        found.append(message)
    return found


def linked(messages: Sequence[Message], reads: TemplateReads) -> list[Message]:
    """The messages with an id in each call, and the id and the name of its call in each result.

    Ids have the form that the template needs. A result without an id that is known belongs to the
    first call that has no result yet.
    """
    ids: dict[str, tuple[str, str]] = {}
    waiting: dict[str, None] = {}  # ids, in order
    found, count = [], 0
    for message in messages:
        message = dict(message)
        if message.get("tool_calls"):
            calls, waiting = [], {}
            for call in message["tool_calls"]:
                own, name = call.get("id") or f"call_{count}", call["function"]["name"]
                told = _id_for(own, name, count, reads)
                ids[own] = (told, name)
                waiting[own] = None
                calls.append({**call, "id": told})
                count += 1
            message["tool_calls"] = calls
        if message["role"] == "tool":
            own = message.get("tool_call_id") or ""
            if own not in ids and waiting:
                own = next(iter(waiting))
            waiting.pop(own, None)
            if own in ids:
                message["tool_call_id"], name = ids[own]
                message.setdefault("name", name)
            elif own:
                message["tool_call_id"] = _id_for(own, "", 0, reads)
        found.append(message)
    return found


def _id_for(own: str, name: str, number: int, reads: TemplateReads) -> str:
    if reads.ids == NAMED_IDS and name:
        return f"functions.{name}:{number}"
    if reads.ids != SHORT_IDS or _SHORT_ID.fullmatch(own):
        return own
    return hashlib.sha256(own.encode("utf-8", "surrogatepass")).hexdigest()[:9]


def native_calls(messages: Sequence[Message], reads: TemplateReads) -> list[Message]:
    """The messages with calls and their results as the template reads them."""
    found: list[Message] = []
    split: list[Message] = []
    results: dict[str, Message] = {}
    for message in messages:
        if message["role"] == "tool" and split:
            results[message.get("tool_call_id", "")] = message
            continue
        found += _in_turns(split, results)
        split, results = [], {}
        if not message.get("tool_calls"):
            found.append(message)
            continue
        if message.get("content") and not reads.said_beside_calls:
            found.append({name: message[name] for name in message if name != "tool_calls"})
            message = {
                name: value for name, value in message.items() if name != "reasoning_content"
            }
            message["content"] = ""
        calls = [
            _with_arguments(call, as_text=reads.text_arguments) for call in message["tool_calls"]
        ]
        message = _without_content({**message, "tool_calls": calls}, reads)
        if len(calls) == 1 or reads.many_calls:
            found.append(message)
        else:
            bare = {"role": "assistant", "content": ""}
            firsts = [message, *[_without_content(bare, reads)] * (len(calls) - 1)]
            split = [
                {**first, "tool_calls": [call]} for first, call in zip(firsts, calls, strict=True)
            ]
    return [*found, *_in_turns(split, results)]


def _in_turns(calls: Sequence[Message], results: dict[str, Message]) -> list[Message]:
    """Each call, and behind it its result."""
    found: list[Message] = []
    for message in calls:
        found.append(message)
        if (result := results.pop(message["tool_calls"][0]["id"], None)) is not None:
            found.append(result)
    return [*found, *results.values()]


def _without_content(message: Message, reads: TemplateReads) -> Message:
    """A message with calls alone as the template tells it from one with text."""
    if message.get("content"):
        return message
    if reads.null_content == ABSENT:
        return {name: value for name, value in message.items() if name != "content"}
    return {**message, "content": reads.null_content}


def _with_arguments(call: Message, *, as_text: bool) -> Message:
    """The call with its arguments as JSON text or as an object.

    Text that breaks off, as max_tokens leaves it, gives an object of what is there.
    """
    function = call["function"]
    arguments = function["arguments"]
    if as_text and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    elif not as_text and isinstance(arguments, str):
        arguments = arguments_of(arguments)
    return {**call, "function": {**function, "arguments": arguments}}


def arguments_of(text: str) -> Any:
    """Return the arguments that a text holds or begins with; the text itself if it has none."""
    try:
        found = pydantic_core.from_json(text or "{}", allow_partial="trailing-strings")
    except ValueError:
        return text
    return found if isinstance(found, dict) else text


def in_order(messages: Sequence[Message], reads: TemplateReads) -> list[Message]:
    """The messages with roles in an order that the template takes, each content in its form."""
    found = _one_system_message(messages, reads)
    if not reads.repeats:
        # Merge messages of one role in a row, except calls and results.
        merged: list[Message] = []
        for message in found:
            last = merged[-1] if merged else None
            if (
                last is not None
                and last["role"] == message["role"] != "tool"
                and not last.get("tool_calls")
                and not message.get("tool_calls")
            ):
                merged[-1] = _both(last, message)
            else:
                merged.append(message)
        found = merged
    return [in_parts(message) if message["role"] in reads.parts else message for message in found]


def _one_system_message(messages: Sequence[Message], reads: TemplateReads) -> list[Message]:
    """One system message at the beginning, or what it says in the first turn of the user.

    Later system messages stay where they are if the template reads them there.
    """
    count = next(
        (place for place, each in enumerate(messages) if each["role"] != "system"), len(messages)
    )
    system, rest = list(messages[:count]), list(messages[count:])
    if not (reads.system and reads.late_system):
        system += [message for message in rest if message["role"] == "system"]
        rest = [message for message in rest if message["role"] != "system"]
    text = _BETWEEN.join([message["content"] for message in system if message["content"]])
    ends_with_user = bool(rest) and rest[-1]["role"] == "user"
    reads_system = reads.system and (ends_with_user or reads.system_after_answer)
    if not text:
        return [*system[:1], *rest] if reads_system else rest
    if reads_system:
        return [{**system[0], "content": text}, *rest]
    if rest and rest[0]["role"] == "user":
        return [_both({"role": "user", "content": text}, rest[0]), *rest[1:]]
    return [{"role": "user", "content": text}, *rest]


def _both(first: Message, second: Message) -> Message:
    texts = [each["content"] for each in (first, second) if each["content"]]
    return {**second, **first, "content": _BETWEEN.join(texts)}
