"""Programs that are clients, run against a server whose model says what a test scripts."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from http_fixtures import make_app, serve
from scripted_engine import INFO, ScriptedEngine
from toy_tokenizer import toy_tokenizer

from piecework.lab.clients.recipes import QUIET

_TEMPLATE = (
    "{% for m in messages %}[[{{ m.role }}]]{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "{% endfor %}{% for t in tools or [] %}{{ t.function | tojson }}{% endfor %}[[assistant]]"
)


def program(name: str) -> str:
    """The path of an installed program; skips the test where there is none."""
    scripts = sysconfig.get_path("scripts")
    found = shutil.which(name) or shutil.which(name, path=scripts)
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


@contextlib.contextmanager
def says(*calls: tuple[str, dict[str, Any]], text: str, **settings: Any) -> Iterator[str]:
    """The URL of a server of the model `toy`, which calls one tool after another, each where it has
    the result of the one before, and then says the text.
    """
    engine = ScriptedEngine(toy_tokenizer(chat_template=_TEMPLATE))
    engine.info = dataclasses.replace(INFO, context_length=2**19, kv_tokens=2**19)
    engine.script.tokens_per_step = 8
    turns = [
        f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
        for name, arguments in calls
    ]
    encoded = [engine.tokenizer.encode(turn, add_special_tokens=False) for turn in (*turns, text)]

    known: dict[str, list[int]] = {}

    def reply(request: Any) -> list[int]:
        if request.rid not in known:
            prompt = engine.tokenizer.decode(request.prompt_ids)
            # Some programs ask for a title first, without tools.
            may_call = bool(calls) and f'"{calls[0][0]}"' in prompt
            turn = min(prompt.count("[[tool]]"), len(calls)) if may_call else len(calls)
            known[request.rid] = [*encoded[turn], *engine.tokenizer.eos_token_ids]
        return known[request.rid]

    engine.script.reply = reply
    with serve(make_app(engine, **settings)) as url:
        yield url


def run(
    command: list[str], folder: Path, variables: Mapping[str, str], seconds: float = 120
) -> str:
    """What the program prints. It has a home of its own, and knows no other server."""
    home = folder / "home"
    home.mkdir(exist_ok=True)
    done = subprocess.run(
        command,
        cwd=folder,
        env={"PATH": os.environ["PATH"], "HOME": str(home), **QUIET, **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr
