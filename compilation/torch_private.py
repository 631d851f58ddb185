"""All uses of private names of torch's compilers, which may differ between torch 2.11 and 2.13."""

from __future__ import annotations

import functools
import json
import logging
import os
import re
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import fx

from ..kernels.platform.compilation import CompileOptions
from ..kernels.toolchain import version_of
from .core.errors import CompileError, TraceError
from .shapes import Extent, TensorSpec, TokenShapes

# The number of tokens for which a compiler tunes its loops. The code supports any number.
_EXAMPLE_TOKENS = 64
_MOST_TOKENS = 1 << 20


class Trace(NamedTuple):
    """A forward as one graph.

    `values` are the values of the placeholders, in order: tensors, or a SymInt for a number of
    tokens.
    """

    graph: fx.Graph
    values: list[Any]
    shapes: TokenShapes

    def weights(self, inputs: Sequence[torch.Tensor]) -> list[fx.Node]:
        """Return the placeholders of tensors that are not among `inputs`."""
        return [
            node
            for node, value in zip(
                self.graph.find_nodes(op="placeholder"), self.values, strict=True
            )
            if isinstance(value, torch.Tensor) and not any(value is given for given in inputs)
        ]


class _Done(Exception):
    """Ends a trace when the graph is complete, before guards are made that are never checked."""


