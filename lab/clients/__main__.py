"""Installs clients into a temporary folder and runs a session of each against a tiny model.

python -m piecework.lab.clients smollm2-135m                  # all clients
python -m piecework.lab.clients smollm2-135m llm ai-sdk       # some of them
python -m piecework.lab.clients smollm2-135m --folder FOLDER  # keep what is installed, use it again

Agents send more tokens than a small model was trained for, so the server gets a copy of the model
with a longer context. Answers make no sense; a session passes if the program ends with 0 and prints
something.
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
from collections.abc import Iterator
from pathlib import Path

import gguf

from ...runtime.files.resolve import find_model
from .recipes import QUIET, RECIPES, Recipe

_CONTEXT = 65536
_START_SECONDS = 300


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m piecework.lab.clients",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "model", help="alias, folder or .gguf file of a small model with a chat template"
    )
    parser.add_argument("clients", nargs="*", help=f"any of {', '.join(RECIPES)}; default: all")
    # Two cores take many minutes for an agent's prompt of 25,000 tokens.
    parser.add_argument("--seconds", type=float, default=1800, help="time for each session")
    parser.add_argument("--folder", type=Path, help="install here; default: a temporary folder")
    arguments = parser.parse_intermixed_args()
    unknown = {*arguments.clients} - {*RECIPES}
    if unknown:
        parser.error(f"unknown clients: {', '.join(sorted(unknown))}")
    failed = []
    with tempfile.TemporaryDirectory() as scratch, _served(arguments.model, Path(scratch)) as url:
        for name in arguments.clients or RECIPES:
            folder = (arguments.folder or Path(scratch)) / name
            text = _session(RECIPES[name], folder, url, arguments.seconds)
            print(f"{name}: {text}", flush=True)
            failed += [] if text.startswith("passes") else [name]
            if arguments.folder is None:
                shutil.rmtree(folder, ignore_errors=True)
    return 1 if failed else 0


@contextlib.contextmanager
def _served(model: str, scratch: Path) -> Iterator[str]:
    """Yield the address of a server of the model with a long context."""
    served = _with_long_context(Path(find_model(model)), scratch)
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


def _with_long_context(model: Path, scratch: Path) -> Path:
    """Return a copy of a model, which states a longer context."""
    copy = scratch / model.name
    if model.is_file():
        shutil.copyfile(model, copy)
        reader = gguf.GGUFReader(copy, "r+")
        architecture = reader.fields["general.architecture"].contents()
        reader.fields[f"{architecture}.context_length"].parts[-1][0] = _CONTEXT
        return copy
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
    # The caller's variables are left out: a key or a proxy there would change what clients do.
    environment = {
        **QUIET,
        "HOME": str(home),
        "CODEX_HOME": str(home / ".codex"),
        "PATH": f"{programs}:{os.environ['PATH']}",
        **{name: _filled(value, url) for name, value in recipe.environment.items()},
    }
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
    version = _version(recipe, folder)
    return f"passes with {version} in {took}: {done.stdout.strip()[-80:]!r}"


def _install(recipe: Recipe, folder: Path) -> Path:
    """Install the packages, if they are not installed, and return the folder of their programs."""
    home = folder / "home"
    programs = home / "node_modules" / ".bin" if recipe.is_node else folder / "venv" / "bin"
    if (folder / "installed").exists():
        return programs
    if recipe.is_node:
        commands = [["npm", "install", "--no-audit", "--no-fund", *recipe.packages]]
    else:
        python, wanted = str(programs / "python"), [*recipe.packages, "httpx"]
        # uv takes a tenth of pip's time.
        install = [python, "-m", "pip"] if (uv := shutil.which("uv")) is None else [uv, "pip"]
        commands = [[sys.executable, "-m", "venv", str(folder / "venv")]]
        commands += [[*install, "install", "-q", "--python", python, *wanted]]
    for command in commands:
        subprocess.run(command, cwd=home, check=True, capture_output=True, timeout=1200)
    (folder / "installed").touch()
    return programs


def _version(recipe: Recipe, folder: Path) -> str:
    """Return the version of the first package."""
    package = recipe.packages[0].partition("[")[0]
    if recipe.is_node:
        manifest = folder / "home" / "node_modules" / package / "package.json"
        return str(json.loads(manifest.read_text())["version"])
    code = f"from importlib.metadata import version; print(version({package!r}))"
    asked = [str(folder / "venv" / "bin" / "python"), "-c", code]
    return subprocess.run(asked, check=True, capture_output=True, text=True).stdout.strip()


def _filled(text: str, url: str) -> str:
    return text.replace("@URL@", url).replace("@PORT@", str(_free_port()))


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


if __name__ == "__main__":
    raise SystemExit(main())
