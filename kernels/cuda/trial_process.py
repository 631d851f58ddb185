"""What kernels of libraries are worth on this machine: told by a process that tries them, and kept
on disk.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import psutil
import torch

from ..cache_folder import verdicts_folder

COMMAND = (sys.executable, "-m", "piecework.kernels.cuda.trials")
_PACKAGES = {
    "sgl-kernel": ("sgl-kernel",),
    "flashinfer": ("flashinfer-python", "flashinfer-jit-cache"),
    "torch._scaled_mm": (),
}
_TRIAL_SECONDS = 900.0
"""flashinfer builds its kernels with nvcc, which takes minutes."""
_TELL_SECONDS = 10.0
_LOOK_SECONDS = 0.5
_FAILED_SECONDS = 24 * 3600.0
"""How long a failure counts: it may have been the machine's."""

logger = logging.getLogger(__name__)


def _environment(index: int) -> dict[str, str]:
    """For a process whose one GPU is that of this number here, which a rank of several computes
    on.
    """
    environment = dict(os.environ)
    if index > 0:
        visible = environment.get("CUDA_VISIBLE_DEVICES")
        own = visible.split(",")[index] if visible else str(index)
        environment["CUDA_VISIBLE_DEVICES"] = own
    return environment


class Trials:
    """Asks for verdicts; each is asked for once a machine, as long as library, torch and device are
    the same.

    The process is started at the first question, or by `begin`, so that it imports beside other
    work. After `end` nothing is tried any more: no request waits for a trial.
    """

    def __init__(self, device: str = "cuda") -> None:
        self._device = device
        self._known: dict[str, str | None] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._ended = False

    def begin(self, libraries: Sequence[str]) -> None:
        """Start the process now, unless the verdicts on these libraries are known."""
        self._ended = False
        if any(
            self._stored(_key(_import_of(library), self._device)) is None for library in libraries
        ):
            self._start()

    def end(self) -> None:
        """No trials from now on; the memory that the process has on the device is free."""
        self._stop()
        self._ended = True

    def import_failure(self, library: str) -> str | None:
        """Why a library cannot be imported here; None: it can."""
        return self.failure(_import_of(library))

    def failure(self, request: Mapping[str, Any]) -> str | None:
        """Why the library cannot be used for a call (see `trials.failure`); None: it can."""
        key = _key(request, self._device)
        if key not in self._known:
            stored = self._stored(key)
            if stored is None and self._ended:
                return "it was not tried when the engine started"
            self._known[key] = self._ask(request, key) if stored is None else stored["reason"]
        return self._known[key]

    def _ask(self, request: Mapping[str, Any], key: str) -> str | None:
        if self._process is None:
            self._start()
        reason = self._answer(request)
        if reason is not None:
            # Whatever it has left on the device is not to be there for the next one.
            self._stop()
        self._store(key, request, reason)
        return reason

    def _answer(self, request: Mapping[str, Any]) -> str | None:
        assert self._process is not None and self._connection is not None
        began = told = time.monotonic()
        try:
            self._connection.send_bytes(json.dumps(request).encode())
            while not self._connection.poll(_LOOK_SECONDS):
                now = time.monotonic()
                if now - began > _TRIAL_SECONDS:
                    return f"its trial gave no answer within {_TRIAL_SECONDS:.0f} s"
                if now - told > _TELL_SECONDS:
                    told = now
                    print(
                        _progress(request, self._process.pid, now - began),
                        file=sys.stderr,
                        flush=True,
                    )
            reason = json.loads(self._connection.recv_bytes())
            return None if reason is None else str(reason)
        except (EOFError, OSError):
            code = self._process.wait()
            how = (
                f"was ended by {signal.Signals(-code).name}"
                if code < 0
                else f"ended with exit code {code}"
            )
            return f"the process that tried it {how}"

    def _start(self) -> None:
        self._connection, theirs = Pipe()
        command = [*COMMAND, str(theirs.fileno()), self._device]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            env=_environment(torch.cuda.current_device() if torch.cuda.is_available() else 0),
        )
        theirs.close()

    def _stop(self) -> None:
        if self._process is not None and self._connection is not None:
            self._connection.close()
            self._process.kill()
            self._process.wait()
        self._process = self._connection = None

    def _stored(self, key: str) -> dict[str, Any] | None:
        try:
            verdict = json.loads((verdicts_folder() / f"{key}.json").read_text())
            fresh = verdict["reason"] is None or time.time() - verdict["created"] < _FAILED_SECONDS
            return verdict if fresh else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _store(self, key: str, request: Mapping[str, Any], reason: str | None) -> None:
        folder = verdicts_folder()
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            with tempfile.NamedTemporaryFile("w", dir=folder, delete=False) as file:
                json.dump(
                    {"request": dict(request), "reason": reason, "created": time.time()}, file
                )
            os.replace(file.name, folder / f"{key}.json")
        except OSError as error:
            logger.info(
                "the verdict on %s is not kept for the next start: %s", request["library"], error
            )


def _import_of(library: str) -> dict[str, Any]:
    return {"library": library, "call": "import"}


def _key(request: Mapping[str, Any], device: str) -> str:
    packages = {name: _version(name) for name in _PACKAGES[request["library"]]}
    machine = (
        f"{torch.cuda.get_device_name()} {torch.cuda.get_device_capability()}"
        if torch.cuda.is_available()
        else device
    )
    made_with = {
        "packages": packages,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "device": machine,
    }
    return hashlib.sha256(
        json.dumps([dict(request), made_with], sort_keys=True).encode()
    ).hexdigest()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _progress(request: Mapping[str, Any], pid: int, seconds: float) -> str:
    """What the process is at: the kernel that a compiler below it builds, or the call that it
    tries.
    """
    building = _building(pid)
    doing = f"building {building} of" if building else f"trying {request['call']} of"
    return f"{doing} {request['library']}, once on this machine: {seconds:.0f} s so far"


def _building(pid: int) -> str | None:
    try:
        for process in psutil.Process(pid).children(recursive=True):
            for word in process.cmdline():
                if Path(word).suffix in (".cu", ".cuh", ".cpp", ".cc"):
                    return Path(word).stem
    except psutil.Error:
        pass
    return None


TRIALS = Trials()
"""Of this process: ops and attention share one process that tries."""
