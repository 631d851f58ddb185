"""Requests of Open WebUI's backend, with each member that its connections to OpenAI's and Ollama's
APIs were seen to send or that its code sends.
"""

from __future__ import annotations

from typing import Any

_USER = {"role": "user", "content": "What time is it?"}
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_time",
            "description": "The time.",
            "parameters": {"type": "object", "properties": {}},
        },
    }
]
_ANSWERED = {"role": "assistant", "content": "Let me look."}
_OPENAI: dict[str, Any] = {"model": "toy", "stream": True, "messages": [_USER]}
_PARAMETERS: dict[str, Any] = {"temperature": 0.5, "top_p": 0.9, "top_k": 10, "min_p": 0.05}
_PARAMETERS |= {"frequency_penalty": 0.1, "presence_penalty": 0.1, "seed": 3, "stop": ["xx"]}
_OLLAMA: dict[str, Any] = {"model": "toy:latest", "stream": True, "messages": [_USER]}
_OPTIONS: dict[str, Any] = {
    **_PARAMETERS,
    **{"mirostat": 0, "mirostat_eta": 0.1, "mirostat_tau": 5.0, "repeat_last_n": 64},
    **{"num_batch": 512, "num_keep": 24, "num_gpu": 1, "num_thread": 2, "use_mmap": True},
    **{"num_ctx": 2048, "num_predict": 128, "repeat_penalty": 1.1, "use_mlock": False},
}
_SENT_TO_OPENAI: list[tuple[str, dict[str, Any]]] = [
    ("chat", _OPENAI),
    ("title", {**_OPENAI, "stream": False, "max_tokens": 1000}),
    ("parameters", {**_OPENAI, **_PARAMETERS, "max_tokens": 128, "logit_bias": {"5": 1}}),
    ("usage", {**_OPENAI, "stream_options": {"include_usage": True}}),
    (
        "results",
        {
            **_OPENAI,
            "tools": _TOOLS,
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": [{"type": "text", "text": "What time is it?"}]},
                {
                    **_ANSWERED,
                    "tool_calls": [
                        {
                            "index": 0,
                            "id": "call_1",
                            "type": "function",
                            "function": {"name": "get_time", "arguments": "{}"},
                        }
                    ],
                },
                {"role": "tool", "tool_call_id": "call_1", "content": "noon"},
            ],
        },
    ),
    (
        "continued",
        {
            **_OPENAI,
            "messages": [_USER, _ANSWERED],
            "continue_final_message": True,
            "add_generation_prompt": False,
        },
    ),
]
_SENT_TO_OLLAMA: list[tuple[str, dict[str, Any]]] = [
    ("chat", _OLLAMA),
    ("title", {**_OLLAMA, "stream": False, "options": {"num_predict": 1000}}),
    ("options", {**_OLLAMA, "options": _OPTIONS, "keep_alive": "5m", "think": False}),
    (
        "results",
        {
            **_OLLAMA,
            "tools": _TOOLS,
            "messages": [
                _USER,
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [
                        {
                            "index": 0,
                            "id": "call_1",
                            "function": {"name": "get_time", "arguments": {}},
                        }
                    ],
                },
                {"role": "tool", "content": "noon", "tool_call_id": "call_1"},
            ],
        },
    ),
]
OPEN_WEBUI: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"OpenAI, {name}": ("/v1/chat/completions", body) for name, body in _SENT_TO_OPENAI},
    **{f"Ollama, {name}": ("/api/chat", body) for name, body in _SENT_TO_OLLAMA},
    # Its proxy of Ollama's servers sends the names of Ollama's lists to OpenAI's endpoints.
    "Ollama's name, chat": ("/v1/chat/completions", {**_OPENAI, "model": "toy:latest"}),
    "Ollama's name, messages": (
        "/v1/messages",
        {"model": "toy:latest", "messages": [_USER], "max_tokens": 16},
    ),
    "Ollama's name, responses": ("/v1/responses", {"model": "toy:latest", "input": "Hi"}),
}
