"""Applies `torch.compile` to models of other libraries, as a whole or to their repeated blocks.

A class of blocks is compiled once for all its instances.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from types import MethodType
from typing import Any, NamedTuple

import torch

from ..kernels.platform.compilation import Compilation
from .cache import inductor_folder
from .torch_private import (
    CompileLog,
    compile_function,
    is_compile_error,
    keep_inductor_s_code,
    sum_up,
)

logger = logging.getLogger(__name__)
_COPY_ATTRIBUTE = "_piecework_plain_copy"


class _PlainCopy(NamedTuple):
    """A copy of a tensor, with the versions (counts of changes) of both when it was made."""

    copy: torch.Tensor
    version: int
    copy_version: int


class CompiledModels:
    """Compiles the forward of models, or of their repeated blocks, at its first call.

    A class is compiled once: all its modules, of all models, call one compiled function. If
        `regional` is False, the models themselves are the modules. `log` records the work of the
        compiler. Raise `ValueError` if a model has no repeated blocks, or if the device has no
        compiler.
    """

    def __init__(
        self, models: Mapping[str, torch.nn.Module], platform: Compilation, *, regional: bool
    ) -> None:
        # Put Inductor's cache beside that of pieces, unless the user has chosen another folder.
        folder = inductor_folder()
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            logger.warning(
                "compiled code is not stored: %s cannot be written (%s); set PIECEWORK_CACHE_DIR",
                folder,
                error.strerror,
            )
        else:
            keep_inductor_s_code(folder)
        options = platform.compile_options()
        self.log = CompileLog()
        self._modules = [
            module
            for name, model in models.items()
            for module in (_repeated_blocks(name, model) if regional else [model])
        ]
        self._settled: int | None = None
        kinds: set[Any] = set(map(type, self._modules))
        self._functions = {
            kind: _with_plain_inputs(compile_function(kind.forward, options, self.log))
            for kind in kinds
        }
        functions = self._functions

        def forward(module: torch.nn.Module, *arguments: Any, **named: Any) -> Any:
            return functions[type(module)](module, *arguments, **named)

        for module in self._modules:
            # Code that wraps `forward` later calls this function, which looks up the function of
            # the module's class at each call.
            module.forward = MethodType(forward, module)

    @property
    def regions(self) -> dict[str, int]:
        """The compiled classes, and the number of modules of each."""
        return dict(Counter(type(module).__name__ for module in self._modules))

    @property
    def recompiles(self) -> int:
        """Number of graphs made after `settle`. It is 0 unless shapes change."""
        return 0 if self._settled is None else self.log.graphs - self._settled

    def settle(self, *, anew: bool = False) -> None:
        """Count the graphs that are made from now on as recompiled.

        Only the first call has an effect, unless `anew` is set.
        """
        if self._settled is None or anew:
            self._settled = self.log.graphs

    def give_up(self, error: BaseException) -> bool:
        """If `error` is the compiler's, run the modules eagerly from now on and return True."""
        if not is_compile_error(error) or not self._modules:
            return False
        logger.warning("torch.compile failed, so the model runs eagerly: %s", sum_up(error))
        self._functions.update({kind: kind.forward for kind in self._functions})
        self._modules = []
        return True

    def summary(self) -> str:
        """Return one line for people."""
        regions = (
            ", ".join(f"{count} x {name}" for name, count in self.regions.items()) or "nothing"
        )
        log = self.log
        return (
            f"{regions}: {log.graphs} graphs in {log.seconds:.1f} s ({log.built} built, the others "
            f"found on disk), {len(log.breaks)} graph breaks, {self.recompiles} recompiles"
        )

    def report(self) -> dict[str, Any]:
        """Return the summary for programs."""
        return {
            "regions": self.regions,
            "seconds": self.log.seconds,
            "graphs": self.log.graphs,
            "graphs_built": self.log.built,
            "graph_breaks": [found._asdict() for found in self.log.breaks],
            "recompiles": self.recompiles,
        }


def _repeated_blocks(name: str, model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the blocks that the class names as its repeated ones.

    If it names none, return the entries of its lists of modules of one class.
    """
    named = getattr(model, "_repeated_blocks", None)
    if named:
        blocks = list(_outermost(model, lambda module: type(module).__name__ in named))
    else:
        lists = _outermost(
            model,
            lambda found: (
                isinstance(found, torch.nn.ModuleList)
                and len(found) > 1
                and len(set(map(type, found))) == 1
            ),
        )
        blocks = [block for entries in lists for block in entries.children()]
        kinds = ", ".join(sorted({type(block).__name__ for block in blocks}))
        logger.info(
            "%s (%s) names no repeated blocks; its lists of equal modules: %s",
            name,
            type(model).__name__,
            kinds or "none",
        )
    if not blocks:
        raise ValueError(
            f"{name} ({type(model).__name__}) has no repeated blocks; leave --regional-compile out "
            "to compile it whole"
        )
    return blocks


def _outermost(
    module: torch.nn.Module, wanted: Callable[[torch.nn.Module], bool]
) -> Iterator[torch.nn.Module]:
    """Yield wanted modules that are not inside another wanted one, which is compiled as a whole."""
    for child in module.children():
        if wanted(child):
            yield child
        else:
            yield from _outermost(child, wanted)


def _with_plain_inputs(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` with views replaced by tensors with their own memory.

    Otherwise the guards of the compiled function fail, because some blocks get views and some do
    not.
    """

    def call(self: torch.nn.Module, *arguments: Any, **named: Any) -> Any:
        return function(self, *_plain(arguments), **_plain(named))

    return call


def _plain(value: Any) -> Any:
    match value:
        case torch.Tensor():
            # It owns its memory and is contiguous, also in dimensions of one element.
            plain = value._base is None and _are_dense(value.shape, value.stride())
            return value if plain else _plain_copy(value)
        case tuple() | list():
            return type(value)(map(_plain, value))
        case dict():
            return {name: _plain(part) for name, part in value.items()}
    return value


def _plain_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of the tensor with its own memory.

    The copy is reused while neither tensor changes, because every block of a step gets the same
    prompt.
    """
    if tensor.is_inference():
        # Inference tensors do not count their changes.
        return tensor.clone(memory_format=torch.contiguous_format)
    kept: _PlainCopy | None = getattr(tensor, _COPY_ATTRIBUTE, None)
    if kept is None or (kept.version, kept.copy_version) != (tensor._version, kept.copy._version):
        copy = tensor.clone(memory_format=torch.contiguous_format)
        kept = _PlainCopy(copy, tensor._version, copy._version)
        setattr(tensor, _COPY_ATTRIBUTE, kept)
    return kept.copy


@lru_cache(256)
def _are_dense(shape: torch.Size, strides: tuple[int, ...]) -> bool:
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if stride != expected:
            return False
        expected *= max(size, 1)
    return True
