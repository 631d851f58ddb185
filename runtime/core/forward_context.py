"""The context of a forward: the plan of the step, the KV cache and the recurrent states.

Only ops that depend on the requests read it: attention, layers with a recurrent state, and images.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from ...kernels.attention import AttentionBackend, AttentionMetadata, KVLayout
from ...kernels.state import StateMetadata
from .step_images import StepImages


class KVTensors(Protocol):
    """The keys and values of every layer, as `cache.pool.KVPool` holds them."""

    page_size: int
    layouts: list[KVLayout]
    k: list[torch.Tensor]
    v: list[torch.Tensor]
    index: dict[int, torch.Tensor]  # By layer: the keys of an index.
    second: list[bool]  # By layer: whether the layer reads the second of a step's page tables.


class StateTensors(Protocol):
    """The recurrent states of every layer, as `cache.states.StatePool` holds them."""

    tensors: list[list[torch.Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardContext:
    """One step.

    Attributes:
        plan: The plan that `backend` made for the step.
        window_plan: Its plan for layers with pages of windows.
        pool: The keys and values of every layer.
        states, state_metadata: The recurrent states, and the slots that the step continues.
        metadata: None in graphs, because their tensors change in place.
        memo: Plans that one layer makes and later layers reuse.
        images: The rows of images, or None if the step has none.
    """

    backend: AttentionBackend
    plan: Any
    pool: KVTensors
    states: StateTensors | None = None
    state_metadata: StateMetadata | None = None
    metadata: AttentionMetadata | None = None
    memo: dict[str, Any] = field(default_factory=dict)
    window_plan: Any = None
    images: StepImages | None = None

    def plan_of(self, layer: int) -> Any:
        """Return the backend's plan for a layer."""
        return self.window_plan if self.pool.second[layer] else self.plan


class _Current(threading.local):
    """The context of each thread. An engine runs in one thread, a process may hold several."""

    context: ForwardContext | None = None


_current = _Current()


@contextmanager
def forward_context(context: ForwardContext) -> Iterator[None]:
    """Set the context that attention reads inside the block."""
    previous, _current.context = _current.context, context
    try:
        yield
    finally:
        _current.context = previous


_on_layer: Callable[[], None] | None = None


def call_on_each_layer(callback: Callable[[], None]) -> None:
    """Set a function that is called whenever attention runs on the host: the step is alive."""
    global _on_layer
    _on_layer = callback


def layer_begins() -> None:
    if _on_layer is not None:
        _on_layer()


def current_context() -> ForwardContext:
    context = _current.context
    assert context is not None, "attention ran outside a forward_context"
    return context


def current_states(layer: int) -> tuple[list[torch.Tensor], StateMetadata]:
    """Return the tensors [slots, *shape] of a recurrent layer, and the slots of the step."""
    context = current_context()
    assert context.states is not None and context.state_metadata is not None
    return context.states.tensors[layer], context.state_metadata


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedAttention:
    """A model's attention, KV cache and recurrent states. Makes the context of each step."""

    backend: AttentionBackend
    pool: KVTensors
    states: StateTensors | None = None

    def step(
        self, metadata: AttentionMetadata, images: StepImages | None = None
    ) -> AbstractContextManager[None]:
        """Return the context of the step that `metadata` and `images` describe."""
        slots, page_size = metadata.state_slots, self.pool.page_size
        return self.planned(
            self.backend.plan(metadata, page_size),
            None if slots is None else StateMetadata(query_lens=metadata.query_lens, slots=slots),
            metadata,
            self.backend.plan(metadata.window, page_size)
            if metadata.window is not None and any(self.pool.second)
            else None,
            images,
        )

    def planned(
        self,
        plan: Any,
        state_metadata: StateMetadata | None = None,
        metadata: AttentionMetadata | None = None,
        window_plan: Any = None,
        images: StepImages | None = None,
    ) -> AbstractContextManager[None]:
        """Return the context of a step that the backend has already planned."""
        return forward_context(
            ForwardContext(
                backend=self.backend,
                plan=plan,
                pool=self.pool,
                states=self.states,
                state_metadata=state_metadata,
                metadata=metadata,
                window_plan=window_plan,
                images=images,
            )
        )
