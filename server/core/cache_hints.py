"""What OpenAI's clients say of prompts that they will send again. It changes no answer."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from .schemas import WireModel

_SECONDS = {"m": 60.0, "h": 3600.0}
_RETENTION = {"in_memory": 300.0, "in-memory": 300.0, "24h": 24 * 3600.0}


def _label(value: Any) -> str | None:
    return value[:512] if isinstance(value, str) else None


# A text of the client. Other values are ignored.
Label = Annotated[str | None, BeforeValidator(_label)]


class PromptCacheOptions(WireModel):
    """`explicit` asks for breakpoints only, which this server does not read."""

    mode: Literal["implicit", "explicit"] = "implicit"
    ttl: Annotated[
        str, Field(pattern=r"^[1-9][0-9]?[mh]$", description="minutes or hours, such as 30m")
    ] = "30m"


class CacheHints(WireModel):
    """Which cached prompts a client will use again."""

    prompt_cache_key: Annotated[
        Label, Field(description="requests with one key go to the same replica (--dp-size)")
    ] = None
    prompt_cache_retention: Annotated[
        Literal["in_memory", "in-memory", "24h"] | None,
        Field(description="cached prompts of others are evicted first, for 5 minutes or 24 hours"),
    ] = None
    prompt_cache_options: Annotated[
        PromptCacheOptions | None,
        Field(description="cached prompts of others are evicted first for the time of ttl"),
    ] = None

    @property
    def kept_seconds(self) -> float:
        """For how long the prompt should be kept; 0 if nothing asks for that."""
        seconds = _RETENTION.get(self.prompt_cache_retention or "", 0.0)
        options = self.prompt_cache_options
        if options is not None and options.mode == "implicit":
            seconds = max(seconds, int(options.ttl[:-1]) * _SECONDS[options.ttl[-1]])
        return seconds
