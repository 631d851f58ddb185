"""Memory of the device for a number of adapters, which the layers of a model read."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from ...kernels import ops
from ...kernels.lora import RANK_STEP, columns_to_panels
from ..core.step_adapters import StepAdapters
from ..layers.linear import Linear
from .adapter import Adapter, Update


class LayerSlots(nn.Module):
    """The updates of one linear layer. Shapes: see `kernels.lora.lora`."""

    a: torch.Tensor
    b: torch.Tensor
    scales: torch.Tensor
    ranks: torch.Tensor
    slots: torch.Tensor

    def __init__(
        self,
        linear: Linear,
        step: StepAdapters,
        num_slots: int,
        rank: int,
        dtype: torch.dtype,
        panel: int | None,
    ) -> None:
        super().__init__()
        self.rows = list(linear.parts.values())
        self._parts = {part: number for number, part in enumerate(linear.parts)}
        self._places = [linear.rows(part) for part in linear.parts]
        self._width = width = panel or linear.out_features
        self._step = step
        device, parts, padded = step.slots.device, len(self.rows), rank + -rank % RANK_STEP
        for name, shape, kind in (
            ("a", (num_slots, parts, linear.in_features, padded), dtype),
            ("b", (num_slots, -(-linear.out_features // width), padded, width), dtype),
            ("scales", (num_slots, parts), torch.float32),
            ("ranks", (num_slots, parts), torch.int32),
        ):
            self.register_buffer(name, torch.zeros(shape, dtype=kind, device=device))
        self.register_buffer("slots", step.slots)

    def forward(self, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return y [T, out] with the updates for x [T, in]."""
        if not self._step.is_on:
            return y
        result: torch.Tensor = ops.lora(
            y, x, self.a, self.b, self.scales, self.ranks, self.slots, self.rows
        )
        return result

    def put(self, slot: int, updates: Mapping[str, Update]) -> None:
        """Replace the updates of a slot, by part."""
        self.scales[slot], self.ranks[slot] = 0.0, 0
        all_a = torch.zeros_like(self.a[slot])
        all_b = self.b.new_zeros(1, all_a.shape[2], sum(self.rows))
        for part, (a, b, scale) in updates.items():
            number, rank = self._parts[part], len(a)
            all_a[number, :, :rank] = a.t()
            all_b[0, :rank, self._places[number]] = b
            self.scales[slot, number], self.ranks[slot, number] = scale, rank
        self.a[slot], self.b[slot] = all_a, columns_to_panels(all_b, self._width)[0]


class AdapterSlots:
    """The slots of all layers of a model.

    `step` tells the layers which slots a step uses:

        with slots.step.using(batch.adapter_slots):
            hidden = model(input_ids, positions)
    """

    def __init__(
        self,
        layers: Mapping[str, Linear],
        *,
        num_slots: int,
        rank: int,
        most_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
        panel: int | None = None,
    ) -> None:
        """`panel`: see `kernels.platform.linear_packing`."""
        self.count, self.rank = num_slots, rank
        self.step = StepAdapters(num_slots, most_tokens, device)
        self._layers = {}
        for prefix, linear in layers.items():
            own = LayerSlots(linear, self.step, num_slots, rank, dtype, panel)
            linear.adapters = self._layers[prefix] = own

    @property
    def num_bytes(self) -> int:
        return sum(
            buffer.nbytes
            for layer in self._layers.values()
            for name, buffer in layer.named_buffers()
            if name != "slots"
        )

    @torch.inference_mode()
    def put(self, slot: int, adapter: Adapter) -> None:
        """Copy an adapter into a slot. Later steps find it there."""
        by_layer: dict[str, dict[str, Update]] = {}
        for (prefix, part), update in adapter.updates.items():
            by_layer.setdefault(prefix, {})[part] = update
        for prefix, layer in self._layers.items():
            layer.put(slot, by_layer.get(prefix, {}))
