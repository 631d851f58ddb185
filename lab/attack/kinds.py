"""Which bodies the fuzz campaign sends to a server, by the kind of its model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...server.serving.state import Kind
from .fuzz_seeds import TEXT_SEEDS

Seeds = Mapping[str, tuple[dict[str, Any], ...]]
_TEXTS = ["The fox", "Zwölf Boxkämpfer"]
# The first body of each endpoint is minimal.
_IMAGES: Seeds = {
    "/v1/images/generations": (
        {"prompt": "a fox", "size": "64x64", "num_inference_steps": 1},
        {
            "prompt": "a fox",
            "width": 64,
            "height": 64,
            "num_inference_steps": 1,
            "n": 2,
            "seed": 3,
            "guidance_scale": 2.0,
            "response_format": "url",
        },
    ),
}
_RERANK: tuple[dict[str, Any], ...] = (
    {"query": "Hi", "documents": _TEXTS},
    {"query": "Hi", "documents": [{"text": "x"}], "top_n": 1, "return_documents": True},
)
_SCORE: tuple[dict[str, Any], ...] = (
    {"text_1": "Hi", "text_2": _TEXTS},
    {"queries": _TEXTS, "documents": _TEXTS, "truncate_prompt_tokens": -1},
)
_CLASSIFY: tuple[dict[str, Any], ...] = ({"input": "Hi"}, {"input": [["Hi", "The fox"], "Hi"]})
_POOLING: Seeds = {
    "/v1/embeddings": (
        {"input": "The fox"},
        {"input": _TEXTS, "encoding_format": "base64", "dimensions": 8, "user": "u"},
        {"input": [[5, 6], [7]], "truncate_prompt_tokens": 1, "prompt_name": "query"},
    ),
    "/v1/rerank": _RERANK,
    "/v2/rerank": _RERANK,
    "/rerank": _RERANK,
    "/v1/score": _SCORE,
    "/score": _SCORE,
    "/v1/classify": _CLASSIFY,
    "/classify": _CLASSIFY,
    "/api/embed": (
        {"model": "default", "input": "The fox"},
        {
            "model": "default",
            "input": _TEXTS,
            "truncate": False,
            "dimensions": 8,
            "keep_alive": "5m",
            "options": {"num_ctx": 64},
        },
    ),
    "/api/embeddings": (
        {"model": "default", "prompt": "The fox"},
        {"model": "default", "prompt": "", "keep_alive": 0},
    ),
    "/v1/files": TEXT_SEEDS["/v1/files"],
    "/v1/batches": TEXT_SEEDS["/v1/batches"],
    "/api/show": TEXT_SEEDS["/api/show"],
}
_AUDIO = {
    "file": "tone.wav",
    "model": "default",
    "prompt": "Fox.",
    "temperature": 0.5,
    "seed": 1,
}
_SPEECH: Seeds = {
    "/v1/audio/transcriptions": (
        {"file": "tone.wav"},
        {**_AUDIO, "language": "en", "stream": True, "response_format": "text"},
        {
            **_AUDIO,
            "response_format": "verbose_json",
            "timestamp_granularities[]": ["word", "segment"],
        },
        {"file": "cut.wav", "response_format": "srt"},
        {"file": "long.wav", "response_format": "vtt", "chunking_strategy": "auto"},
    ),
    "/v1/audio/translations": ({"file": "tone.wav"}, {**_AUDIO, "response_format": "verbose_json"}),
}
SEEDS: Mapping[Kind, Seeds] = {
    "text": TEXT_SEEDS,
    "images": _IMAGES,
    "pooling": _POOLING,
    "speech": _SPEECH,
}
