"""Logits processors of the user, with the interface of vLLM's v1 engine.

    plug_ins = load_plug_ins(["my_package.processors:Ban"], shape, device)
    plug_ins.validate(params)      # raises ValueError for a request that a class refuses
    processor = plug_ins.of(prompt, params)

A class has `__init__(vllm_config, device, is_pin_memory)`, `apply(logits) -> logits`,
`is_argmax_invariant()`, `update_state(batch_update)` and, if it likes, the class method
`validate_params(params)`. `batch_update` is None if the batch is the same, and otherwise has
`batch_size`, `removed` (indices), `added` (index, params, prompt tokens, output tokens) and `moved`
(from, to, direction). The list of output tokens grows while the request runs. Arguments of a
request are in `params.extra_args`.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch

from ...kernels.staging import to_device
from ..core.logits_processor import GrammarState, Rows
from ..core.sampling_params import SamplingParams

logger = logging.getLogger(__name__)


class BatchUpdate(NamedTuple):
    """How the rows of the logits have changed since the last step."""

    batch_size: int
    removed: Sequence[int]
    added: Sequence[tuple[int, SamplingParams, list[int] | None, list[int]]]
    moved: Sequence[tuple[int, int, Any]]


class Shape(NamedTuple):
    """What `vllm_config` tells."""

    model: str
    vocab_size: int
    max_model_len: int
    max_num_seqs: int


class PlugInFault(ValueError):
    """A class that cannot be loaded."""


class PlugIn:
    """The processor of one request. All requests share the instances of the classes."""

    needs_last_token: ClassVar[bool] = True

    def __init__(
        self, plug_ins: PlugIns, prompt: npt.NDArray[np.int64], params: SamplingParams
    ) -> None:
        self.plug_ins, self.params, self._prompt = plug_ins, params, prompt
        self.output: list[int] = []

    @classmethod
    def wanted(
        cls,
        params: SamplingParams,
        prompt: npt.NDArray[np.int64],
        stop_ids: frozenset[int],
        matcher: GrammarState | None = None,
    ) -> Self | None:
        return None  # `PlugIns.of` makes them.

    @classmethod
    def apply(cls, logits: torch.Tensor, rows: Rows[Self], sampled: torch.Tensor | None) -> None:
        rows[0][1].plug_ins.apply(logits, rows)

    def entry(self, index: int) -> tuple[int, SamplingParams, list[int], list[int]]:
        """Return the request as `BatchUpdate.added` has it."""
        return index, self.params, self._prompt.tolist(), self.output


class PlugIns:
    """The instances of the user's classes, and the batch that they know."""

    def __init__(self, classes: Sequence[type[Any]], shape: Shape, device: torch.device) -> None:
        self._classes, self._device = classes, device
        self._config = SimpleNamespace(
            model_config=SimpleNamespace(
                model=shape.model,
                max_model_len=shape.max_model_len,
                get_vocab_size=lambda: shape.vocab_size,
                hf_config=SimpleNamespace(vocab_size=shape.vocab_size),
            ),
            scheduler_config=SimpleNamespace(max_num_seqs=shape.max_num_seqs),
            speculative_config=None,
        )
        self._batch: list[PlugIn] = []
        self._instances = self._new()

    def validate(self, params: SamplingParams) -> None:
        """Raise `ValueError` if a class refuses the parameters of a request."""
        for kind in self._classes:
            check = getattr(kind, "validate_params", None)
            if check is not None:
                check(params)

    def of(self, prompt: npt.NDArray[np.int64], params: SamplingParams) -> PlugIn:
        """Return the processor of a request."""
        return PlugIn(self, prompt, params)

    def apply(self, logits: torch.Tensor, rows: Rows[PlugIn]) -> None:
        """Change these rows of the logits [N, V] float32 in place.

        If a class raises, the instances are made anew, and the error ends the step. The engine then
        runs the step's requests one at a time.
        """
        for _, own, request in rows:
            own.output.extend(request.output_tokens[len(own.output) :].tolist())
        batch = [own for _, own, _ in rows]
        try:
            self._apply(logits, [row for row, _, _ in rows], batch)
        except Exception:
            self._batch, self._instances = [], self._new()
            raise

    def _apply(self, logits: torch.Tensor, rows: list[int], batch: list[PlugIn]) -> None:
        update = self._update(batch)
        self._batch = batch
        is_greedy = all(own.params.greedy for own in batch)
        is_whole = rows == list(range(len(logits)))
        (index,) = to_device([np.array(rows)], logits.device)
        part = logits if is_whole else logits.index_select(0, index)
        changed = part
        for instance in self._instances:
            instance.update_state(update)
            if is_greedy and instance.is_argmax_invariant():
                continue
            changed = instance.apply(changed)
            if not isinstance(changed, torch.Tensor) or changed.shape != part.shape:
                raise RuntimeError(
                    f"--logits-processors: {type(instance).__name__}.apply must return logits of "
                    f"the shape {tuple(part.shape)}"
                )
        if changed is not logits:
            logits.index_copy_(0, index, changed.to(logits.dtype))

    def _update(self, batch: list[PlugIn]) -> BatchUpdate | None:
        """Return what has changed since the last batch, or None.

        A row that another request has now is added. Only rows beyond the new batch are removed,
        because adding a row replaces what it held.
        """
        before = self._batch
        added = [
            own.entry(index)
            for index, own in enumerate(batch)
            if index >= len(before) or before[index] is not own
        ]
        removed = range(len(batch), len(before))
        if not added and not removed:
            return None
        return BatchUpdate(len(batch), [*removed], added, [])

    def _new(self) -> list[Any]:
        return [kind(self._config, self._device, False) for kind in self._classes]


def load_plug_ins(names: Sequence[str], shape: Shape, device: torch.device) -> PlugIns | None:
    """Import the classes and make their instances. Raise `PlugInFault`."""
    if not names:
        return None
    classes = []
    for name in names:
        module, _, kind = name.partition(":")
        try:
            found = getattr(importlib.import_module(module), kind)
        except Exception as error:
            raise PlugInFault(
                f"--logits-processors {name} cannot be imported ({type(error).__name__}: {error}); "
                "put its folder into PYTHONPATH, or install its package"
            ) from None
        missing = [
            part
            for part in ("apply", "update_state", "is_argmax_invariant")
            if not callable(getattr(found, part, None))
        ]
        if not isinstance(found, type) or missing:
            raise PlugInFault(
                f"--logits-processors {name} is no class with {', '.join(missing) or 'methods'}; "
                "see docs/serving.md"
            )
        classes.append(found)
    try:
        plug_ins = PlugIns(classes, shape, device)
    except Exception as error:
        logger.exception("a logits processor cannot be made")
        raise PlugInFault(
            f"--logits-processors: a class cannot be made ({type(error).__name__}: {error})"
        ) from None
    logger.info("logits processors: %s", ", ".join(names))
    return plug_ins
