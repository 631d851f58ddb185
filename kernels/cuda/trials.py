"""Compare kernels of libraries with plain torch, in a separate process. If a kernel ends the
process or breaks its CUDA context, the engine goes on.

`python -m piecework.kernels.cuda.trials FD DEVICE` receives requests and sends answers of
`trial_process.Trials` over the connection FD. An answer is None or an error text. After an error
the process ends, because its CUDA context may be broken.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch

from .. import reference
from ..attention import KVLayout
from . import attention_trial, libraries
from .attention import FlashInferAttention, Store

# Limit of |result - definition| / |definition|: above the rounding of bfloat16, far below the error
# of a broken kernel.
_TOLERANCE = 2e-2
# Places of arguments that are scales, by the call.
_SCALES = {"scaled_linear": (1, 3), "fp4_layer": (1, 3, 4), "fp4_gated_layer": (1, 3, 4)}


def serve(connection: Connection, device: torch.device) -> int:
    """Answer requests until one fails or the connection is closed."""
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
    """Return why a library cannot be used for a request, or None if it can."""
    try:
        if request["call"] == "attention":
            num_heads, num_kv_heads, head_size, value_size = request["heads"]
            dtype, cache_dtype = (
                getattr(torch, request[name]) for name in ("dtype", "cache_dtype")
            )
            layout = replace(
                KVLayout.of_heads(num_heads, num_kv_heads, head_size, dtype),
                value_size=value_size,
                latent=value_size != head_size,
            )
            if cache_dtype != dtype:
                layout = replace(layout, cache_dtype=cache_dtype, k_scale=0.5, v_scale=2.0)
            return attention_trial.failure(
                FlashInferAttention(store_of_keys_and_values()), layout, device
            )
        library = libraries.load(request["library"])
        if request["call"] == "import":
            return None
        op, given = request["call"], _made_up(request, device)
        off = max(_distance(library, op, few) for few in _calls(op, given))
        return None if off <= _TOLERANCE else f"{op} is off by {off:.1%}"
    except Exception as error:
        return libraries.one_line(error)


def described(argument: Any) -> Any:
    """Return an argument of a call as part of a request. A tensor is described by its
    layout only.
    """
    if isinstance(argument, torch.dtype):
        return {"dtype": str(argument).removeprefix("torch.")}
    if not isinstance(argument, torch.Tensor):
        return argument
    return {
        "shape": list(argument.shape),
        "stride": list(argument.stride()),
        "dtype": str(argument.dtype).removeprefix("torch."),
    }


def _made_up(request: Mapping[str, Any], device: torch.device) -> list[Any]:
    """Return arguments with numbers from -3 to 3, in int8 up to 126. Scales of a product are at
    least 0.01.
    """
    generator = torch.Generator().manual_seed(0)
    given: list[Any] = []
    for place, description in enumerate(request["arguments"]):
        if not isinstance(description, dict):
            given.append(description)
            continue
        dtype = getattr(torch, description["dtype"])
        if "shape" not in description:
            given.append(dtype)
            continue
        numbers = torch.rand(description["shape"], generator=generator) * 6 - 3
        if dtype == torch.int8:
            numbers *= 42
        elif dtype == torch.uint8:
            numbers = torch.randint(256, description["shape"], generator=generator)
        elif place in _SCALES.get(request["call"], ()):
            numbers = numbers.abs() + 0.01
        made = torch.empty_strided(
            description["shape"], description["stride"], dtype=dtype, device=device
        )
        given.append(made.copy_(numbers))
    return given


def _calls(op: str, given: Sequence[Any]) -> Iterator[Sequence[Any]]:
    """Yield the arguments to try. Products are also tried with one row and three, because they have
    other kernels for few rows.
    """
    yield given
    if op in _SCALES:
        x, x_scale, *others = given
        for rows in (1, 3):
            yield [x[:rows], x_scale[:rows] if x_scale.dim() > 1 else x_scale, *others]


def store_of_keys_and_values() -> Store:
    """Return Triton's function. It is imported only if there is a device for it."""
    from ..triton.attention import store_keys_and_values

    return store_keys_and_values


def _distance(library: libraries.Library, op: str, given: Sequence[Any]) -> float:
    """Return the relative distance of a library's result from the definition's.

    On a GPU, the call is also replayed from a graph, because every call of a model may be captured.
    """
    expected = getattr(reference, op)(*given).double()
    call = partial(getattr(library, op), *given)
    results = [call()]
    if expected.is_cuda:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            recorded = call()
        recorded.zero_()
        graph.replay()
        results.append(recorded)
    norm = expected.norm()
    return max(float((result.double() - expected).norm() / norm) for result in results)


def main(argv: Sequence[str]) -> int:
    return serve(Connection(int(argv[0])), torch.device(argv[1]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
