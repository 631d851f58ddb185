"""Valid bodies for endpoints that control a server, and for files and batches."""

from __future__ import annotations

from typing import Any

_ADAPTER = {"lora_name": "a", "lora_path": "b"}
# Most of these endpoints refuse everything, unless a flag switches them on.
CONTROL_SEEDS: dict[str, tuple[dict[str, Any], ...]] = {
    "/ping": ({},),
    "/abort_request": ({"rid": "nobody"},),
    "/flush_cache": ({},),
    "/sleep": ({},),
    "/wake_up": ({},),
    "/release_memory_occupation": ({"tags": ["weights", "kv_cache"]},),
    "/resume_memory_occupation": ({"tags": ["weights", "kv_cache"]},),
    "/pause_generation": ({"mode": "retract"},),
    "/continue_generation": ({},),
    "/get_weights_by_name": ({"name": "model.norm.weight", "truncate_size": 2},),
    "/update_weights_from_disk": ({"model_path": "x", "weight_version": "1"},),
    "/v1/load_lora_adapter": (_ADAPTER,),
    "/load_lora_adapter": (_ADAPTER,),
    "/v1/unload_lora_adapter": ({"lora_name": "a"},),
    "/unload_lora_adapter": ({"lora_name": "a"},),
    "/start_profile": ({"num_steps": 1},),
    "/stop_profile": ({},),
    "/v1/files": ({"file": "batch.jsonl", "purpose": "batch"},),
    "/v1/batches": (
        {
            "input_file_id": "file-1",
            "endpoint": "/v1/completions",
            "completion_window": "24h",
            "metadata": {"a": "b"},
        },
    ),
    "/v1/responses/resp_1/cancel": ({},),
    "/v1/batches/batch_1/cancel": ({},),
    # Only servers of several models have these.
    "/v1/models/load": ({"model": "default"},),
    "/v1/models/unload": ({"model": "default"},),
}
CONTROL_GETS = (
    "/live", "/v1/health", "/ping", "/model_info", "/get_server_info", "/get_load", "/is_sleeping",
)  # fmt: skip
