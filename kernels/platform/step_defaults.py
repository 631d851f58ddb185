"""What steps are like on a device unless flags say otherwise."""

from __future__ import annotations


class StepDefaults:
    """The values of an engine's flags that are left out.

        page_size = config.page_size or defaults.default_page_size

    `resolve_steps` takes them for an engine of text.
    """

    default_page_size: int = 16
    default_chunked_prefill_size: int = 2048
    default_max_running_requests: int = 256
    # Patches of images that are encoded between two steps. None: as long as the steps allow.
    default_encoder_budget: int | None = 16384
    # Rows of a layer of the vision encoder that are computed at once. None: all rows.
    encoder_rows: int | None = None
    # Share of the memory left after loading weights that the KV cache takes. None: measure what
    # steps need, and take the rest.
    default_mem_fraction: float | None = None
    # Whether the host can plan the next step while launched work runs.
    runs_beside_host: bool = True

    def graph_obstacle(self) -> str | None:
        """Return why no graph can be captured in this process and the remedy, or None."""
        return None
