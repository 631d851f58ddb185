"""How each client is installed, configured and run. `@URL@` stands for the server's address."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

_V1 = "@URL@/v1"
_KEYS = {"OPENAI_BASE_URL": _V1, "OPENAI_API_BASE": _V1, "OPENAI_API_KEY": "none"}
_SAY = "Say hello."
# Variables that keep clients from reporting to anybody and from updating themselves.
QUIET = {
    "CI": "1",
    "DO_NOT_TRACK": "1",
    "DISABLE_TELEMETRY": "1",
    "DISABLE_AUTOUPDATER": "1",
    "DISABLE_ERROR_REPORTING": "1",
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "CONTINUE_TELEMETRY_ENABLED": "0",
    "OPENCODE_DISABLE_AUTOUPDATE": "1",
    "QWEN_TELEMETRY_ENABLED": "0",
    "LITELLM_TELEMETRY": "False",
    "ANONYMIZED_TELEMETRY": "False",
}


class Recipe(NamedTuple):
    """One client.

    Attributes:
        packages: Packages of PyPI or of npm.
        command: A program of these packages and its arguments, run in an empty folder.
        files: Files in the folder, which is also the home folder.
        is_node: Whether the packages are those of npm.
    """

    packages: Sequence[str]
    command: Sequence[str]
    environment: Mapping[str, str] = {}
    files: Mapping[str, str] = {}
    is_node: bool = False


_CODEX = f"""model = "default"
model_provider = "piecework"
[model_providers.piecework]
name = "Piecework"
base_url = "{_V1}"
wire_api = "responses"
"""
_OPENCODE = json.dumps(
    {
        "model": "piecework/default",
        "provider": {
            "piecework": {
                "npm": "@ai-sdk/openai-compatible",
                "options": {"baseURL": _V1},
                "models": {"default": {"limit": {"context": 32768, "output": 256}}},
            }
        },
    }
)
_CONTINUE = f"""name: local
version: 1.0.0
schema: v1
models:
  - name: piecework
    provider: openai
    model: default
    apiBase: {_V1}
    apiKey: none
    roles: [chat]
    capabilities: [tool_use]
"""
_LLM = f"- model_id: local\n  model_name: default\n  api_base: {_V1}\n"
_LITELLM = f"""model_list:
  - model_name: local
    litellm_params: {{model: openai/default, api_base: {_V1}, api_key: none}}
"""
_LITELLM_RUN = """
import subprocess, time
import httpx

proxy = subprocess.Popen(["litellm", "--config", "litellm.yaml", "--port", "@PORT@"])
try:
    body = {"model": "local", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8}
    url = "http://127.0.0.1:@PORT@/v1/chat/completions"
    headers = {"Authorization": "Bearer sk-local"}
    while proxy.poll() is None:
        try:
            answer = httpx.post(url, json=body, headers=headers, timeout=60)
            print(answer.json()["choices"][0]["message"]["content"])
            break
        except httpx.ConnectError:
            time.sleep(1)
finally:
    proxy.terminate()
"""
_AI_SDK = f"""
import {{ createOpenAICompatible }} from '@ai-sdk/openai-compatible'
import {{ generateText, streamText }} from 'ai'
const model = createOpenAICompatible({{ name: 'piecework', baseURL: '{_V1}' }})('default')
const whole = await generateText({{ model, prompt: '{_SAY}', maxOutputTokens: 8 }})
console.log(whole.text)
const stream = streamText({{ model, prompt: '{_SAY}', maxOutputTokens: 8 }})
for await (const part of stream.textStream) process.stdout.write(part)
"""
_LANGCHAIN = f"""
import {{ ChatOpenAI }} from '@langchain/openai'
const configuration = {{ baseURL: '{_V1}' }}
const model = new ChatOpenAI({{ model: 'default', apiKey: 'none', maxTokens: 8, configuration }})
console.log((await model.invoke('{_SAY}')).content)
for await (const part of await model.stream('{_SAY}')) process.stdout.write(String(part.content))
"""
_OLLAMA_JS = f"""
import {{ Ollama }} from 'ollama'
const client = new Ollama({{ host: '@URL@' }})
const asked = {{ model: 'default', messages: [{{ role: 'user', content: '{_SAY}' }}],
  options: {{ num_predict: 8 }} }}
