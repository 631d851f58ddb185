"""`LinearKernels` of a GPU: weights that stay packed (`packed`), after a trial of their kernels."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache, partial

import torch

from . import packed
from .packed import (
    DTYPE_BITS,
    DTYPES,
    FORMAT_BITS,
    MIXED,
    MOST_RUNS,
    NAMES,
    ROW_UNIT,
    RUN_BITS,
    dtype_of,
    form_of,
    runs_of,
)
from .packed_formats import FORMATS, Format, Parts, pack_blocks, pack_rows, values_of

logger = logging.getLogger(__name__)

_NVFP4 = "nvfp4"


class PackedLinear:
    """`LinearKernels` of a GPU: weights in GGUF's blocks, and experts in more formats
    (`experts`).
    """

    op = torch.ops.piecework.triton_linear.default
    scaled_op: torch._ops.OpOverload | None = None
    embedding_op = torch.ops.piecework.triton_embedding.default
    experts_op = torch.ops.piecework.triton_experts.default
    keeps_blocks = True

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        """`dtype` is that of activations."""
        self._dtype, self._device = dtype, device

    def experts(self, sizes: Sequence[int]) -> PackedExperts:
        return PackedExperts(self._dtype, self._device)

    def layout(self, kind: str, in_features: int) -> int | None:
        if kind.startswith("mixed "):
            return self._mixed(kind.split()[1:], in_features)
        form = FORMATS.get(kind)
        if kind == _NVFP4:
            return self._tried(NAMES.index(kind)) if in_features % 16 == 0 else None
        if form is None or form.read is None or in_features % form.block:
            return None
        return self._tried(NAMES.index(kind))

    def _tried(self, layout: int) -> int | None:
        """Return a layout with its dtype, or None if this device refuses its kernel."""
        if self._dtype not in DTYPES:
            return None
        layout |= DTYPES.index(self._dtype) << FORMAT_BITS
        return None if refusal(layout, self._device) else layout

    def _mixed(self, words: list[str], in_features: int) -> int | None:
        found = MIXED
        runs = list(zip(words[::2], map(int, words[1::2]), strict=True))
        for place, (name, rows) in enumerate(runs):
            layout = self.layout(name, in_features)
            number = rows // ROW_UNIT << FORMAT_BITS
            if layout is None or rows % ROW_UNIT or number >= 1 << RUN_BITS:
                return None
            found |= (layout % (1 << FORMAT_BITS) | number) << place * RUN_BITS
        return found if len(runs) <= MOST_RUNS else None

    def packed_shape(self, kind: str, in_features: int, out_features: int) -> tuple[int, int]:
        layout = self.layout(kind, in_features)
        assert layout is not None
        sizes = [
            (rows, form.planes(in_features).row_bytes)
            for form, rows in runs_of(layout, out_features)
        ]
        return sizes[0] if len(sizes) == 1 else (1, sum(rows * size for rows, size in sizes))

    def pack(
        self, kind: str, parts: Sequence[torch.Tensor], scales: Sequence[torch.Tensor] = ()
    ) -> torch.Tensor:
        if kind == _NVFP4:
            return self._pack_numbers(kind, parts, scales)
        if not kind.startswith("mixed "):
            form = FORMATS[kind]
            rows = [pack_blocks(form, part.to(self._device)) for part in parts]
            return rows[0] if len(rows) == 1 else torch.cat(rows)
        words, waiting, runs = kind.split()[1:], list(parts), []
        for name, count in zip(words[::2], map(int, words[1::2]), strict=True):
            missing = count
            while missing > 0:
                part = waiting.pop(0)
                missing -= len(part)
                runs.append(pack_blocks(FORMATS[name], part.to(self._device)).view(-1))
        return torch.cat(runs)[None]

    def _pack_numbers(
        self, kind: str, parts: Sequence[torch.Tensor], scales: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """Pack a kind that is not GGUF's."""
        columns = parts[0].shape[1]
        if kind.startswith(("weight_only 4", _NVFP4)):
            columns *= 2
        layout = self.layout(kind, columns)
        assert layout is not None
        form = form_of(layout)
        return torch.cat(
            [
                pack_rows(form, _parts(kind, part.to(self._device), scale.to(self._device)))
                for part, scale in zip(parts, scales, strict=True)
            ]
        )


