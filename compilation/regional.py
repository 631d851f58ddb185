"""`torch.compile` for models that are not ours: whole, or only their repeated blocks, each class of
blocks once for all its copies.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from types import MethodType
from typing import Any, NamedTuple

import torch

from ..kernels.platform import Platform
from .cache import inductor_folder
from .torch_private import (
    CompileLog,
    compile_function,
    is_compile_error,
    keep_inductor_s_code,
    sum_up,
)

logger = logging.getLogger(__name__)
_KEPT = "_piecework_plain_copy"


class _PlainCopy(NamedTuple):
    """A copy of a tensor, and how often both had changed when it was made."""

    copy: torch.Tensor
    version: int
    copy_version: int


class CompiledModels:
    """Models whose forward, or the forward of whose repeated blocks, is compiled when it is first
    called.

    A class is compiled once: all its modules, of all models, call one compiled function. `regional`
    False: the models themselves are the modules. `log`: what the compiler has done. Raises
    `ValueError` where a model has no repeated blocks, or the device no compiler.
    """

    def __init__(
        self, models: Mapping[str, torch.nn.Module], platform: Platform, *, regional: bool
    ) -> None:
        _keep_on_disk()
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
        for module in self._modules:
            # Whoever wraps `forward` from now on, this is what it calls.
            module.forward = MethodType(_looked_up(self._functions), module)

    @property
    def regions(self) -> dict[str, int]:
        """Compiled classes, and how many modules of each call the one compiled function."""
        return dict(Counter(type(module).__name__ for module in self._modules))

    @property
    def recompiles(self) -> int:
        """Graphs that were made after `settle`: 0 unless shapes change."""
        return 0 if self._settled is None else self.log.graphs - self._settled

    def settle(self, *, anew: bool = False) -> None:
        """All that the coming calls need has been compiled; what is compiled from now on counts as
        recompiled.

        Only the first time says so, unless `anew`.
        """
        if self._settled is None or anew:
            self._settled = self.log.graphs

    def give_up(self, error: BaseException) -> bool:
        """Whether `error` is the compiler's; then the modules run eagerly from now on."""
        if not is_compile_error(error) or not self._modules:
            return False
        logger.warning("torch.compile failed, so the model runs eagerly: %s", sum_up(error))
        self._functions.update({kind: kind.forward for kind in self._functions})
        self._modules = []
        return True

    def summary(self) -> str:
        """One line for people."""
        regions = (
            ", ".join(f"{count} x {name}" for name, count in self.regions.items()) or "nothing"
        )
        log = self.log
        return (
            f"{regions}: {log.graphs} graphs in {log.seconds:.1f} s ({log.built} built, the others "
            f"found on disk), {len(log.breaks)} graph breaks, {self.recompiles} recompiles"
        )

    def report(self) -> dict[str, Any]:
        """The same for programs."""
        return {
            "regions": self.regions,
            "seconds": self.log.seconds,
            "graphs": self.log.graphs,
            "graphs_built": self.log.built,
            "graph_breaks": [found._asdict() for found in self.log.breaks],
            "recompiles": self.recompiles,
        }


def _repeated_blocks(name: str, model: torch.nn.Module) -> list[torch.nn.Module]:
    """The blocks that the class names as its repeated ones, or else the entries of its lists of
    equal modules.
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
    """Wanted modules that lie in no other wanted one: what is inside is compiled with it."""
    for child in module.children():
        if wanted(child):
            yield child
        else:
            yield from _outermost(child, wanted)


def _looked_up(functions: Mapping[Any, Callable[..., Any]]) -> Callable[..., Any]:
    """The function of a module's class, at each call."""

    def call(self: torch.nn.Module, *arguments: Any, **named: Any) -> Any:
        return functions[type(self)](self, *arguments, **named)

    return call


def _with_plain_inputs(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, whose guards see no difference between a view and a tensor of its own, as blocks
    get them by turns.
    """

    def call(self: torch.nn.Module, *arguments: Any, **named: Any) -> Any:
        return function(self, *_plain(arguments), **_plain(named))

    return call


def _plain(value: Any) -> Any:
    match value:
        case torch.Tensor():
            # It owns its memory and lies in it densely, dimensions of one element included.
            plain = value._base is None and _are_dense(value.shape, value.stride())
            return value if plain else _plain_copy(value)
        case tuple() | list():
            return type(value)(map(_plain, value))
        case dict():
            return {name: _plain(part) for name, part in value.items()}
    return value


def _plain_copy(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in memory of its own, copied once as long as neither changes: every block of a
    step is given the same prompt.
    """
    if tensor.is_inference():
        # Such tensors do not count their changes.
        return tensor.clone(memory_format=torch.contiguous_format)
    kept: _PlainCopy | None = getattr(tensor, _KEPT, None)
    if kept is None or (kept.version, kept.copy_version) != (tensor._version, kept.copy._version):
        copy = tensor.clone(memory_format=torch.contiguous_format)
        kept = _PlainCopy(copy, tensor._version, copy._version)
        setattr(tensor, _KEPT, kept)
    return kept.copy


@lru_cache(256)
def _are_dense(shape: torch.Size, strides: tuple[int, ...]) -> bool:
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if stride != expected:
            return False
        expected *= max(size, 1)
    return True


def _keep_on_disk() -> None:
    """Inductor's own cache lies beside that of our pieces, unless the user has put it elsewhere."""
    folder = inductor_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        logger.warning(
            "compiled code is not kept: %s cannot be written (%s); set PIECEWORK_CACHE_DIR",
            folder,
            error.strerror,
        )
        return
    keep_inductor_s_code(folder)
