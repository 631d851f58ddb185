"""The settings of passes: `--passes`, and `PassConfig` for `LLM(...)`. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

FLAG = "--passes"
_TOKENS = "sequence_parallel_tokens="


@dataclass(frozen=True, slots=True, kw_only=True)
class PassConfig:
    """The passes in their order: True, False, or None for the default of the machine.

        LLM("model", passes=PassConfig(norm_quant=False))

    A pass that is True runs even without a kernel that makes it faster, unless the device cannot
    run it. `sequence_parallel_tokens` is the number of tokens from which the rows of a step are
    split over ranks. None means the number of the device.
    """

    noop: bool | None = None
    norm_quant: bool | None = None
    silu_quant: bool | None = None
    attention_quant: bool | None = None
    norm_rotary: bool | None = None
    split_norm_rotary: bool | None = None
    sequence_parallel: bool | None = None
    async_tp: bool | None = None
    allreduce_norm: bool | None = None
    pack_linear: bool | None = None
    lower: bool | None = None
    in_place: bool | None = None
    sequence_parallel_tokens: int | None = None

    @classmethod
    def parse(cls, text: str) -> PassConfig:
        """Parse `auto` or `none`, followed by `+name`, `-name` and `sequence_parallel_tokens=N`.

        `auto` may be left out. Raise `ValueError` with the names that exist.
        """
        names = pass_names()
        words, wishes = text.split(","), dict[str, bool]()
        base = words.pop(0) if words[0] in ("auto", "none") else "auto"
        tokens: int | None = None
        for word in words:
            if word.startswith(_TOKENS):
                number = word.removeprefix(_TOKENS)
                if not number.isascii() or not number.isdigit() or int(number) < 1:
                    raise ValueError(f"{FLAG}: {word!r} must be {_TOKENS}N, N at least 1")
                if tokens not in (None, int(number)):
                    raise ValueError(f"{FLAG} has {_TOKENS}{tokens} and {word}: leave one out")
                tokens = int(number)
                continue
            sign, name = word[:1], word[1:]
            if sign not in ("+", "-") or name not in names:
                raise ValueError(
                    f"{FLAG} must be auto, none, or passes with their signs (+norm_quant,-noop), "
                    f"got {word!r}; there are {', '.join(names)}"
                )
            if wishes.setdefault(name, sign == "+") != (sign == "+"):
                raise ValueError(f"{FLAG} has both +{name} and -{name}: leave one out")
        base_wishes = dict.fromkeys(names, False) if base == "none" else {}
        return cls(**base_wishes | wishes, sequence_parallel_tokens=tokens)

    @property
    def wishes(self) -> dict[str, bool | None]:
        """The setting of each pass, in order."""
        return {name: getattr(self, name) for name in pass_names()}

    def settled(self, *, packs: bool) -> PassConfig:
        """Set `pack_linear`, which depends on the machine's memory, unless the user has set it.

        All processes that make or load pieces of the model get the result.
        """
        return self if self.pack_linear is not None else replace(self, pack_linear=packs)

    def __str__(self) -> str:
        """Return the text that `parse` reads as this config."""
        wishes, tokens = self.wishes, self.sequence_parallel_tokens
        number = [] if tokens is None else [f"{_TOKENS}{tokens}"]
        if None not in wishes.values():
            chosen = (f"+{name}" for name, wish in wishes.items() if wish)
            return ",".join(["none", *chosen, *number])
        signs = {True: "+", False: "-"}
        words = [f"{signs[wish]}{name}" for name, wish in wishes.items() if wish is not None]
        return ",".join([*words, *number]) or "auto"


def pass_names() -> list[str]:
    """Return the names of all passes, in order."""
    return [field.name for field in fields(PassConfig) if field.name != _TOKENS[:-1]]


DEFAULT_PASSES = PassConfig()
