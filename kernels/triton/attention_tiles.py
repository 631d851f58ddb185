"""How paged attention is divided: the tiles of its programs, and the splits of long sequences."""

from __future__ import annotations

from typing import NamedTuple

from .device import Properties
from .tiles import power_of_2

MAX_SPLITS = 32
# Least decode programs per multiprocessor. Keys are split until there are as many.
_PROGRAMS_PER_PROCESSOR = 2
# Most programs per multiprocessor of a recorded step, whose grid must fit every later step.
_RECORDED_PER_PROCESSOR = 32
_SPLIT_TOKENS = 128  # Combining a split with fewer keys costs more than it saves.
# Capabilities whose matrix instructions keep sums outside of a thread's registers.
_SUMS_OUTSIDE = ((9, 0), (10, 0))


class Blocks(NamedTuple):
    """Rows and keys of a tile, and the warps that compute it."""

    rows: int
    keys: int
    warps: int = 4


class Shape(NamedTuple):
    """What tiles are chosen by: query heads per key, head size, and bytes of a query's number."""

    group: int
    head_size: int
    itemsize: int

    @property
    def head_block(self) -> int:
        """Head size as a block: a power of two that matrix instructions support."""
        return max(16, power_of_2(self.head_size))

    def bytes_of(self, blocks: Blocks) -> int:
        """Return the most shared memory that a tile takes: queries, and two tiles of keys and of
        values.
        """
        rows = max(blocks.rows, power_of_2(self.group))
        return self.itemsize * self.head_block * (rows + 4 * blocks.keys)


def prefill_blocks(shape: Shape, rows: int, device: Properties) -> list[Blocks]:
    """Return tiles for prompts with at most `rows` rows, the fastest first."""
    choices = [Blocks(32, 32, 4), Blocks(16, 16, 4)]
    if shape.itemsize == 2:
        choices.insert(0, Blocks(64, 32, 8))
        if shape.head_block <= 128:
            choices.insert(0, Blocks(128, 64, 8) if rows >= 128 else Blocks(64, 64, 8))
        elif rows >= 128 and device.capability in _SUMS_OUTSIDE:
            choices.insert(0, Blocks(128, 32, 8))
    return _that_fit(shape, choices, device)


def decode_blocks(shape: Shape, device: Properties) -> list[Blocks]:
    """Return tiles for decodes, the fastest first."""
    choices = [Blocks(16, 16)]
    if shape.itemsize == 2:
        choices.insert(0, Blocks(16, 32))
        if shape.head_block <= 128:
            choices.insert(0, Blocks(16, 64))
    return _that_fit(shape, choices, device)


def _that_fit(shape: Shape, choices: list[Blocks], device: Properties) -> list[Blocks]:
    return [each for each in choices if shape.bytes_of(each) <= device.shared_memory]


def obstacle(shape: Shape, device: Properties) -> str | None:
    """Return why no tile of these heads fits the device, or None."""
    if prefill_blocks(shape, 1, device) and decode_blocks(shape, device):
        return None
    least = shape.bytes_of(Blocks(16, 16))
    return (
        f"triton needs {least} bytes of shared memory for heads of {shape.head_size}, and this GPU "
        f"has {device.shared_memory}"
    )


class Splits(NamedTuple):
    """How decodes are split. A request gets as many splits as it has multiples of a length that
    the kernels compute (`attention_kernels.split_length`).

    Attributes:
        number: Splits of the longest request.
        wanted: Splits of all requests that fill the device.
        least: Keys of a split at least.
    """

    number: int
    wanted: int
    least: int


def chosen_splits(
    count: int, kv_heads: int, total: int, longest: int, fixed: bool, device: Properties
) -> Splits:
    """Choose the splits of `count` decodes of `total` tokens. `fixed`: the step is recorded, and
    later steps differ in all but the longest sequence that is possible.
    """
    wanted = max(1, _PROGRAMS_PER_PROCESSOR * device.processors // kv_heads)
    if fixed:
        programs = _RECORDED_PER_PROCESSOR * device.processors // (count * kv_heads)
        number = min(programs, longest // _SPLIT_TOKENS, MAX_SPLITS)
    else:
        length = max(_SPLIT_TOKENS, -(-total // wanted))
        number = min(-(-longest // length), MAX_SPLITS)
    return Splits(max(1, number), wanted, _SPLIT_TOKENS)


def window_splits(count: int, kv_heads: int, longest: int, device: Properties) -> Splits:
    """Choose the splits of decodes in a window, whose requests have about the same keys."""
    wanted = max(1, _PROGRAMS_PER_PROCESSOR * device.processors // kv_heads)
    number = min(wanted // count, longest // _SPLIT_TOKENS, MAX_SPLITS)
    return Splits(max(1, number), wanted, _SPLIT_TOKENS)
