"""Valid bodies for the endpoints of Ollama's API, which the fuzz campaign changes."""

from __future__ import annotations

from typing import Any

_USER = {"role": "user", "content": "Hi"}
_SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
_TOOL = {"type": "function", "function": {"name": "f", "parameters": _SCHEMA}}
# The first of each endpoint is minimal.
OLLAMA_SEEDS: dict[str, tuple[dict[str, Any], ...]] = {
    "/api/chat": (
        {"model": "default", "messages": [_USER], "stream": False},
        {
            "model": "default:latest",
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "Hi", "images": []},
                {
                    "role": "assistant",
                    "content": "",
                    "thinking": "Hm.",
                    "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}],
                },
                {"role": "tool", "tool_name": "f", "content": "1"},
            ],
            "tools": [_TOOL],
            "think": False,
            "keep_alive": "5m",
            "logprobs": True,
            "top_logprobs": 2,
            "options": {
                "num_predict": 4,
                "num_ctx": 2048,
                "num_keep": 5,
                "temperature": 0.8,
                "top_k": 40,
                "top_p": 0.9,
                "min_p": 0.1,
                "repeat_penalty": 1.1,
                "presence_penalty": 0.5,
                "frequency_penalty": 0.5,
                "seed": 7,
                "stop": ["x"],
                "typical_p": 1.0,
            },
        },
        {"model": "default", "messages": [_USER], "format": _SCHEMA, "options": {"num_predict": 4}},
        {"model": "default", "messages": [], "keep_alive": 0},
    ),
    "/api/generate": (
        {"model": "default", "prompt": "The fox", "options": {"num_predict": 4}},
        {
            "model": "default",
            "prompt": "The fox",
            "raw": True,
            "stream": False,
            "logprobs": True,
            "format": "json",
            "options": {"num_predict": 4},
        },
        {"model": "default", "prompt": "The fox", "suffix": "dog", "options": {"num_predict": 4}},
        {
            "model": "default",
            "prompt": "Hi",
            "system": "Be brief.",
            "think": False,
            "context": [],
            "options": {"num_predict": 4},
        },
    ),
    "/api/show": ({"model": "default"}, {"name": "default"}),
    "/api/pull": ({"model": "a"},),
    "/api/push": ({"model": "a"},),
    "/api/create": ({"model": "a", "from": "default"},),
    "/api/copy": ({"source": "default", "destination": "a"},),
    "/api/blobs/sha256:0": ({},),
}
