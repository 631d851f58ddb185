"""What a user wishes of the passes: `--passes`, and `PassConfig` for `LLM(...)`. Free of torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace

FLAG = "--passes"


@dataclass(frozen=True, slots=True, kw_only=True)
class PassConfig:
    """Each pass in the order in which they run: True, False, or None for what suits the machine.

        LLM("model", passes=PassConfig(norm_quant=False))

    A pass that is asked for runs also where no kernel makes it worth while, unless the device
    cannot do it at all.
    """

    noop: bool | None = None
    norm_quant: bool | None = None
    silu_quant: bool | None = None
    attention_quant: bool | None = None
    norm_rotary: bool | None = None
    allreduce_norm: bool | None = None
    pack_linear: bool | None = None
    lower: bool | None = None
    in_place: bool | None = None

    @classmethod
    def parse(cls, text: str) -> PassConfig:
        """`auto`, `none`, or `+name,-name`, which may follow either. Raises `ValueError` with the
        names that exist.
        """
        names = [field.name for field in fields(cls)]
        words, wishes = text.split(","), dict[str, bool]()
        base = words.pop(0) if words[0] in ("auto", "none") else "auto"
        for word in words:
            sign, name = word[:1], word[1:]
            if sign not in ("+", "-") or name not in names:
                raise ValueError(
                    f"{FLAG} must be auto, none, or passes with their signs (+norm_quant,-noop), "
                    f"got {word!r}; there are {', '.join(names)}"
                )
            if wishes.setdefault(name, sign == "+") != (sign == "+"):
                raise ValueError(f"{FLAG} has both +{name} and -{name}: leave one out")
        return cls(**(dict.fromkeys(names, False) if base == "none" else {}) | wishes)

    def settled(self, *, packs: bool) -> PassConfig:
        """What depends on the machine's memory, decided: whether `pack_linear` runs unless the
        user has said so. Every process that makes or loads pieces of the model is told.
        """
        return self if self.pack_linear is not None else replace(self, pack_linear=packs)

    def __str__(self) -> str:
        """The text that `parse` reads so."""
        wishes = asdict(self)
        if None not in wishes.values():
            return ",".join(["none", *(f"+{name}" for name, wish in wishes.items() if wish)])
        signs = {True: "+", False: "-"}
        words = [f"{signs[wish]}{name}" for name, wish in wishes.items() if wish is not None]
        return ",".join(words) or "auto"


DEFAULT_PASSES = PassConfig()
