"""Attacks by the content of requests: log-probabilities of prompts, long texts in grammars,
thousands of tools and items, compressed bodies, forms and files with empty parts.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import zlib
from collections.abc import Mapping
from typing import Any

from .arena import Arena, Attack, together
from .bodies import CHAT, COMPLETIONS

_ECHOED = 2000
_LITERALS, _LETTERS = 24, 100_000
_ITEMS, _TOOLS = 9_000, 128
_BOMB_BYTES = 60 * 2**20
_LINES = 10_000_000


async def _echoed_prompts(arena: Arena) -> None:
    """Send small bodies that ask for the log-probabilities of all tokens of their prompts."""
    body = {"prompt": [[5] * _ECHOED] * 4, "echo": True, "logprobs": 5, "max_tokens": 1}
    await together(arena.post(COMPLETIONS, body) for _ in range(4))
    await arena.post(COMPLETIONS, {**body, "stream": True})


async def _long_literals(arena: Arena) -> None:
    """Send grammars of one long text each, which are large once compiled."""
    await together(
        arena.post(
            COMPLETIONS,
            {"prompt": "Hi", "max_tokens": 50, "ebnf": f'start: "{chr(97 + n) * _LETTERS}"'},
        )
        for n in range(_LITERALS)
    )


async def _declarations(arena: Arena) -> None:
    said = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
    functions = [
        {
            "type": "function",
            "function": {"name": f"f{n}", "description": "d" * 100, "strict": True},
        }
        for n in range(_TOOLS)
    ]
    space = [{"type": "function", "name": f"f{n}"} for n in range(_TOOLS)]
    spaces = [{"type": "namespace", "name": f"n{n}", "tools": space} for n in range(_TOOLS)]
    blocks = [{"type": "text", "text": ""}] * _ITEMS
    items = [{"type": "mcp_call", "arguments": [{}] * 5}] * (_ITEMS // 5)
    for path, body in (
        (CHAT, {**said, "tools": functions, "tool_choice": "required"}),
        ("/v1/responses", {"model": arena.model, "input": "Hi", "tools": spaces}),
        ("/v1/responses", {"model": arena.model, "input": items}),
        ("/api/chat", {**said, "model": arena.model, "tools": functions, "format": "json"}),
        ("/api/chat", {"model": arena.model, "messages": [{"role": "user"}] * _ITEMS}),
        ("/api/generate", {"model": arena.model, "prompt": "Hi", "context": [5] * 1_000_000}),
        ("/v1/messages", {**said, "messages": [{"role": "user", "content": blocks}]}),
        (COMPLETIONS, {"model": "m" * 4_000_000, "prompt": "Hi"}),
    ):
        content = json.dumps({**body, "max_output_tokens": 1}).encode()
        await together(arena.post(path, content) for _ in range(16))


async def _compressed(arena: Arena) -> None:
    """Send bodies that become large when they are decoded, or have many empty members."""
    text = b'{"prompt":"' + b"a" * _BOMB_BYTES + b'"}'
    lists = b'{"prompt":[' + b"[]," * (_BOMB_BYTES // 30) + b"[]]}"
    members = gzip.compress(b"", mtime=0) * 100_000
    bodies: tuple[tuple[str, bytes], ...] = (
        ("gzip", gzip.compress(text, mtime=0)),
        ("gzip", gzip.compress(lists, mtime=0)),
        ("gzip", members),
        ("deflate", zlib.compress(text)),
        ("gzip", gzip.compress(gzip.compress(text, mtime=0), mtime=0)),
    )
    for coding, content in bodies:
        headers = {"Content-Encoding": coding}
        await together(arena.ask("POST", COMPLETIONS, content, headers=headers) for _ in range(16))


async def _odd_files(arena: Arena) -> None:
    """Send forms of empty fields, and batches of files with empty lines."""
    field = b'--X\r\nContent-Disposition: form-data; name="a"\r\n\r\n\r\n'
    await _send_form(arena, field * 200_000 + b"--X--\r\n")
    await _send_form(arena, b"--X\r\n" + b"A: b\r\n" * 400_000)
    for lines in (b"{}\n" * _LINES, b"\n" * _LINES, b"[" + b"{}," * (_LINES // 3) + b"{}]"):
        answer = await _send_form(arena, _file(lines))
        if "id" in answer:
            batch = {"endpoint": COMPLETIONS, "completion_window": "1h"}
            await arena.post("/v1/batches", {**batch, "input_file_id": answer["id"]})
    await asyncio.sleep(5.0)


def _file(content: bytes) -> bytes:
    return (
        b'--X\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--X\r\n'
        b'Content-Disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n'
        b"%b\r\n--X--\r\n"
    ) % content


async def _send_form(arena: Arena, content: bytes) -> Mapping[str, Any]:
    headers = {"Content-Type": "multipart/form-data; boundary=X"}
    status, answer = await arena.ask("POST", "/v1/files", content, headers=headers)
    return json.loads(answer) if status == "200" else {}


ATTACKS = (
    Attack(
        "echoed-prompts",
        f"16 prompts of {_ECHOED:,} tokens whose log-probabilities are asked for",
        _echoed_prompts,
    ),
    Attack(
        "long-literals",
        f"{_LITERALS} grammars of a text of {_LETTERS:,} letters each",
        _long_literals,
    ),
    Attack(
        "declarations",
        "tools, namespaces, items, blocks and names of models as large as may be, 16 times",
        _declarations,
    ),
    Attack("compressed", "bodies of 60 MB, compressed to kilobytes, 16 at once", _compressed),
    Attack("odd-files", "forms of 200,000 fields, batches of 10 million empty lines", _odd_files),
)
