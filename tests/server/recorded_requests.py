"""Requests as agents and client libraries send them: each member that was seen in a recording, with
short texts of our own in the place of theirs.

    REQUESTS["Codex CLI 0.171.0"]     # (path, body)
"""

from __future__ import annotations

from typing import Any

from open_webui_requests import OPEN_WEBUI

Body = dict[str, Any]
_DRAFT_7 = "http://json-schema.org/draft-07/schema#"
_DRAFT_2020 = "https://json-schema.org/draft/2020-12/schema"
_QUESTION = "What does a.py do?"
_ARGUMENTS = '{"path": "a.py"}'


def _object(required: list[str], draft: str | None = None, **properties: Any) -> Body:
    schema: Body = {"type": "object", "properties": properties}
    if draft is not None:
        schema |= {"$schema": draft, "additionalProperties": False}
    return schema | {"required": required}


_TEXT: Body = {"type": "string", "description": "a text", "minLength": 1}
_READ = _object(
    ["path"],
    _DRAFT_2020,
    path=_TEXT,
    offset={"type": "integer", "minimum": 0, "maximum": 9007199254740991},
    limit={"type": "number", "exclusiveMinimum": 0, "default": 2000},
    kind={"type": "string", "enum": ["text", "bytes"], "default": "text"},
)
_TODO = _object(
    ["todos"],
    _DRAFT_7,
    todos={
        "type": "array",
        "minItems": 1,
        "maxItems": 20,
        "items": _object(["content"], content={"type": "string"}, done={"type": "boolean"}),
    },
)
_TASK = _object(
    ["subject"],
    _DRAFT_2020,
    subject={"type": "string", "maxLength": 200, "pattern": "^\\S"},
    metadata={"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {}},
    url={"type": "string", "format": "uri"},
    mode={"anyOf": [{"type": "string", "const": "plan"}, {"type": "null"}]},
)
_PLAIN = _object(["path"], path={"type": "string"}, lines={"type": "number"})


def _functions(**parameters: Body) -> list[Body]:
    return [
        {
            "type": "function",
            "function": {"name": name, "description": f"{name} it.", "parameters": schema},
        }
        for name, schema in parameters.items()
    ]


def _called(content: Any, call_id: str = "call_8f0a6d3b9c2e4175a1b2c3d4") -> list[Body]:
    """An assistant's call, and its result as `content`."""
    function = {"name": "read", "arguments": _ARGUMENTS}
    call = {"id": call_id, "type": "function", "function": function}
    return [
        {"role": "assistant", "content": "Let me look.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call_id, "content": content},
    ]


def _chat(*messages: Body, **members: Any) -> tuple[str, Body]:
    body = {"model": "toy", "messages": [*messages], "stream": True, **members}
    return "/v1/chat/completions", body


def _system(text: str = "You are an agent.") -> Body:
    return {"role": "system", "content": text}


def _user(content: Any = _QUESTION) -> Body:
    return {"role": "user", "content": content}


def _text_part(text: str, **members: Any) -> Body:
    return {"type": "text", "text": text, **members}


def _input_message(role: str, text: str) -> Body:
    part = {"type": "input_text", "text": text}
    return {"type": "message", "id": "msg_01a2", "role": role, "content": [part]}


_USAGE: Body = {"stream_options": {"include_usage": True}}
_CODEX_FUNCTION: Body = {
    "type": "function",
    "name": "read",
    "description": "Reads a file.",
    "strict": False,
    "parameters": {**_PLAIN, "additionalProperties": False},
}
_CODEX: Body = {
    "model": "toy",
    "stream": True,
    "tools": [
        _CODEX_FUNCTION,
        {
            "type": "namespace",
            "name": "agents",
            "description": "Other agents.",
            "tools": [{**_CODEX_FUNCTION, "name": "close_agent"}],
        },
        {"type": "web_search", "external_web_access": False},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"summary": "auto"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "01a217cb-7eb0-7232-b898-5f22b779f1c5",
    "client_metadata": {"session_id": "01a217cb", "x-turn": '{"sandbox":"seccomp"}'},
}
_CODEX_INPUT = [
    _input_message("developer", "You are an agent."),
    _input_message("developer", "There are skills."),
    _input_message("user", "You are in /project."),
    _input_message("user", _QUESTION),
]
_CODEX_TURN: list[Body] = [
    {
        "type": "reasoning",
        "id": "rs_1",
        "summary": [],
        "content": None,
        "encrypted_content": None,
    },
    {
        "type": "message",
        "status": "completed",
        "id": "msg_2",
        "role": "assistant",
        "content": [
            {"type": "output_text", "text": "Let me look.", "annotations": [], "logprobs": []}
        ],
    },
    {
        "type": "function_call",
        "status": "completed",
        "id": "fc_3",
        "name": "read",
        "arguments": _ARGUMENTS,
        "call_id": "call_3",
    },
    {"type": "function_call_output", "id": "fco_3", "call_id": "call_3", "output": "print(1)"},
    {
        "type": "function_call",
        "status": "completed",
        "id": "fc_4",
        "name": "close_agent",
        "namespace": "agents",
        "arguments": _ARGUMENTS,
        "call_id": "call_4",
    },
    {
        "type": "function_call_output",
        "id": "fco_4",
        "call_id": "call_4",
        "output": [{"type": "input_text", "text": "closed"}],
    },
]
_EPHEMERAL: Body = {"cache_control": {"type": "ephemeral"}}
_CLAUDE: Body = {
    "model": "toy",
    "system": [_text_part("You are an agent."), _text_part("Be brief.", **_EPHEMERAL)],
    "tools": [
        {"name": "read", "description": "Reads a file.", "input_schema": _READ},
        {"name": "TaskCreate", "description": "Makes a task.", "input_schema": _TASK},
    ],
    "metadata": {"user_id": '{"device_id":"x"}'},
    "max_tokens": 32000,
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high"},
    "stream": True,
}
_CLAUDE_MESSAGES: list[Body] = [
    _user([_text_part("There is a project."), _text_part(_QUESTION, **_EPHEMERAL)]),
    _system("It is Thursday."),
]
_CLAUDE_TURN: list[Body] = [
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": "unsigned"},
            {"type": "text", "text": "Let me look.", "citations": None},
            {
                "type": "tool_use",
                "id": "toolu_1",
                "name": "read",
                "input": {"path": "a.py"},
                "caller": {"type": "direct"},
            },
        ],
    },
    _user(
        [
            {
                "type": "tool_result",
                "tool_use_id": "toolu_1",
                "content": "1\tprint(1)",
                **_EPHEMERAL,
            },
            _text_part("Go on."),
        ]
    ),
]
_AGENT_TOOLS = _functions(read=_READ, todo=_TODO)

REQUESTS: dict[str, tuple[str, Body]] = {
    "Codex CLI 0.171.0": ("/v1/responses", {**_CODEX, "input": _CODEX_INPUT}),
    "Codex CLI 0.171.0, with results": (
        "/v1/responses",
        {**_CODEX, "input": [*_CODEX_INPUT, *_CODEX_TURN]},
    ),
    "Claude Code 2.1.197": ("/v1/messages?beta=true", {**_CLAUDE, "messages": _CLAUDE_MESSAGES}),
    "Claude Code 2.1.197, with results": (
        "/v1/messages?beta=true",
        {**_CLAUDE, "messages": [*_CLAUDE_MESSAGES, *_CLAUDE_TURN]},
    ),
    "opencode 1.18.33, title": _chat(
        _system(), _user("Make a title:"), _user(f'"{_QUESTION}"'), max_tokens=8192, **_USAGE
    ),
    "opencode 1.18.33": _chat(
        _system(),
        _user(),
        *_called("<file>print(1)</file>"),
        max_tokens=8192,
        tools=_AGENT_TOOLS,
        tool_choice="auto",
        **_USAGE,
    ),
    "Qwen Code 0.15.10": _chat(
        _system(),
        _user([_text_part("There is a project.")]),
        {"role": "assistant", "content": "Got it."},
        _user([_text_part(_QUESTION)]),
        *_called([_text_part("print(1)")]),
        max_tokens=8000,
        tools=_AGENT_TOOLS,
        **_USAGE,
    ),
    "Continue CLI 1.5.47": _chat(
        _system(), _user(), *_called("print(1)"), tools=_functions(read=_PLAIN), **_USAGE
    ),
    "Cline CLI 3.0.65": _chat(
        _system(),
        _user(),
        *_called('[{"path":"a.py","content":"print(1)"}]'),
        tools=_functions(read=_READ, task=_TASK),
        tool_choice="auto",
        **_USAGE,
    ),
    "aider 0.86.2": _chat(
        _system(),
        _user("Here is a file."),
        {"role": "assistant", "content": "Ok."},
        _user(),
        temperature=0,
    ),
    "llm 0.36": _chat(
        _user("Which version?"),
        {
            "role": "assistant",
            "tool_calls": [
                {
                    "type": "function",
                    "id": "call_1",
                    "function": {"name": "llm_version", "arguments": "{}"},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "0.36"},
        tools=_functions(llm_version={"properties": {}, "type": "object"}),
        **_USAGE,
    ),
    **{f"Open WebUI 0.12.4, {name}": request for name, request in OPEN_WEBUI.items()},
}
