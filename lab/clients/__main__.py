"""Installs clients into a temporary folder and runs a session of each against a tiny model.

python -m piecework.lab.clients MODEL                  # all clients
python -m piecework.lab.clients MODEL llm ai-sdk       # some of them

MODEL is a folder of safetensors such as SmolLM2-135M-Instruct. Agents send more tokens than it was
trained for, so the server gets a copy of its config.json with a longer context. A .gguf file keeps
its context, which suffices for libraries. Answers make no sense; a session passes if the program
ends with 0 and prints something.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
import venv
from collections.abc import Iterator
from pathlib import Path

from .recipes import RECIPES, Recipe

_CONTEXT = 65536
_START_SECONDS = 300


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m piecework.lab.clients",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "model", type=Path, help="folder or .gguf file of a small model with a chat template"
    )
    parser.add_argument("clients", nargs="*", help=f"any of {', '.join(RECIPES)}; default: all")
    parser.add_argument("--seconds", type=float, default=600, help="time for each session")
    arguments = parser.parse_args()
    unknown = {*arguments.clients} - {*RECIPES}
    if unknown:
        parser.error(f"unknown clients: {', '.join(sorted(unknown))}")
    failed = []
    with tempfile.TemporaryDirectory() as scratch, _served(arguments.model, Path(scratch)) as url:
        for name in arguments.clients or RECIPES:
            folder = Path(scratch) / name
            text = _session(RECIPES[name], folder, url, arguments.seconds)
            print(f"{name}: {text}", flush=True)
            failed += [] if text.startswith("passes") else [name]
            shutil.rmtree(folder, ignore_errors=True)
    return 1 if failed else 0


@contextlib.contextmanager
def _served(model: Path, scratch: Path) -> Iterator[str]:
    """Yield the address of a server of the model with a long context."""
    served = model if model.is_file() else _with_long_context(model, scratch / "model")
    port = _free_port()
    flags = ["--port", str(port), "--responses-store", "memory", "--log-level", "warning"]
    flags += ["--default-max-tokens", "64"]
    process = subprocess.Popen([sys.executable, "-m", "piecework", "serve", str(served), *flags])
    try:
        url = f"http://127.0.0.1:{port}"
        _wait(url, process)
        yield url
    finally:
        process.terminate()
        process.wait(60)


def _with_long_context(model: Path, copy: Path) -> Path:
    """Return a folder with the files of a model and a longer context."""
    config = json.loads((model / "config.json").read_text())
    copy.mkdir()
    for file in model.iterdir():
        if file.name != "config.json":
            (copy / file.name).symlink_to(file.resolve())
    config["max_position_embeddings"] = _CONTEXT
    (copy / "config.json").write_text(json.dumps(config))
    return copy


def _wait(url: str, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + _START_SECONDS
    while time.monotonic() < end and process.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5):
            return
        time.sleep(0.5)
    raise SystemExit("the server did not become ready")


def _session(recipe: Recipe, folder: Path, url: str, seconds: float) -> str:
    """Install a client and run its session. Return what happened, in one line."""
    home = folder / "home"
    for name, text in recipe.files.items():
        path = home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(_filled(text, url))
    home.mkdir(parents=True, exist_ok=True)
    try:
        programs = _install(recipe, folder)
    except (OSError, subprocess.SubprocessError) as error:
        return f"cannot be installed: {error}"
    environment = {
        **os.environ,
        "HOME": str(home),
        "CODEX_HOME": str(home / ".codex"),
        "PATH": f"{programs}:{os.environ['PATH']}",
        "CI": "1",
        **{name: _filled(value, url) for name, value in recipe.environment.items()},
    }
    environment.pop("PYTHONPATH", None)
    program = shutil.which(recipe.command[0], path=environment["PATH"])
    if program is None:
        return f"fails: there is no program {recipe.command[0]}"
    began = time.monotonic()
    try:
        done = subprocess.run(
            [program, *recipe.command[1:]],
            cwd=home,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired:
        return f"fails: it took longer than {seconds:.0f} s"
    took = f"{time.monotonic() - began:.1f} s"
    if done.returncode or not done.stdout.strip():
        return f"fails with {done.returncode} after {took}: {done.stderr.strip()[-400:]}"
    return f"passes in {took}: {done.stdout.strip()[-80:]!r}"


def _install(recipe: Recipe, folder: Path) -> Path:
    """Install the packages and return the folder of their programs."""
    if recipe.is_node:
        home = folder / "home"
        command = ["npm", "install", "--no-audit", "--no-fund", *recipe.packages]
        subprocess.run(command, cwd=home, check=True, capture_output=True, timeout=600)
        return home / "node_modules" / ".bin"
    venv.create(folder / "venv", with_pip=True)
    programs = folder / "venv" / "bin"
    command = [str(programs / "pip"), "install", "-q", *recipe.packages, "httpx"]
    subprocess.run(command, check=True, capture_output=True, timeout=1200)
    return programs


def _filled(text: str, url: str) -> str:
    return text.replace("@URL@", url).replace("@PORT@", str(_free_port()))


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


if __name__ == "__main__":
    raise SystemExit(main())
