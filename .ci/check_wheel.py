"""Check that a wheel starts at once where there is no compiler: `check_wheel.py dist/*.whl`.

Run it with the Python of an environment that has what piecework runs on and the small model (`make
dev`). It unpacks the wheel into a temporary folder, compiles its modules as pip does, serves the
model without a cache and without a compiler, and asks for a completion.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import zipfile
from pathlib import Path

_WAIT_SECONDS = 120.0  # A start that takes longer has failed.


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--most-seconds", type=float, default=20.0, help="default: %(default)s")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="piecework-wheel-") as folder:
        with zipfile.ZipFile(arguments.wheel) as wheel:
            wheel.extractall(folder)
        # pip compiles what it installs, too.
        subprocess.run([sys.executable, "-m", "compileall", "-q", folder], check=True)
        seconds = first_answer(Path(folder))
    print(f"the first answer came {seconds:.1f} s after the start")
    if seconds > arguments.most_seconds:
        print(f"that is more than {arguments.most_seconds:g} s", file=sys.stderr)
        return 1
    return 0


def first_answer(folder: Path) -> float:
    """Return the seconds from the start of a server of the package in `folder` to its answer."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {
        "PATH": "/nowhere",
        "HOME": str(folder),
        "PYTHONPATH": str(folder),
        "PIECEWORK_CACHE_DIR": str(folder / "cache"),
        "LANG": os.environ.get("LANG", "C.UTF-8"),
    }
    serve = [sys.executable, "-m", "piecework", "serve", "smollm2-135m", "--port", str(port)]
    began = time.perf_counter()
    server = subprocess.Popen(serve, cwd=folder, env=environment)
    try:
        while server.poll() is None and time.perf_counter() - began < _WAIT_SECONDS:
            if answers(port):
                backend = attention(port)
                if backend != "native":
                    raise SystemExit(f"the kernels of the wheel are not used: {backend} attention")
                return time.perf_counter() - began
            time.sleep(0.05)
        raise SystemExit(f"the server did not answer within {_WAIT_SECONDS:g} s")
    finally:
        server.terminate()
        server.wait()


def answers(port: int) -> bool:
    """Whether the server answers a completion."""
    body = json.dumps({"model": "smollm2-135m", "prompt": "The", "max_tokens": 1}).encode()
    headers = {"Content-Type": "application/json"}
    url = f"http://127.0.0.1:{port}/v1/completions"
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=60):
            return True
    except (urllib.error.URLError, ConnectionError):
        return False


def attention(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/server_info", timeout=60) as answer:
        found = json.loads(answer.read())
    return str(found["attention_backend"])


if __name__ == "__main__":
    sys.exit(main())
