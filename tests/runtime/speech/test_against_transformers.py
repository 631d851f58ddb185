"""Texts, times of segments and times of words are those of transformers' generate, in float32."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from sparse import sparse
from tiny_whisper import make_tiny_whisper, noise
from transformers import WhisperForConditionalGeneration
from transformers.models.whisper.generation_whisper import _dynamic_time_warping

from piecework.runtime.core.speech_messages import SpeechOutput, SpeechRequest
from piecework.runtime.speech import windows
from piecework.runtime.speech.alignment import warp
from piecework.runtime.speech.config import SpeechConfig
from piecework.runtime.speech.model import SpeechModel
from piecework.runtime.speech.scheduler import SpeechScheduler

KINDS = ["several languages", "english"]
ONE_KIND = pytest.mark.parametrize("pair", sparse(KINDS, kept=KINDS[:1]), indirect=True)


@pytest.fixture(scope="module", params=KINDS)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[SpeechModel, Any]:
    folder = make_tiny_whisper(
        tmp_path_factory.mktemp("whisper") / "w", english=request.param == "english"
    )
    ours = SpeechModel(SpeechConfig(model_path=str(folder), dtype="float32", num_threads=1))
    theirs = WhisperForConditionalGeneration.from_pretrained(folder, attn_implementation="eager")
    return ours, theirs


@pytest.fixture(autouse=True)
def one_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random models write nonsense, which would be written again at other temperatures. And
    transformers hears however short a rest.
    """
    monkeypatch.setattr(windows, "TEMPERATURES", (0.0,))
    monkeypatch.setattr(windows, "_SILENT", 1.1)
    monkeypatch.setattr("piecework.runtime.speech.scheduler.LEAST_REST", 1)


def run(model: SpeechModel, requests: list[SpeechRequest]) -> dict[str, SpeechOutput]:
    scheduler = SpeechScheduler(model)
    for request in requests:
        scheduler.add(request)
    found = {}
    while scheduler.has_work:
        for output in scheduler.step().outputs:
            found[output.rid] = output
    return found


def transcribe(pair: tuple[SpeechModel, Any], audio: bytes, **settings: Any) -> Any:
    """Segments of transformers."""
    ours, theirs = pair
    samples = np.frombuffer(audio, "<i2").astype(np.float32) / 2**15
    features = ours._extractor(
        samples, sampling_rate=16_000, return_tensors="pt", return_attention_mask=True
    )
    if theirs.generation_config.is_multilingual:
        settings = {"task": "transcribe", **settings}
    return theirs.generate(**features, return_timestamps=True, return_segments=True, **settings)[
        "segments"
    ][0]


SEEDS = range(5)


def test_texts_and_times_are_those_of_transformers(pair: tuple[SpeechModel, Any]) -> None:
    """All windows are written side by side."""
    requests, expected = [], {}
    for seed in SEEDS:
        audio = noise(2.0, seed)
        requests.append(SpeechRequest(rid=str(seed), audio=audio))
        expected[str(seed)] = transcribe(pair, audio)
    found = run(pair[0], requests)
    end = pair[0].folder.end
    lengths = set()
    for rid, segments in expected.items():
        wanted = [
            (round(float(each["start"]), 2), round(float(each["end"]), 2), each["tokens"].tolist())
            for each in segments
            if any(token < end for token in each["tokens"].tolist())
        ]
        got = [(each.start, each.end, each.tokens) for each in found[rid].segments]
        assert got == wanted, rid
        lengths.add(sum(len(tokens) for *_, tokens in wanted))
    assert len(lengths) > 3  # The texts differ.