console.log((await client.list()).models[0].name, (await client.chat(asked)).message.content)
for await (const part of await client.chat({{ ...asked, stream: true }})) {{
  process.stdout.write(part.message.content)
}}
"""
# Open WebUI lists the models of its two connections and asks a model of each, all by its backend.
_OPEN_WEBUI = """
import subprocess, time
import httpx

server = subprocess.Popen(["open-webui", "serve", "--host", "127.0.0.1", "--port", "@PORT@"])
try:
    client = httpx.Client(base_url="http://127.0.0.1:@PORT@", timeout=120)
    while server.poll() is None:
        try:
            client.get("/health").raise_for_status()
            break
        except httpx.HTTPError:
            time.sleep(1)
    token = client.post("/api/v1/auths/signin", json={"email": "", "password": ""}).json()["token"]
    client.headers["Authorization"] = f"Bearer {token}"
    models = {model["owned_by"]: model["id"] for model in client.get("/api/models").json()["data"]}
    for owner in ("openai", "ollama"):
        body = {"model": models[owner], "messages": [{"role": "user", "content": "Hi"}]}
        answer = client.post("/api/chat/completions", json={**body, "max_tokens": 8}).json()
        print(owner, answer["choices"][0]["message"]["content"])
finally:
    server.terminate()
"""
RECIPES: Mapping[str, Recipe] = {
    "codex": Recipe(
        ["@openai/codex"],
        ["codex", "exec", "--skip-git-repo-check", _SAY],
        files={".codex/config.toml": _CODEX},
        is_node=True,
    ),
    "claude-code": Recipe(
        ["@anthropic-ai/claude-code"],
        ["claude", "-p", _SAY, "--max-turns", "1"],
        {
            "ANTHROPIC_BASE_URL": "@URL@",
            "ANTHROPIC_AUTH_TOKEN": "none",
            "ANTHROPIC_MODEL": "default",
            "ANTHROPIC_SMALL_FAST_MODEL": "default",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "64",
        },
        is_node=True,
    ),
    "opencode": Recipe(
        ["opencode-ai"], ["opencode", "run", _SAY], files={"opencode.json": _OPENCODE}, is_node=True
    ),
    "qwen-code": Recipe(
        ["@qwen-code/qwen-code"],
        ["qwen", "--auth-type", "openai", "-p", _SAY],
        {**_KEYS, "OPENAI_MODEL": "default"},
        is_node=True,
    ),
    "continue": Recipe(
        ["@continuedev/cli"],
        ["cn", "-p", _SAY, "--config", "config.yaml"],
        files={"config.yaml": _CONTINUE},
        is_node=True,
    ),
    "aider": Recipe(
        ["aider-chat"],
        ["aider", "--model", "openai/default", "--no-git", "--yes-always", "--message", _SAY],
        _KEYS,
    ),
    "open-webui": Recipe(
        ["open-webui"],
        ["python", "run.py"],
        {
            "OPENAI_API_BASE_URL": _V1,
            "OPENAI_API_KEY": "none",
            "OLLAMA_BASE_URL": "@URL@",
            "DATA_DIR": "data",
            "WEBUI_AUTH": "False",
            "OFFLINE_MODE": "True",
            "HF_HUB_OFFLINE": "1",
        },
        {"run.py": _OPEN_WEBUI},
    ),
    "llm": Recipe(
        ["llm"],
        ["llm", "-m", "local", "-o", "max_tokens", "8", _SAY],
        {"LLM_USER_PATH": ".", "OPENAI_API_KEY": "none"},
        {"extra-openai-models.yaml": _LLM},
    ),
    "litellm": Recipe(
        ["litellm[proxy]"],
        ["python", "run.py"],
        {"LITELLM_MASTER_KEY": "sk-local"},
        files={"litellm.yaml": _LITELLM, "run.py": _LITELLM_RUN},
    ),
    "ai-sdk": Recipe(
        ["ai", "@ai-sdk/openai-compatible"],
        ["node", "run.mjs"],
        files={"run.mjs": _AI_SDK},
        is_node=True,
    ),
    "langchain-js": Recipe(
        ["@langchain/openai", "@langchain/core"],
        ["node", "run.mjs"],
        files={"run.mjs": _LANGCHAIN},
        is_node=True,
    ),
    "ollama-js": Recipe(
        ["ollama"], ["node", "run.mjs"], files={"run.mjs": _OLLAMA_JS}, is_node=True
    ),
}
