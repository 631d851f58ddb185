"""The attention backends of a device."""

from __future__ import annotations

from collections.abc import Sequence

from ..attention import AttentionBackend, KVLayout
from ..cache_format import CACHE_DTYPES
from ..paged_attention import TorchAttention
from .device import Device


class AttentionChoice(Device):
    """The attention backends of a device, and which layers each of them computes.

    name = attention.choose_attention("auto", layouts)
    backend = attention.make_attention_backend(name)
    """

    attention_backends: tuple[str, ...] = ("torch",)  # Attention backends, default first.
    kv_cache_dtypes: tuple[str, ...] = tuple(CACHE_DTYPES)  # 8-bit cache formats of attention.
    # Whether attention can address pages anywhere in a cache of more than 2**31 numbers that holds
    # pages of several kinds of layers.
    shares_pages: bool = True
    # Whether attention supports key/value heads that are read by unequal numbers of query heads.
    cuts_head_groups: bool = False

    def attention_backend(
        self, name: str = "auto", layouts: Sequence[KVLayout] = ()
    ) -> AttentionBackend:
        """Return the backend that `choose_attention` chooses."""
        return self.make_attention_backend(self.choose_attention(name, layouts))

    def choose_attention(self, name: str = "auto", layouts: Sequence[KVLayout] = ()) -> str:
        """Return the name of the backend to use: `name`, or for "auto" the first that supports all
        `layouts`.

        Raise `ValueError` with a remedy if there is no such backend.
        """
        if name not in ("auto", *self.attention_backends):
            raise ValueError(
                f"--attention-backend {name} is not available on {self.device_type}; choose "
                f"{', '.join(self.attention_backends)}"
            )
        reason = None
        for backend in self.attention_backends if name == "auto" else (name,):
            obstacles = (self.attention_obstacle(backend, each) for each in dict.fromkeys(layouts))
            reason = next(filter(None, obstacles), None)
            if reason is None:
                return backend
        raise ValueError(f"--attention-backend {name}: {reason}; choose auto")

    def check_kv_cache_dtype(self, name: str) -> None:
        """Raise `ValueError` with a remedy if no attention here stores keys and values in this
        format.
        """
        if name not in ("auto", *self.kv_cache_dtypes):
            raise ValueError(
                f"--kv-cache-dtype {name} is not available on {self.device_type}, which supports "
                f"{', '.join(self.kv_cache_dtypes) or '16 bits only'}; choose auto"
            )

    def attention_obstacle(self, name: str, layout: KVLayout) -> str | None:
        """Return why the backend `name` cannot compute such a layer here, or None if it can. This
        may run a trial.
        """
        return None

    def make_attention_backend(self, name: str) -> AttentionBackend:
        """Return a new backend `name`, one of `attention_backends`."""
        return TorchAttention()
