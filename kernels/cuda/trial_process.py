"""Results of trials of libraries' kernels on this machine. A separate process tries the kernels,
and the results are kept on disk.
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
    # Two distributions have the module `sgl_kernel`: the second one succeeds the first.
    "sgl-kernel": ("sgl-kernel", "sglang-kernel"),
    "flashinfer": ("flashinfer-python", "flashinfer-jit-cache"),
    "torch._scaled_mm": (),
}
_TRIAL_SECONDS = 900.0  # flashinfer builds its kernels with nvcc, which takes minutes.
_REPORT_SECONDS = 10.0
_POLL_SECONDS = 0.5
# A failure expires after this time, because its cause may have been temporary.
_FAILED_SECONDS = 24 * 3600.0

logger = logging.getLogger(__name__)


def _environment(index: int) -> dict[str, str]:
    """Return the environment of a process whose only GPU is the GPU `index` of this process."""
    environment = dict(os.environ)
    if index > 0:
        visible = environment.get("CUDA_VISIBLE_DEVICES")
        own = visible.split(",")[index] if visible else str(index)
        environment["CUDA_VISIBLE_DEVICES"] = own
    return environment


class Trials:
    """Asks for results of trials. Each trial runs once per machine, library version, torch version
    and device.

    The process starts at the first request, or by `begin`, so that it imports while other work goes
    on. After `end` nothing is tried any more, so no request waits for a trial.
    """

    def __init__(self, device: str = "cuda") -> None:
        self._device = device
        self._known: dict[str, str | None] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._ended = False

    def begin(self, libraries: Sequence[str]) -> None:
        """Start the process now, unless the results for these libraries are known."""
        self._ended = False
        if any(
            self._stored(_key(_import_of(library), self._device)) is None for library in libraries
        ):
            self._start()

    def end(self) -> None:
        """End the process and free its device memory. No trials run from now on."""
        self._stop()
        self._ended = True

    def import_failure(self, library: str) -> str | None:
        """Return why a library cannot be imported here, or None if it can."""
        return self.failure(_import_of(library))

    def failure(self, request: Mapping[str, Any]) -> str | None:
        """Return why the library cannot be used for a call (see `trials.failure`), or None if it
        can.
        """
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
            # A failed trial may leave memory on the device. End its process.
            self._stop()
        self._store(key, request, reason)
        return reason

    def _answer(self, request: Mapping[str, Any]) -> str | None:
        assert self._process is not None and self._connection is not None
        began = reported = time.monotonic()
        try:
            self._connection.send_bytes(json.dumps(request).encode())
            while not self._connection.poll(_POLL_SECONDS):
                now = time.monotonic()
                if now - began > _TRIAL_SECONDS:
                    return f"its trial gave no answer within {_TRIAL_SECONDS:.0f} s"
                if now - reported > _REPORT_SECONDS:
                    reported = now
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
    """Return what the process does: the kernel that its compiler builds, or the call that
    it tries.
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


TRIALS = Trials()  # The trials of this process, shared by ops and attention.