def trace(
    forward: Callable[..., Any], inputs: Sequence[torch.Tensor], max_tokens: int, unit: int = 1
) -> Trace:
    """Trace `forward(*inputs)` as one graph without guards.

    The first dimension of the inputs is dynamic, and weights are placeholders. Passes assume that
    this dimension is a multiple of `unit`, at least twice `unit`. Raise `TraceError` if the forward
    breaks the graph, or branches on the number of tokens up to `max_tokens`.
    """
    import torch._dynamo

    traced: list[tuple[fx.GraphModule, list[Any]]] = []

    def keep(graph_module: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        traced.append((graph_module, list(example_inputs)))
        raise _Done

    for tensor in inputs:
        torch._dynamo.mark_dynamic(tensor, 0, min=2 * unit, max=-(-max_tokens // unit) * unit)
    try:
        # Shapes of earlier traces must not turn constants of this trace into variables.
        with (
            torch.no_grad(),
            _quiet("torch._dynamo"),
            torch._dynamo.config.patch(automatic_dynamic_shapes=False),
        ):
            torch.compile(forward, backend=keep, fullgraph=True)(*inputs)
    except Exception as error:
        # Dynamo wraps the exception that `keep` raises.
        if not traced:
            raise TraceError(sum_up(error)) from error
    if not traced:
        raise TraceError("the forward computes nothing")
    graph_module, values = traced[0]
    return Trace(graph_module.graph, values, _token_shapes(graph_module, values, inputs, unit))


def _token_shapes(
    graph_module: fx.GraphModule, values: list[Any], inputs: Sequence[torch.Tensor], unit: int
) -> TokenShapes:
    """Find the symbols of the number of tokens."""
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    lengths = [
        node.meta["example_value"].shape[0]
        for node, value in zip(placeholders, values, strict=True)
        if any(value is tensor for tensor in inputs)
    ]
    if not lengths:
        raise TraceError("the forward does not use its inputs")
    symbols = [
        length.node.shape_env.replace(length.node.expr)
        for length in lengths
        if isinstance(length, torch.SymInt)
    ]
    if len(symbols) < len(lengths) or not all(symbol.is_Symbol for symbol in symbols):
        raise TraceError("the forward is fixed to one number of tokens")
    shapes = TokenShapes(lengths[0].node.shape_env, set(symbols), unit)
    shapes.check_guards()
    return shapes


def compile_package(
    module: fx.GraphModule, inputs: Sequence[TensorSpec], path: Path, options: dict[str, Any]
) -> None:
    """Compile a piece by TorchInductor ahead of time into a package (.pt2) at `path`.

    The package supports any number of tokens. Raise `CompileError` if the compilation fails.
    """
    import torch._inductor
    from torch._subclasses.fake_tensor import FakeTensorMode

    unit = max((extent.unit for spec in inputs for extent in spec.shape), default=1)
    units = torch.export.Dim("tokens", min=1, max=_MOST_TOKENS)
    with FakeTensorMode():
        examples = tuple(spec.empty(-(-_EXAMPLE_TOKENS // unit) * unit) for spec in inputs)
    try:
        with torch.no_grad(), _quiet("torch.export", "torch._inductor"):
            _lower_packed_linear(module)
            program = torch.export.export(
                module, examples, dynamic_shapes=_dynamic_shapes(inputs, units)
            )
            # A copy, because Inductor writes into the options.
            torch._inductor.aoti_compile_and_package(
                program, package_path=os.fspath(path), inductor_configs=dict(options)
            )
    except Exception as error:
        raise CompileError(sum_up(error)) from error


_SETTINGS = (
    "TORCHINDUCTOR_",
    "TORCH_COMPILE_",
    "AOT_INDUCTOR_",
    "AOTINDUCTOR_",
    "INDUCTOR_",
    "TRITON_",
)
# Variables with paths and numbers of processes, which do not change the code. Inductor sets some
# itself.
_NO_CODE = re.compile(
    r".*_(DIR|PATH|PTXAS_PATH)|TORCHINDUCTOR_(COMPILE_THREADS|WORKER_START|.*_LOG_PATH)"
)

_WRITTEN_BY_INDUCTOR = {"aot_inductor.metadata"}


def inductor_environment() -> dict[str, str]:
    """Return the environment variables with settings of Inductor and Triton.

    Asking Inductor would import it, which takes a second.
    """
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(_SETTINGS) and not _NO_CODE.fullmatch(name)
    }


def inductor_changes() -> dict[str, Any]:
    """Return the settings of Inductor that this process has changed, as JSON values."""
    config: Any = sys.modules.get("torch._inductor.config")
    if config is None:
        return {}
    settings = {
        name: value
        for name, value in config.save_config_portable().items()
        if name not in _WRITTEN_BY_INDUCTOR
    }
    changed = {
        name: value for name, value in settings.items() if value != _unchanged(config._config[name])
    }
    found: dict[str, Any] = json.loads(json.dumps(changed, sort_keys=True, default=str))
    return found


def _unchanged(entry: Any) -> Any:
    """Return a setting's value without changes of this process: from the environment or default."""
    from torch.utils._config_module import _UNSET_SENTINEL

    values = (entry.env_value_force, entry.env_value_default, entry.default)
    return next(value for value in values if value is not _UNSET_SENTINEL)


def change_inductor(changes: Mapping[str, Any]) -> None:
    """Apply the `inductor_changes` of another process."""
    if changes:
        from torch._inductor import config

        for name, value in changes.items():
            setattr(config, name, value)


def cpp_compiler() -> str | None:
    """Return the version of Inductor's C++ compiler, or None if there is none."""
    path = shutil.which(os.environ.get("CXX", "g++"))
    return None if path is None else version_of(path)


def _lower_packed_linear(module: fx.GraphModule) -> None:
    """Register a lowering of `piecework::packed_linear` (x, packed weight, bias) to oneDNN's
    kernel, if `module` calls the op.

    Inductor's own lowering of that kernel requires the weight to be a constant of the graph.
    """
    from torch._inductor import ir, lowering, mkldnn_ir

    def lower(x: Any, weight: Any, bias: Any = None) -> Any:
        return ir.TensorBox.create(mkldnn_ir.LinearUnary.create(x, weight, bias, "none", [], ""))  # type: ignore[no-untyped-call]

    for op in {node.target for node in module.graph.nodes if node.op == "call_function"}:
        if str(op) == "piecework.packed_linear.default":
            lowering.register_lowering(op, type_promotion_kind=None)(lower)


def _dynamic_shapes(inputs: Sequence[TensorSpec], units: Any) -> tuple[Any, ...]:
    """Return for each input the dimensions that depend on the number of tokens."""

    def dim(extent: Extent) -> Any:
        scaled = units if extent.per_unit == 1 else extent.per_unit * units
        return scaled + extent.fixed if extent.fixed else scaled

    return tuple(
        {axis: dim(extent) for axis, extent in enumerate(spec.shape) if extent.per_unit}
        for spec in inputs
    )


def load_package(path: Path) -> Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]:
    """Load a file of `compile_package` as a function from inputs to outputs.

    The C++ loader is used directly, because its Python wrapper imports Inductor and flattens
    arguments at each call. It has a single runner without locks, because each process calls its
    pieces from one thread. Raise `RuntimeError` if the package cannot be loaded.
    """
    loader = torch._C._aoti.AOTIModelPackageLoader(os.fspath(path), "model", True, 1, -1)
    return cast("Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]", loader.run)


def sum_up(error: BaseException) -> str:
    """Return the error in one line, with the line of the model's code if torch names it."""
    text = str(getattr(error, "inner_exception", None) or error)
    summary = next(
        (line.strip() for line in text.splitlines() if line.strip()), type(error).__name__
    )
    places = re.findall(r'File "(.+)", line (\d+)', text)
    return f"{summary} ({places[-1][0]}:{places[-1][1]})" if places else summary


@contextmanager
def _quiet(*loggers: str) -> Iterator[None]:
    """Silence torch's warnings and tracebacks. The caller reports a failure in one line."""
    levels = {name: logging.getLogger(name).level for name in loggers}
    try:
        for name in loggers:
            logging.getLogger(name).setLevel(logging.CRITICAL)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)


class GraphBreak(NamedTuple):
    """The place and the reason of a graph break."""

    reason: str
    file: str
    line: int


class CompileLog:
    """Records the work of `torch.compile` for the functions of `compile_function` that share the
    log.

    `seconds` is the time of all tracing and compiling in this process while the log exists.
    `graphs` counts the graphs.
    """

    def __init__(self) -> None:
        from torch._dynamo.callback import callback_handler

        self.seconds = 0.0
        self.graphs = 0
        self.breaks: list[GraphBreak] = []
        self._started = 0.0
        self._before = _cache_misses()
        callback_handler.register_start_callback(self._start)
        callback_handler.register_end_callback(self._end)

    @property
    def built(self) -> int:
        """Number of graphs whose code was built now, not found on disk."""
        return _cache_misses() - self._before

    def add(self, graph_module: fx.GraphModule) -> None:
        self.graphs += 1
        reason: Any = graph_module.compile_subgraph_reason
        if reason.graph_break:
            where = reason.user_stack[-1]
            self.breaks.append(
                GraphBreak(reason.reason.partition("\n")[0], where.filename, where.lineno)
            )

    def _start(self, *arguments: Any) -> None:
        self._started = time.perf_counter()

    def _end(self, *arguments: Any) -> None:
        self.seconds += time.perf_counter() - self._started


def _cache_misses() -> int:
    from torch._dynamo.utils import counters

    return sum(counters["inductor"][f"fxgraph_cache_{what}"] for what in ("miss", "bypass"))


def compile_function(
    function: Callable[..., Any], options: CompileOptions, log: CompileLog
) -> Callable[..., Any]:
    """Return `torch.compile(function)` for a device. It records each graph in `log`.

    Raise `ValueError` if the mode does not exist.
    """
    if options.backend == "inductor":
        from torch._inductor import config, list_mode_options
        from torch._inductor.compile_fx import compile_fx

        modes = list_mode_options()
        if options.mode is not None and options.mode not in modes:
            raise ValueError(
                f"PIECEWORK_TORCH_COMPILE_MODE must be one of {', '.join(modes)}, got "
                f"{options.mode}"
            )
        patches = {name: value for name, value in options.settings.items() if hasattr(config, name)}
        inner: Any = functools.partial(
            compile_fx, config_patches={**(modes[options.mode] if options.mode else {}), **patches}
        )
    else:
        inner = options.backend

    def backend(graph_module: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        log.add(graph_module)
        compiled: Callable[..., Any] = inner(graph_module, example_inputs)
        return compiled

    compiled: Callable[..., Any] = torch.compile(
        function, backend=backend, fullgraph=options.fullgraph, dynamic=options.dynamic
    )
    return compiled


def is_compile_error(error: BaseException) -> bool:
    """Whether a call of a compiled function failed in the compiler, before computing anything."""
    from torch._dynamo.exc import TorchDynamoException

    return isinstance(error, TorchDynamoException)


def keep_inductor_s_code(folder: Path) -> None:
    """Put Inductor's cache into `folder`, unless the user has chosen another one."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    # Inductor writes its default into the environment at the first use, which is not a choice of
    # the user.
    if os.environ.get("TORCHINDUCTOR_CACHE_DIR") in (None, default_cache_dir()):
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.fspath(folder)
