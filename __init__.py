"""Piecework: an OpenAI-compatible LLM serving server built around piecewise graph prefill."""

from typing import TYPE_CHECKING, Any

from .version import __version__ as __version__

if TYPE_CHECKING:
    from .runtime.config.engine import PassConfig as PassConfig
    from .runtime.core.sampling_params import SamplingParams as SamplingParams
    from .runtime.llm import LLM as LLM


def __getattr__(name: str) -> Any:
    """Load `piecework.LLM`, `PassConfig` and `SamplingParams` on first use, so that `import
    piecework` stays free of torch.
    """
    if name == "LLM":
        from .runtime.llm import LLM as LLM

        return LLM
    if name == "PassConfig":
        from .runtime.config.engine import PassConfig as PassConfig

        return PassConfig
    if name == "SamplingParams":
        from .runtime.core.sampling_params import SamplingParams as SamplingParams

        return SamplingParams
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
