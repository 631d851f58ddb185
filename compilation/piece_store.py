"""Loads the plan and the pieces of a forward from the compile cache.

Serving processes only load.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar

import torch
from torch import nn

from ..kernels.platform.compilation import Compilation
from ..version import __version__
from .by_length import ForwardByLength
from .cache import CompileCache, entry_key
from .compiler import CompiledPiece, EagerCompiler, PieceLoader
from .core.errors import NotStoredError
from .core.split_ops import registered
from .pass_manager import PassManager
from .passes.config import DEFAULT_PASSES, PassConfig
from .piecewise import PiecewiseForward
from .plan import DistinctPiece, Plan

T = TypeVar("T")


@dataclass(slots=True)
class PiecesReport:
    """How pieces were made, by piece number.

    Attributes:
        compile_seconds: Time of the pieces that were compiled now.
        loaded: Time that the pieces from the cache took to compile.
        failed: Why a piece cannot be compiled and runs as traced.
        num_bytes: Bytes of compiled code.
    """

    trace_seconds: float = 0.0
    load_seconds: float = 0.0
    compile_seconds: dict[int, float] = field(default_factory=dict)
    loaded: dict[int, float] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    num_bytes: dict[int, int] = field(default_factory=dict)

    @property
    def traced(self) -> bool:
        return self.trace_seconds > 0.0

    def followed_by(self, other: PiecesReport, pieces: int) -> PiecesReport:
        """Join the reports of two forwards.

        The pieces of `other` follow the `pieces` of the first.
        """

        def both(mine: dict[int, T], others: dict[int, T]) -> dict[int, T]:
            return mine | {pieces + number: value for number, value in others.items()}

        return PiecesReport(
            self.trace_seconds + other.trace_seconds,
            self.load_seconds + other.load_seconds,
            both(self.compile_seconds, other.compile_seconds),
            both(self.loaded, other.loaded),
            both(self.failed, other.failed),
            both(self.num_bytes, other.num_bytes),
        )


class PreparedForward(NamedTuple):
    """A forward in pieces, and how its pieces were made."""

    forward: PiecewiseForward | ForwardByLength
    report: PiecesReport


class SingleForward(NamedTuple):
    """A prepared forward for either short or long steps."""

    forward: PiecewiseForward
    report: PiecesReport


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceStore:
    """The entries of the cache for this machine, this compiler and these settings.

    Attributes:
        passes: The passes on the traced forward.
        ranks: Number of ranks over which the model is split.
        long: Whether the entries are those of the forward for long steps.
    """

    platform: Compilation
    compiler: PieceLoader
    cache: CompileCache
    max_tokens: int
    passes: PassConfig = DEFAULT_PASSES
    ranks: int = 1
    long: bool = False

    def pass_manager(self) -> PassManager:
        return PassManager(
            self.passes,
            self.platform,
            fuses=self.compiler.fuses,
            ranks=self.ranks,
            long=self.long,
        )

    def of_long_steps(self) -> Self | None:
        """Return the store for long steps, or None if all steps have the same forward."""
        store = replace(self, long=True)
        return store if store.pass_manager().unit > 1 else None

    def joined(self, short: SingleForward, long: SingleForward) -> PreparedForward:
        """Join both forwards. Return `short` alone if no rows of the model could be split."""
        if not long.forward.plan.passes["sequence_parallel"]:
            return PreparedForward(*short)
        tokens = self.passes.sequence_parallel_tokens or self.platform.sequence_parallel_tokens
        return PreparedForward(
            ForwardByLength(short.forward, long.forward, tokens),
            short.report.followed_by(long.report, len(short.forward.plan.pieces)),
        )

    def load(
        self, module: nn.Module, model_key: str, *, retry: bool = True
    ) -> Generator[bool, None, PreparedForward]:
        """Load the forward of `module` in pieces. Yield after each portion of the work.

        `model_key` is a text that differs between models whose forwards differ. With `retry`, a
        piece that failed because of the machine (out of memory, disk full) counts as missing, so
        that it is compiled again. Raise `NotStoredError` if the cache lacks a part.
        """
        short = yield from self._load_one(module, model_key, retry)
        if (store := self.of_long_steps()) is None:
            return PreparedForward(*short)
        return self.joined(short, (yield from store._load_one(module, model_key, retry)))

    def _load_one(
        self, module: nn.Module, model_key: str, retry: bool
    ) -> Generator[bool, None, SingleForward]:
        began, report = time.perf_counter(), PiecesReport()
        tensors = named_tensors(module)
        plan = self.stored_plan(model_key, tensors)
        if plan is None:
            raise NotStoredError("the compile cache lacks the model's split forward")
        pieces = []
        for number, piece in enumerate(plan.pieces):
            loaded = self.load_piece(number, self.piece_key(piece), report, retry=retry)
            if loaded is None:
                raise NotStoredError(
                    f"the compile cache lacks piece {number} of {len(plan.pieces)}"
                )
            pieces.append(loaded)
            yield True
        forward = PiecewiseForward(plan, pieces, tensors, self.platform.pack_linear_weight)
        report.load_seconds = time.perf_counter() - began
        return SingleForward(forward, report)

    def stored_plan(self, model_key: str, tensors: Mapping[str, torch.Tensor]) -> Plan | None:
        """Return the stored plan of a model with these tensors, or None."""
        path = self.cache.get(self.plan_key(model_key))
        if path is None:
            return None
        try:
            plan = Plan.from_json(json.loads(path.read_text()))
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return plan if plan.fits(tensors) else None

    def load_piece(
        self, number: int, key: str, report: PiecesReport, *, retry: bool = True
    ) -> CompiledPiece | None:
        """Load a stored piece. A piece that cannot be compiled is loaded as traced.

        Return None if there is none, or if it cannot be loaded.
        """
        entry, toolchain = self.cache.find(key), self.compiler.toolchain()
        if entry is None or (retry and entry.about.get("transient")):
            return None
        # Not a part of the key: a machine without a C++ compiler may load pieces of another one.
        if toolchain is not None and entry.about.get("toolchain") != toolchain:
            return None
        failed = entry.about.get("failed")
        try:
            loader = self.compiler if failed is None else EagerCompiler()
            piece = CompiledPiece(
                loader.load(self.cache.folder / entry.content), tuple(entry.about["packed"])
            )
        except Exception:
            return None
        if failed is None:
            report.loaded[number] = float(entry.about.get("seconds", 0.0))
            report.num_bytes[number] = entry.num_bytes
        else:
            report.failed[number] = str(failed)
        return piece

    def versions(self) -> dict[str, Any]:
        """Return the versions on which every entry depends."""
        return {
            "piecework": __version__,
            "source": source_hash("compilation", "kernels"),
            "torch": torch.__version__,
            "passes": self.pass_manager().key,
            "dtype": str(torch.get_default_dtype()),
        }

    def plan_key(self, model_key: str) -> str:
        made_by = {
            "models": source_hash("runtime"),
            "split_ops": registered(),
            "max_tokens": self.max_tokens,
        }
        return entry_key(
            self.versions() | made_by | {"model": model_key, "device": self.platform.device_type}
        )

    def piece_key(self, piece: DistinctPiece) -> str:
        compiler = {"name": self.compiler.name, "options": self.compiler.options()}
        return entry_key(
            self.versions()
            | {"piece": piece.key, "compiler": compiler, "machine": self.platform.identity()}
        )


def named_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """A model's parameters and buffers by name; a shared one under each of its names."""
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }


def weight_bytes(module: nn.Module) -> int:
    """Return the bytes of a model's weights. Shared weights count once.

    Tensors on the meta device count as if they were allocated.
    """
    return sum(tensor.nbytes for tensor in [*module.parameters(), *module.buffers()])


@cache
def source_hash(*floors: str) -> str:
    """Return a hash of the Python files in these folders of the package."""
    root = Path(__file__).parents[1]
    files = sorted(path for floor in floors for path in (root / floor).rglob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()
