"""What a user wishes of the passes: `--passes`, and `PassConfig` for `LLM(...)`. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

FLAG = "--passes"
_TOKENS = "sequence_parallel_tokens="


@dataclass(frozen=True, slots=True, kw_only=True)
class PassConfig:
    """Each pass in the order in which they run: True, False, or None for what suits the machine.

        LLM("model", passes=PassConfig(norm_quant=False))

    A pass that is asked for runs also where no kernel makes it worth while, unless the device
    cannot do it at all. `sequence_parallel_tokens`: from how many on a step's rows are split over
    ranks; None: the device's number.
    """

    noop: bool | None = None
    norm_quant: bool | None = None
    silu_quant: bool | None = None
    attention_quant: bool | None = None
    norm_rotary: bool | None = None
    sequence_parallel: bool | None = None
    async_tp: bool | None = None
    allreduce_norm: bool | None = None
    pack_linear: bool | None = None
    lower: bool | None = None
    in_place: bool | None = None
    sequence_parallel_tokens: int | None = None

    @classmethod
    def parse(cls, text: str) -> PassConfig:
        """`auto`, `none`, or `+name,-name`, which may follow either, and
        `sequence_parallel_tokens=N`. Raises `ValueError` with the names that exist.
        """
        names = pass_names()
        words, wishes = text.split(","), dict[str, bool]()
        base = words.pop(0) if words[0] in ("auto", "none") else "auto"
        tokens: int | None = None
        for word in words:
            if word.startswith(_TOKENS):
                tokens = _number(word, tokens)
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
        """Of each pass, in order."""
        return {name: getattr(self, name) for name in pass_names()}

    def settled(self, *, packs: bool) -> PassConfig:
        """What depends on the machine's memory, decided: whether `pack_linear` runs unless the
        user has said so. Every process that makes or loads pieces of the model is told.
        """
        return self if self.pack_linear is not None else replace(self, pack_linear=packs)

    def __str__(self) -> str:
        """The text that `parse` reads so."""
        wishes, tokens = self.wishes, self.sequence_parallel_tokens
        number = [] if tokens is None else [f"{_TOKENS}{tokens}"]
        if None not in wishes.values():
            chosen = (f"+{name}" for name, wish in wishes.items() if wish)
            return ",".join(["none", *chosen, *number])
        signs = {True: "+", False: "-"}
        words = [f"{signs[wish]}{name}" for name, wish in wishes.items() if wish is not None]
        return ",".join([*words, *number]) or "auto"


def pass_names() -> list[str]:
    """All passes, in the order in which they run."""
    return [field.name for field in fields(PassConfig) if field.name != _TOKENS[:-1]]


def _number(word: str, before: int | None) -> int:
    text = word.removeprefix(_TOKENS)
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise ValueError(f"{FLAG}: {word!r} must be {_TOKENS}N, N at least 1")
    if before not in (None, int(text)):
        raise ValueError(f"{FLAG} has {_TOKENS}{before} and {word}: leave one out")
    return int(text)


DEFAULT_PASSES = PassConfig()