class PackedExperts(PackedLinear):
    """`LinearKernels` of layers of experts, which also take 8 bits and groups of 4 or 8 bits."""

    def experts(self, sizes: Sequence[int]) -> PackedExperts:
        return self

    def layout(self, kind: str, in_features: int) -> int | None:
        match kind.split():
            case ["weight_only", bits, columns, _]:
                if int(columns) % 32 or in_features % int(columns):
                    return None
                number = NAMES.index(f"weight_only {bits}")
                return self._tried(number | int(columns) << FORMAT_BITS + DTYPE_BITS)
            case ["int8" | "fp8_e4m3" | "fp8_e4m3_blocks" as name]:
                return self._tried(NAMES.index(name))
            case ["mixed", *_]:
                return None
        return super().layout(kind, in_features)

    def pack(
        self, kind: str, parts: Sequence[torch.Tensor], scales: Sequence[torch.Tensor] = ()
    ) -> torch.Tensor:
        if kind in FORMATS and FORMATS[kind].read is not None:
            return super().pack(kind, parts)
        return self._pack_numbers(kind, parts, scales)


def _parts(kind: str, stored: torch.Tensor, scales: torch.Tensor) -> Parts:
    """Return unpacked rows of a kind that is not GGUF's. Its form is that of `LinearKernels`."""
    if kind == _NVFP4:
        numbers = torch.stack((stored & 15, stored >> 4), dim=-1).flatten(1)
        subs = scales[:, :-1].to(torch.float8_e4m3fn).view(torch.uint8)
        return Parts(numbers, scales[:, -1:].float(), subs)
    if kind.startswith("weight_only"):
        if kind.startswith("weight_only 4"):
            stored = torch.stack((stored & 15, stored >> 4), dim=-1).flatten(1)
        scale, zero = scales.float().unbind(-1)
        return Parts(stored, scale, minima=zero.to(torch.uint8))
    numbers = stored.view(torch.uint8)
    return Parts(numbers ^ 128 if kind == "int8" else numbers, scales.float())


@cache
def refusal(layout: int, device: torch.device) -> str | None:
    """Return why the device does not multiply weights of a layout: its kernel does not compile or
    run, or gives other numbers than plain torch. The layout has one format.
    """
    form, dtype = form_of(layout), dtype_of(layout)
    columns, rows = max(256, form.super_size), 40
    generator = torch.Generator().manual_seed(0)
    try:
        weight = pack_rows(form, _random_parts(form, rows, columns, generator)).to(device)
        x = torch.randn(3, columns, generator=generator).to(device, dtype)
        wanted = x.float() @ values_of(form, weight, columns).to(dtype).float().t()
        found = packed.linear(x, weight, None, rows, layout).float()
        error = float((found - wanted).abs().max() / wanted.abs().max())
    except Exception as failure:  # Compilers and drivers raise errors of their own.
        reason = f"{type(failure).__name__}: {failure}"
    else:
        # A comparison that is false for NaN.
        reason = None if error < 0.02 else f"its results are wrong by {error:.0%}"  # type: ignore[assignment]
    if reason is not None:
        name = NAMES[layout % (1 << FORMAT_BITS)]
        logger.warning("weights in %s are widened, because their kernel fails: %s", name, reason)
    return reason


def _random_parts(form: Format, rows: int, columns: int, generator: torch.Generator) -> Parts:
    def whole(most: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, most, shape, generator=generator).to(torch.uint8)

    draw = partial(torch.rand, generator=generator)
    most = 1 << form.bits + form.high
    numbers = whole(0x7E if form.number == "e4m3" else most, rows, columns)
    count = -(-columns // form.columns_of_scale(columns))
    dtype = torch.float32 if form.scale in ("float", "e4m3") else torch.float16
    shape = (rows, count, 2) if form.minimum in ("half", "sub") else (rows, count)
    scales = None if form.scale == "power" else (draw(shape) / 16).to(dtype)
    subs = None
    if form.scale not in ("half", "float"):
        subs = whole(10, rows, columns // form.group) + (120 if form.scale == "power" else 1)
    minima = None
    if form.minimum in ("sub", "zero"):
        minima = whole(1 << form.bits, rows, columns // 32 if form.minimum == "sub" else count)
    return Parts(numbers, scales, subs, minima)
