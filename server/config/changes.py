"""Settings of what operators may change while a server runs."""

from __future__ import annotations

from dataclasses import dataclass

from ...runtime.config.options import option

CHANGES = "changes of a running server"


@dataclass(frozen=True, kw_only=True)
class ChangesConfig:
    """Which endpoints may stop the engine or change its weights. A part of `ServerConfig`."""

    enable_sleep_mode: bool = option(
        False,
        "serve the endpoints that free the engine's memory for a while and that pause it: /sleep, "
        "/wake_up, /pause_generation, ...",
        group=CHANGES,
    )
    sleep_requests: str = option(
        "wait",
        "what requests do while the engine sleeps: wait, or refuse with 503 and Retry-After",
        group=CHANGES,
        choices=("wait", "refuse"),
    )
    lora_root: str | None = option(
        None,
        "folder of the adapters that /v1/load_lora_adapter may load; default: adapters cannot be "
        "changed while the server runs",
        group=CHANGES,
        metavar="FOLDER",
    )
    weights_root: str | None = option(
        None,
        "folder of the models that /update_weights_from_disk may load into the running engine; "
        "default: this endpoint and /get_weights_by_name are off",
        group=CHANGES,
        metavar="FOLDER",
    )
