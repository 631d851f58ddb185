"""What the compile cache holds of a forward, its plan and its pieces, to be loaded: a process that
serves has no more.
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

from .. import __version__
from ..kernels.platform import Platform
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
    """How pieces came to be, by piece number.

    `compile_seconds`: those that were compiled; `loaded`: those that the cache had, and the seconds
    that they once took; `failed`: those that cannot be compiled and run as traced, and why;
    `num_bytes`: of compiled code.
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
        """Of two forwards, the numbers of `other` behind the first one's `pieces`."""

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
    """A forward in pieces, and how it came to be."""

    forward: PiecewiseForward | ForwardByLength
    report: PiecesReport


class SingleForward(NamedTuple):
    """One that knows no other lengths."""

    forward: PiecewiseForward
    report: PiecesReport


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceStore:
    """The part of the cache that is for this machine, this compiler and these settings.

    `passes`: what a traced forward goes through before it is cut; `ranks`: over which the model is
    split; `long`: whether it is about long steps alone, where they have a forward of their own.
    """

    platform: Platform
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
        """The same for long steps; None where their forward is that of all others."""
        store = replace(self, long=True)
        return store if store.pass_manager().unit > 1 else None

    def joined(self, short: SingleForward, long: SingleForward) -> PreparedForward:
        """Both as one; `short` where no row of the model could be split."""
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
        """`module`'s forward in pieces, a portion of the work for each turn of the generator, whose
        return value it is.

        `model_key`: text in which two models differ if their forwards do. `retry`: a piece that the
        machine failed to make (out of memory, disk full) counts as lacking, so that it is tried
        again. Raises `NotStoredError`.
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
            raise NotStoredError("the compile cache lacks the model's cut forward")
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
        """The plan that is stored for a model with these tensors."""
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
        """A stored piece; one that cannot be compiled as it was traced. None if there is none that
        can be loaded.
        """
        entry, toolchain = self.cache.find(key), self.compiler.toolchain()
        if entry is None or (retry and entry.about.get("transient")):
            return None
        # No part of the key: a machine without a C++ compiler takes what another's has made.
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
        """What everything in the cache depends on."""
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
    """Bytes of a model's weights, one that layers share counted once; of a model without
    numbers those that it stands for.
    """
    return sum(tensor.nbytes for tensor in [*module.parameters(), *module.buffers()])


@cache
def source_hash(*floors: str) -> str:
    """Of the code of these floors: how a forward looks, and what becomes of it on its way through
    passes and compilers.
    """
    root = Path(__file__).parents[1]
    files = sorted(path for floor in floors for path in (root / floor).rglob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()
