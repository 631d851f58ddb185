"""Finds out what a chat template reads.

reads = template_reads(tokenizer.templates, tools=True)
messages = native_calls(messages, reads)      # chat_messages.py

The template renders small conversations, and the result shows what it has read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import product
from typing import Any

from .chat_template import ChatTemplateError, ChatTemplates

Message = dict[str, Any]
# Content of an assistant's message that is nothing but calls: "" or null, or there is no member.
ABSENT = "absent"
# Ids of calls: any, nine letters and digits, or "functions.NAME:NUMBER".
ANY_IDS, SHORT_IDS, NAMED_IDS = "any", "short", "named"
_NAME, _OTHER_NAME = "probe_tool", "probe_other"
_VALUE, _OTHER_VALUE = "Qvalueone", "Qvaluetwo"
_RESULT, _OTHER_RESULT = "Qresultone", "Qresulttwo"
_SYSTEM, _USER, _SAID, _MORE, _LAST = "Qsystem", "Quser", "Qsaid", "Qmore", "Qlast"
_IDS = {
    ANY_IDS: ("call_1", "call_2"),
    SHORT_IDS: ("aB3dE5gH7", "zY8xW6vU4"),
    NAMED_IDS: (f"functions.{_NAME}:0", f"functions.{_OTHER_NAME}:1"),
}
_TOOL = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "A probe.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "A city."}},
            "required": ["city"],
        },
    },
}


@dataclass(frozen=True)
class TemplateReads:
    """What one chat template reads.

    Attributes:
        parts: roles whose content must be a list of parts; a string would be lost.
        joiners: text that the template puts between two text parts of a role.
        system: a system message at the beginning is read, if the last message is the user's.
        system_after_answer: it is read if the last message is another one too.
        late_system: system messages between other messages are read.
        repeats: several messages of one role in a row are read.
        tools: tools are told by name.
        calls: calls and results are read.
        text_arguments: arguments of calls must be JSON text, not objects.
        null_content: content beside calls if there is none: "", None or `ABSENT`.
        said_beside_calls: content and calls of one message are both read.
        many_calls: several calls of one message are read.
        ids: ids of calls that the template takes.
        empty_tools: without tools the template needs an empty list of them, not null.
    """

    parts: frozenset[str] = frozenset()
    joiners: Mapping[str, str] = field(default_factory=dict)
    system: bool = True
    system_after_answer: bool = True
    late_system: bool = True
    repeats: bool = True
    tools: bool = False
    calls: bool = False
    text_arguments: bool = False
    null_content: str | None = ""
    said_beside_calls: bool = True
    many_calls: bool = True
    ids: str = ANY_IDS
    empty_tools: bool = False


@lru_cache(maxsize=64)
def template_reads(templates: ChatTemplates, *, tools: bool) -> TemplateReads:
    """Return what the template of conversations with tools, or without, reads."""
    return _Probe(templates, tools).learn() if templates.source(tools=tools) else TemplateReads()


class _Probe:
    def __init__(self, templates: ChatTemplates, has_tools: bool) -> None:
        self._templates = templates
        self._tools: list[Message] | None = [_TOOL] if has_tools else None
        self._parts: set[str] = set()

    def learn(self) -> TemplateReads:
        empty_tools = self._needs_empty_tools()
        # Find the roles whose content is lost unless it is a list.
        before: list[Message] = []
        for role, text in (("user", _USER), ("assistant", _SAID), ("system", _SYSTEM)):
            said = _said(role, text)
            messages = [said, *before] if role == "system" else [*before, said]
            if not self._shows(messages, text):
                self._parts.add(role)
                if not self._shows(messages, text):
                    self._parts.discard(role)
            if role == "user":
                before = messages
        user, said, last = _said("user", _USER), _said("assistant", _SAID), _said("user", _LAST)
        has_tools = bool(self._tools) and self._shows([user], _NAME)
        told = [_NAME] if has_tools else []
        system = self._shows([_said("system", _SYSTEM), user], _SYSTEM, _USER, *told)
        after_answer = self._shows([_said("system", _SYSTEM), user, said], _SYSTEM, _USER, _SAID)
        first, more = _said("system", _MORE), _said("user", _MORE)
        late = self._shows(
            [first, user, said, _said("system", _SYSTEM), last],
            *(_MORE, _USER, _SAID, _SYSTEM, _LAST),
            *told,
        )
        repeats = self._shows([user, more, said, last], _USER, _MORE, _SAID, _LAST) and self._shows(
            [user, said, _said("assistant", _MORE), last], _USER, _SAID, _MORE, _LAST
        )
        calls = self._calls()
        return TemplateReads(
            parts=frozenset(self._parts),
            joiners=self._joiners(),
            empty_tools=empty_tools,
            system=system,
            system_after_answer=after_answer,
            late_system=late,
            repeats=repeats,
            tools=has_tools,
            **calls,
        )

    def _needs_empty_tools(self) -> bool:
        question = [_said("user", _USER)]
        if self._tools is not None or self._render(question) is not None:
            return False
        self._tools = []
        if self._render(question) is None:
            self._tools = None
        return self._tools is not None

    def _joiners(self) -> dict[str, str]:
        """What stands between two text parts, for roles of which the template reads parts."""
        found = {}
        user = [_said("user", _USER)]
        for role in ("system", "user", "assistant"):
            content = [{"type": "text", "text": text} for text in (_SAID, _MORE)]
            message: Message = {"role": role, "content": content}
            messages = {"system": [message, *user], "user": [message]}.get(role, [*user, message])
            text = self._render(messages) or ""
            _, first, rest = text.partition(_SAID)
            between, second, _ = rest.partition(_MORE)
            if first and second and not between.strip():
                found[role] = between
        return found

    def _calls(self) -> dict[str, Any]:
        """What is read of calls and their results."""
        for ids, content, as_text in product(_IDS, (None, "", ABSENT), (False, True)):
            call_id = _IDS[ids][0]
            calling = _calling(content, [_call(call_id, _NAME, _VALUE, as_text)])
            turns = [_said("user", _USER), calling, _result(call_id, _NAME, _RESULT)]
            text = self._render(turns)
            if text is not None and self._is_told(text, as_text, content):
                user, (first, second) = _said("user", _USER), _IDS[ids]
                one = _call(first, _NAME, _VALUE, as_text)
                two = _call(second, _OTHER_NAME, _OTHER_VALUE, as_text)
                results = [
                    _result(first, _NAME, _RESULT),
                    _result(second, _OTHER_NAME, _OTHER_RESULT),
                ]
                shown = (_VALUE, _OTHER_NAME, _OTHER_VALUE, _RESULT, _OTHER_RESULT)
                many = self._shows([user, _calling(content, [one, two]), *results], *shown)
                beside = self._shows(
                    [user, _calling(_SAID, [one]), results[0]], _SAID, _VALUE, _RESULT
                )
                return {
                    "calls": True,
                    "null_content": content,
                    "text_arguments": as_text,
                    "ids": ids,
                    "many_calls": many,
                    "said_beside_calls": beside,
                }
        if "tool" not in self._parts:
            self._parts.add("tool")
            if (found := self._calls())["calls"]:
                return found
            self._parts.discard("tool")
        return {"calls": False}

    def _is_told(self, text: str, as_text: bool, content: str | None) -> bool:
        """Whether a rendering has the call, its argument as it should be, and the result."""
        told = text.rpartition(_USER)[2]
        if not all(mark in told for mark in (_NAME, _VALUE, _RESULT)):
            return False
        if content is None and "None" in told:
            return False
        return '{\\"city' not in told if as_text else "{'city" not in told

    def _shows(self, messages: Sequence[Message], *marks: str) -> bool:
        text = self._render(messages)
        return text is not None and all(mark in text for mark in marks)

    def _render(self, messages: Sequence[Message]) -> str | None:
        try:
            return self._templates.render(
                [
                    in_parts(message) if message["role"] in self._parts else message
                    for message in messages
                ],
                tools=self._tools,
                add_generation_prompt=messages[-1]["role"] != "assistant",
            )
        except ChatTemplateError:
            return None


def in_parts(message: Message) -> Message:
    """The message with its text as a list of one part."""
    content = message.get("content")
    if not isinstance(content, str):
        return message
    return {**message, "content": [{"type": "text", "text": content}]}


def _said(role: str, text: str) -> Message:
    return {"role": role, "content": text}


def _call(call_id: str, name: str, value: str, as_text: bool) -> Message:
    arguments: Any = {"city": value}
    function = {"name": name, "arguments": json.dumps(arguments) if as_text else arguments}
    return {"id": call_id, "type": "function", "function": function}


def _calling(content: str | None, calls: list[Message]) -> Message:
    message: Message = {"role": "assistant", "content": content, "tool_calls": calls}
    if content == ABSENT:
        del message["content"]
    return message


def _result(call_id: str, name: str, text: str) -> Message:
    return {"role": "tool", "tool_call_id": call_id, "name": name, "content": text}
