"""Any form that a client sends is answered or refused, and the server goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from speech_here import client_here, encoded, load, wav
from tiny_whisper import make_tiny_whisper, noise

from piecework.runtime.speech import windows

GOOD = [wav(noise(0.5)), encoded(noise(0.4), "flac", "flac"), encoded(noise(0.4), "mp3", "mp3")]
FORMS = ("json", "text", "srt", "vtt", "verbose_json", "word", "segment")
ODD = ("true", "0", "1", "0.5", "-1", "nan", "1e400", "en", "de", "tiny", "auto", "\x00", "9" * 400)
VALUES = st.text(max_size=12) | st.sampled_from((*FORMS, *ODD))
NAMES = st.sampled_from(
    (
        *("model", "language", "prompt", "response_format", "temperature", "stream", "seed", "x"),
        *("timestamp_granularities[]", "timestamp_granularities", "include[]"),
        "chunking_strategy",
    )
)
FIELDS = st.dictionaries(NAMES, VALUES | st.lists(VALUES, max_size=3), max_size=4)


@st.composite
def files(draw: st.DrawFn) -> bytes:
    """A file of audio, mostly damaged."""
    content = bytearray(draw(st.sampled_from(GOOD)))
    for place, value in draw(
        st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=6)
    ):
        content[place % len(content)] = value
    return bytes(content[: draw(st.sampled_from([len(content), 0, 11, 44, 100, 3000]))])


Ask = Callable[[str, dict[str, object], bytes], int]


@pytest.fixture(scope="module")
def ask(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ask]:
    model = load(make_tiny_whisper(tmp_path_factory.mktemp("fuzzed") / "w"))
    with asyncio.Runner() as runner, pytest.MonkeyPatch.context() as patch:
        patch.setattr(windows, "TEMPERATURES", (0.0,))

        async def start() -> tuple[object, object]:
            return client_here(model, max_audio_seconds=3)

        client, engine = runner.run(start())

        async def send(path: str, fields: dict[str, object], file: bytes) -> int:
            answer = await client.post(path, data=fields, files={"file": ("a", file)})  # type: ignore[attr-defined]
            assert not engine.scheduler.has_work  # type: ignore[attr-defined]
            return int(answer.status_code)

        yield lambda *given: runner.run(send(*given))


@settings(max_examples=examples(10, exploring=25))
@given(st.sampled_from(["/v1/audio/transcriptions", "/v1/audio/translations"]), FIELDS, files())
def test_any_form_is_answered_or_refused(
    ask: Ask, path: str, fields: dict[str, object], file: bytes
) -> None:
    assert ask(path, fields, file) in (200, 400, 404)
