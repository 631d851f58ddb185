"""Stops an engine for a while, and changes its weights, between two steps."""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain

import torch

from ..core.control_messages import (
    Control,
    Controlled,
    Pause,
    ReadWeights,
    Resume,
    Sleep,
    UpdateWeights,
    WakeUp,
)
from ..executor.model_runner import ModelRunner
from ..executor.weights import StoredWeights, load_like, replace_weights, weights_of
from ..files.resolve import resolve_model_path
from ..process.memory import resident_memory
from ..tiers.block_keys import BlockKeys
from ..tiers.build import block_keys
from ..tiers.tiers import Tiers
from .core import EngineCore

logger = logging.getLogger(__name__)

_Weights = Mapping[str, torch.Tensor]


class EngineControl:
    """Messages of `core.control_messages`, done one after another.

    `renew_graphs` is called after new weights were copied. `end_loads` is called before the cache
    is flushed: what is being restored must not stay in it.

    Attributes:
        stopped: Whether no step may run.
    """

    def __init__(
        self,
        core: EngineCore,
        runner: ModelRunner,
        tiers: Tiers | None,
        renew_graphs: Callable[[], None],
        end_loads: Callable[[], None],
    ) -> None:
        self._core, self._runner, self._tiers = core, runner, tiers
        self._renew_graphs, self._end_loads = renew_graphs, end_loads
        self._queue: deque[Control] = deque()
        self._is_paused = False
        self._sleep: Sleep | None = None
        self._stored: StoredWeights | None = None
        self._path = runner.config.model_path
        self._loading: Future[tuple[_Weights, BlockKeys | None]] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weights")

    @property
    def stopped(self) -> bool:
        return self._is_paused or self._sleep is not None

    @property
    def pending(self) -> bool:
        """Whether a message is not done yet."""
        return bool(self._queue)

    def take(self, message: Control) -> None:
        self._queue.append(message)

    def advance(self) -> Iterator[Controlled]:
        """Do what can be done now. Yield the answers."""
        while self._queue:
            began = time.monotonic()
            try:
                answer = self._do(self._queue[0], began)
            except (ValueError, OSError, MemoryError) as error:
                answer = Controlled(error=str(error) or type(error).__name__)
            if answer is None:
                return
            self._queue.popleft()
            yield answer

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _do(self, message: Control, began: float) -> Controlled | None:
        """Do a message. Return None if it must wait. Raise `ValueError` or `OSError`."""
        if self._runner.ranks.size > 1:
            raise ValueError("this needs an engine of one rank; it has --tp-size ranks")
        match message:
            case ReadWeights():
                return Controlled(numbers=self._read(message))
            case UpdateWeights():
                return self._update(message)
            case Pause(retract=retract):
                if retract:
                    self._core.suspend()
                self._is_paused = True
            case Resume():
                self._is_paused = False
            case Sleep():
                return self._fall_asleep(message, began)
            case WakeUp():
                self._wake()
        return Controlled(seconds=time.monotonic() - began)

    def _fall_asleep(self, message: Sleep, began: float) -> Controlled:
        if self._sleep is not None:
            raise ValueError("the engine sleeps already")
        runner = self._runner
        if not runner.platform.keeps_addresses:
            raise ValueError(f"an engine on {runner.platform.device_type} cannot sleep")
        if message.level == 1:
            self._stored = StoredWeights(runner)
        self._core.suspend()
        if self._tiers is not None:
            self._tiers.save_all()
        self._end_loads()
        self._core.flush_cache()
        if runner.images is not None:
            runner.images.clear()
        states = [] if runner.states is None else chain(*runner.states.tensors)
        pool = runner.pool
        cache = [*pool.k, *pool.v, *pool.index.values(), *states]
        held = resident_memory([os.getpid()])
        runner.platform.discard([*cache, *weights_of(runner).values()])
        runner.give_back_memory()
        freed = max(0, held - resident_memory([os.getpid()]))
        self._sleep = message
        return Controlled(seconds=time.monotonic() - began, freed_bytes=freed)

    def _wake(self) -> None:
        """Read the weights again. The engine sleeps on if that fails."""
        if self._sleep is None:
            raise ValueError("the engine does not sleep")
        stored, self._stored = self._stored, None
        try:
            if stored is not None:
                stored.restore(self._runner)
        except OSError as error:
            logger.warning("the stored weights cannot be read (%s): the model's are", error)
            stored = None
        if stored is None:
            # The files may have changed, so they are treated like those of other weights.
            self._replace(*self._load(self._path))
        self._sleep = None

    def _update(self, message: UpdateWeights) -> Controlled | None:
        """Load weights in a thread while steps run. Then replace the old ones between two steps."""
        if self._sleep is not None:
            raise ValueError("the engine sleeps: wake it before its weights are replaced")
        if self._loading is None:
            need = sum(tensor.nbytes for tensor in weights_of(self._runner).values())
            if need > (free := self._runner.platform.memory().free):
                raise ValueError(
                    f"the new weights need {need / 2**30:.1f} GiB until they have replaced the old "
                    f"ones, but {free / 2**30:.1f} GiB are free"
                )
            self._loading = self._thread.submit(self._load, message.model_path)
        if not self._loading.done():
            return None
        if (error := self._loading.exception()) is not None:
            self._loading = None
            raise error
        if message.at_once or self._is_paused:  # No step of a paused engine would end a request.
            self._core.suspend()
        elif not self._core.hold():
            return None  # Running requests finish on the old weights, and no other one begins.
        began = time.monotonic()
        self._replace(*self._loading.result())
        self._loading, self._path = None, message.model_path
        self._core.release()
        logger.info("the weights of %s replaced the old ones", message.model_path)
        return Controlled(seconds=time.monotonic() - began)

    def _replace(self, weights: _Weights, keys: BlockKeys | None) -> None:
        """Take over what `_load` returned. No request may run."""
        replace_weights(self._runner, weights)
        self._end_loads()
        self._core.flush_cache()
        if keys is not None and self._tiers is not None:
            self._tiers.rename(keys)
        self._renew_graphs()
        self._runner.platform.give_back_memory()

    def _load(self, path: str) -> tuple[_Weights, BlockKeys | None]:
        """Load weights, and name the blocks that they compute. Raise `ValueError` or `OSError`."""
        try:
            weights, keys = load_like(self._runner, path), None
            if self._tiers is not None:
                keys = block_keys(self._runner.config, self._runner, resolve_model_path(path))
        except (ValueError, OSError, MemoryError):
            raise
        except Exception as error:
            logger.exception("the weights of %s cannot be loaded", path)
            reason = f"{path} cannot be loaded ({type(error).__name__}: {error!s:.200})"
            raise ValueError(reason) from error
        return weights, keys

    def _read(self, message: ReadWeights) -> list[float]:
        tensor = weights_of(self._runner).get(message.name)
        if tensor is None:
            some = ", ".join(sorted(weights_of(self._runner))[:3])
            raise ValueError(f"there is no parameter {message.name!r:.200}; there are {some}, ...")
        if self._sleep is not None:
            raise ValueError("the engine sleeps: wake it before its weights are read")
        if not tensor.is_floating_point():
            raise ValueError(f"{message.name} is packed as {tensor.dtype}, so it has no numbers")
        numbers: list[float] = tensor.detach().flatten()[: message.count].float().tolist()
        return numbers
