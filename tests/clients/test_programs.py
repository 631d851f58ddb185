"""Agents of the command line: each calls a tool of its own and says what the model says."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from client_programs import program, run, says

pytestmark = pytest.mark.slow
QUESTION = "What does a.py do?"
ANSWER = "It prints the word quetzal."


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def codex(url: str, folder: Path) -> str:
    provider = "model_providers.local"
    settings = {
        "model": "toy",
        "model_provider": "local",
        f"{provider}.name": "local",
        f"{provider}.base_url": f"{url}/v1",
        f"{provider}.wire_api": "responses",
        "analytics.enabled": False,
    }
    given = [
        part for key, value in settings.items() for part in ("-c", f"{key}={json.dumps(value)}")
    ]
    return run([program("codex"), "exec", "--skip-git-repo-check", *given, QUESTION], folder, {})


def claude(url: str, folder: Path) -> str:
    variables = {
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_AUTH_TOKEN": "none",
        "ANTHROPIC_MODEL": "toy",
        "ANTHROPIC_SMALL_FAST_MODEL": "toy",
    }
    return run([program("claude"), "-p", QUESTION], folder, variables)


def qwen(url: str, folder: Path) -> str:
    variables = {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": "none", "OPENAI_MODEL": "toy"}
    command = [program("qwen"), "--auth-type", "openai", "--yolo", "-p", QUESTION]
    return run(command, folder, variables)


def opencode(url: str, folder: Path) -> str:
    config = {
        "autoupdate": False,
        "share": "disabled",
        "model": "local/toy",
        "provider": {
            "local": {
                "npm": "@ai-sdk/openai-compatible",
                "options": {"baseURL": f"{url}/v1"},
                "models": {"toy": {"limit": {"context": 500000, "output": 8192}}},
            }
        },
    }
    write(folder / "opencode.json", json.dumps(config))
    return run([program("opencode"), "run", QUESTION], folder, {})


def continue_(url: str, folder: Path) -> str:
    model = {"name": "toy", "provider": "openai", "model": "toy", "apiBase": f"{url}/v1"}
    model |= {"apiKey": "none", "roles": ["chat"], "capabilities": ["tool_use"]}
    config = {"name": "local", "version": "1.0.0", "schema": "v1", "models": [model]}
    write(folder / "config.yaml", json.dumps(config))
    command = [program("cn"), "--config", "config.yaml", "--auto", "-p", QUESTION]
    return run(command, folder, {})


def cline(url: str, folder: Path) -> str:
    path, provider = program("cline"), "openai-compatible"
    known = ["--apikey", "none", "--modelid", "toy", "--baseurl", f"{url}/v1"]
    run([path, "auth", provider, *known], folder, {})
    return run([path, "-P", provider, "-k", "none", "-m", "toy", QUESTION], folder, {})


def aider(url: str, folder: Path) -> str:
    quiet = ["--no-analytics", "--no-check-update", "--no-show-model-warnings", "--yes", "--no-git"]
    variables = {"OPENAI_API_BASE": f"{url}/v1", "OPENAI_API_KEY": "none"}
    command = [program("aider"), "--model", "openai/toy", *quiet, "--message", QUESTION, "a.py"]
    return run(command, folder, variables)


def llm(url: str, folder: Path) -> str:
    model = {"model_id": "toy", "model_name": "toy", "api_base": f"{url}/v1"}
    write(
        folder / "llm" / "extra-openai-models.yaml", json.dumps([model | {"supports_tools": True}])
    )
    variables = {"LLM_USER_PATH": str(folder / "llm"), "OPENAI_API_KEY": "none"}
    return run([program("llm"), "-m", "toy", "-T", "llm_version", QUESTION], folder, variables)


Program = Callable[[str, Path], str]


@pytest.mark.parametrize(
    ("client", "tool", "arguments"),
    [
        (codex, "exec_command", {"cmd": "cat a.py"}),
        (codex, "multi_agent_v1__close_agent", {"target": "x"}),
        (claude, "Read", {"file_path": "{folder}/a.py"}),
        (qwen, "read_file", {"file_path": "{folder}/a.py"}),
        (opencode, "read", {"filePath": "{folder}/a.py"}),
        (continue_, "Read", {"filepath": "{folder}/a.py"}),
        (cline, "read_files", {"files": [{"path": "{folder}/a.py"}]}),
        (llm, "llm_version", {}),
        (aider, "", {}),
    ],
)
def test_a_program_calls_its_tool_and_tells_the_answer(
    tmp_path: Path, client: Program, tool: str, arguments: dict[str, Any]
) -> None:
    (tmp_path / "a.py").write_text('print("quetzal")\n')
    made = json.loads(json.dumps(arguments).replace("{folder}", str(tmp_path)))
    with says(*([(tool, made)] if tool else []), text=ANSWER) as url:
        assert "quetzal" in client(url, tmp_path)
