"""Tries kernels of libraries beside plain torch, in a process of its own: what ends it, or its CUDA
context, ends no engine.

`python -m piecework.kernels.cuda.trials FD DEVICE`: requests and answers of `trial_process.Trials`
go over the connection FD. An answer is None or what is wrong; after such a one the process ends,
for its context may be of no use any more.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch

from .. import reference
from ..attention import KVLayout
from . import attention_trial, libraries
from .attention import FlashInferAttention, Store

_TOLERANCE = 2e-2
"""Of |result - definition| / |definition|: what rounding makes of bfloat16, and far from what a
broken kernel does.
"""


def serve(connection: Connection, device: torch.device) -> int:
    """Answer requests until one fails, or nobody asks any more."""
    while True:
        try:
            request = json.loads(connection.recv_bytes())
        except EOFError:
            return 0
        reason = failure(request, device)
        connection.send_bytes(json.dumps(reason).encode())
        if reason is not None:
            return 1


def failure(request: Mapping[str, Any], device: torch.device) -> str | None:
    """Why a library cannot be used for what is asked; None: it can."""
    try:
        if request["call"] == "attention":
            num_heads, num_kv_heads, head_size = request["heads"]
            dtype = getattr(torch, request["dtype"])
            layout = KVLayout.of_heads(num_heads, num_kv_heads, head_size, dtype)
            return attention_trial.failure(
                FlashInferAttention(store_of_keys_and_values()), layout, device
            )
        library = libraries.load(request["library"])
        if request["call"] == "import":
            return None
        given = [
            _made_up(argument, device) if isinstance(argument, dict) else argument
            for argument in request["arguments"]
        ]
        off = _distance(
            getattr(library, request["call"])(*given), getattr(reference, request["call"])(*given)
        )
        return None if off <= _TOLERANCE else f"{request['call']} is off by {off:.1%}"
    except Exception as error:
        return libraries.one_line(error)


def described(argument: Any) -> Any:
    """An argument of a call as a request tells it: of a tensor its layout alone."""
    if not isinstance(argument, torch.Tensor):
        return argument
    return {
        "shape": list(argument.shape),
        "stride": list(argument.stride()),
        "dtype": str(argument.dtype).removeprefix("torch."),
    }


def _made_up(told: Mapping[str, Any], device: torch.device) -> torch.Tensor:
    """Numbers from -3 to 3."""
    made = torch.empty_strided(
        told["shape"], told["stride"], dtype=getattr(torch, told["dtype"]), device=device
    )
    return made.copy_(torch.linspace(-3, 3, made.numel()).view(made.shape))


def store_of_keys_and_values() -> Store:
    """Triton's, which is imported where there is a device for it."""
    from ..triton.attention import store_keys_and_values

    return store_keys_and_values


def _distance(actual: torch.Tensor, expected: torch.Tensor) -> float:
    expected = expected.double()
    return float((actual.double() - expected).norm() / expected.norm())


def main(argv: Sequence[str]) -> int:
    return serve(Connection(int(argv[0])), torch.device(argv[1]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