@ONE_KIND
def test_words_begin_where_transformers_says(pair: tuple[SpeechModel, Any]) -> None:
    ours = pair[0]
    found = run(
        ours, [SpeechRequest(rid=str(seed), audio=noise(2.0, seed), words=True) for seed in SEEDS]
    )
    compared = 0
    for seed in SEEDS:
        segments = transcribe(pair, noise(2.0, seed), return_token_timestamps=True)
        wanted = [each for each in segments if any(t < ours.folder.end for t in each["tokens"])]
        for got, theirs in zip(found[str(seed)].segments, wanted, strict=True):
            times = [
                round(float(time), 2)
                for token, time in zip(theirs["tokens"], theirs["token_timestamps"], strict=True)
                if token < ours.folder.end
            ]
            if "\ufffd" not in got.text:  # transformers drops bytes that are no characters.
                assert "".join(word.text for word in got.words) == got.text
            assert got.words[0].start == times[0]
            assert {word.start for word in got.words} <= set(times)
            assert all(word.start <= word.end for word in got.words)
            compared += len(got.words)
    assert compared > len(SEEDS)


def test_a_prompt_a_task_and_a_language_are_given_as_transformers_gives_them(
    pair: tuple[SpeechModel, Any],
) -> None:
    ours = pair[0]
    audio = noise(2.0, 3)
    given = {} if not ours.folder.languages else {"language": "de", "task": "translate"}
    prompt = ours.tokenizer.get_prompt_ids("A b c.", return_tensors="pt")
    wanted = transcribe(pair, audio, prompt_ids=prompt, **given)
    request = SpeechRequest(rid="a", audio=audio, prompt="A b c.", **given)  # type: ignore[arg-type]
    got = run(ours, [request])["a"]
    assert [each.tokens for each in got.segments] == [each["tokens"].tolist() for each in wanted]
    assert got.language == given.get("language", "en")


def test_the_language_is_the_one_that_transformers_detects(pair: tuple[SpeechModel, Any]) -> None:
    ours, theirs = pair
    if not ours.folder.languages:
        assert run(ours, [SpeechRequest(rid="a", audio=noise(1.0))])["a"].language == "en"
        return
    names = {token: code for code, token in ours.folder.languages.items()}
    audios = {str(seed): noise(2.0, seed) for seed in SEEDS}
    found = run(ours, [SpeechRequest(rid=rid, audio=audio) for rid, audio in audios.items()])
    features = torch.stack([ours.spectrogram(audio) for audio in audios.values()])
    wanted = [names[int(token)] for token in theirs.detect_language(features)]
    assert [found[rid].language for rid in audios] == wanted


@ONE_KIND
def test_a_step_that_fails_is_repeated_a_window_at_a_time(
    pair: tuple[SpeechModel, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = pair[0]
    requests = [SpeechRequest(rid=str(seed), audio=noise(2.0, seed)) for seed in range(3)]
    wanted = run(ours, requests)
    plain, failed = SpeechModel.step, list[int]()

    def step(self: SpeechModel, ids: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
        if len(ids) > 1:
            failed.append(len(ids))
            raise RuntimeError("too many")
        return plain(self, ids, positions)

    monkeypatch.setattr(SpeechModel, "step", step)
    assert run(ours, requests) == wanted and failed[0] == 3


@ONE_KIND
def test_the_request_whose_computation_fails_ends_alone(
    pair: tuple[SpeechModel, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = pair[0]
    requests = [SpeechRequest(rid=str(seed), audio=noise(2.0, seed)) for seed in range(3)]
    wanted, plain = run(ours, requests), SpeechModel.encode

    def encode(self: SpeechModel, spectrogram: torch.Tensor) -> torch.Tensor:
        states = plain(self, spectrogram)
        return states * np.inf if torch.equal(spectrogram, broken) else states

    broken = ours.spectrogram(requests[1].audio)
    monkeypatch.setattr(SpeechModel, "encode", encode)
    found = run(ours, requests)
    assert "not finite" in (found.pop("1").error or "")
    assert found == {rid: output for rid, output in wanted.items() if rid != "1"}


def test_the_cheapest_path_is_that_of_transformers() -> None:
    random = np.random.default_rng(0)
    for rows, columns in ((1, 1), (1, 9), (7, 1), (5, 30), (40, 11)):
        costs = random.integers(-3, 3, (rows, columns)).astype(np.float64)  # Many are equal.
        wanted = _dynamic_time_warping(costs)
        assert [each.tolist() for each in warp(costs)] == [each.tolist() for each in wanted]
