"""Images in an engine: whatever happens to a request, its text is the same and nothing leaks."""

from __future__ import annotations

import base64
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from tiny_vision import make_tiny_vision, picture_file
from vision_engines import PARAMS, Prompt, VisionEngine

from piecework.runtime.core.control_messages import Sleep, UpdateWeights, WakeUp
from piecework.runtime.core.images import ImageTensor
from piecework.runtime.llm import LLM
from piecework.runtime.multimodal.preprocess_process import Preprocessor

# By family: what its images differ in.
KINDS = {"idefics3": "parts", "qwen2_5_vl": "rotations", "gemma3": "both directions"}
OFFLINE = replace(PARAMS, logprobs=None)
FILES = picture_file(48, 40), picture_file(30, 90, seed=1)


class Case:
    """A model's folder, some prompts, and the tokens that follow them one at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        preprocessor = Preprocessor(str(folder))
        self.prompts = [
            Prompt(preprocessor, "What is IMAGE here, and what is IMAGE?", *FILES),
            Prompt(preprocessor, "IMAGE again", FILES[1]),
            Prompt(preprocessor, "No picture at all, only words."),
            Prompt(preprocessor, "Then IMAGE with more words after it", FILES[0]),
        ]
        engine = VisionEngine(folder, disable_radix_cache=True)
        self.wanted = [engine.answer(prompt)[0] for prompt in self.prompts]
        engine.end()


@pytest.fixture(scope="module", params=KINDS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(make_tiny_vision(tmp_path_factory.mktemp(request.param), request.param))


def answers(engine: VisionEngine, case: Case, **members: Any) -> list[list[int]]:
    rids = [engine.send(prompt, **members) for prompt in case.prompts]
    engine.run()
    assert not engine.errors
    return [engine.found[rid][0] for rid in rids]


@pytest.mark.parametrize(
    "settings",
    [
        {"chunked_prefill_size": 16, "mm_encoder_budget": 1},
        {"max_total_tokens": 160, "chunked_prefill_size": 32},
        {"mm_cache_bytes": 0},
        {"speculative_algorithm": "ngram"},
        {"kv_cache_dtype": "int8", "disable_radix_cache": True},
    ],
    ids=["small steps", "preemption", "no cache", "speculation", "int8"],
)
def test_a_batch_gives_what_single_requests_give(case: Case, settings: dict[str, Any]) -> None:
    engine = VisionEngine(case.folder, **settings)
    found = answers(engine, case)
    if "kv_cache_dtype" not in settings:
        assert found == case.wanted
        assert answers(engine, case) == case.wanted
    engine.end()


@pytest.mark.parametrize("case", ["qwen2_5_vl"], indirect=True)
def test_pieces_run_steps_with_images(case: Case) -> None:
    engine = VisionEngine(
        case.folder,
        disable_cuda_graph=False,
        startup="full",
        piecewise_cuda_graph_compiler="eager",
        chunked_prefill_size=32,
    )
    assert answers(engine, case) == case.wanted
    assert engine.engine._runner.graph_counts().piecewise_steps
    engine.end()


@pytest.mark.parametrize("case", ["qwen2_5_vl"], indirect=True)
def test_native_decodes_rotate_by_the_positions_after_an_image(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decodes in one native call follow an image as decodes op by op do."""
    native = VisionEngine(case.folder, dtype="bfloat16", disable_cuda_graph=False)
    kernels = native.engine._runner.graphs.kernels
    if kernels is None:
        pytest.skip("the native kernels cannot be built here")
    prompt, calls = case.prompts[0], 0
    call = kernels.call

    def counted(*arguments: Any) -> Any:
        nonlocal calls
        calls += arguments[-1] is not arguments[1]
        return call(*arguments)

    monkeypatch.setattr(kernels, "call", counted)
    tokens, logprobs, _ = native.answer(prompt)
    eager = VisionEngine(case.folder, dtype="bfloat16")
    eager.engine._runner.graphs.kernels = None
    wanted = eager.answer(prompt)
    assert calls and tokens == wanted[0]
    assert logprobs == pytest.approx(wanted[1], abs=0.05)
    native.end()
    eager.end()


def test_an_aborted_request_leaves_nothing(case: Case) -> None:
    engine = VisionEngine(case.folder, mm_encoder_budget=1, chunked_prefill_size=16)
    rids = [engine.send(prompt) for prompt in case.prompts]
    for _ in range(3):
        engine.step()
    engine.engine.abort(rids[:2])
    engine.run()
    assert engine.found[rids[3]][0] == case.wanted[3]
    assert not engine.encodings.pending and not engine.encodings._jobs
    assert engine.engine._core.cache.used_tokens == 0
    engine.end()


def test_an_idle_engine_keeps_nothing_of_an_image_that_was_half_encoded(case: Case) -> None:
    engine = VisionEngine(case.folder, mm_encoder_budget=1)
    rid = engine.send(case.prompts[3])
    engine.step()
    engine.step()
    encodings = engine.encodings
    assert encodings._jobs
    engine.engine.abort([rid])
    assert not (encodings._jobs or encodings._wanted or encodings._askers)
    assert not (encodings.encoding_for or engine.engine._core.has_work)
    engine.end()


@pytest.mark.parametrize("case", ["idefics3"], indirect=True)
def test_an_encoder_that_fails_once_fails_at_most_the_request_that_was_alone(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = VisionEngine(case.folder)
    family, failures = engine.encodings.family, [RuntimeError("once")]
    features = family.features

    def fails_once(*arguments: Any) -> Any:
        if failures:
            raise failures.pop()
        return features(*arguments)

    monkeypatch.setattr(family, "features", fails_once)
    both = [engine.send(case.prompts[3]) for _ in range(2)]
    engine.run()
    assert not engine.errors
    assert [engine.found[rid][0] for rid in both] == [case.wanted[3]] * 2
    failures.append(RuntimeError("again"))
    alone = engine.send(case.prompts[1])
    engine.run()
    assert "computation failed" in engine.errors[alone] and not engine.encodings.encoding_for
    assert engine.answer(case.prompts[1])[0] == case.wanted[1]
    engine.end()


def test_a_request_goes_on_after_a_crash(case: Case) -> None:
    """A new engine gets the same message with the tokens that were delivered."""
    engine = VisionEngine(case.folder)
    for prompt, wanted in zip(case.prompts, case.wanted, strict=True):
        rid = engine.send(prompt, output_ids=wanted[:2])
        tokens, _ = engine.run()[rid]
        assert tokens == wanted[2:]
    engine.end()


def test_a_damaged_image_ends_its_request_alone(case: Case) -> None:
    engine = VisionEngine(case.folder)
    prompt = case.prompts[1]
    (image,) = prompt.images
    name, tensor = next(iter(image.tensors.items()))
    short = ImageTensor(dtype="float32", shape=[1, 3], data=bytes(12))
    broken = replace(image, digest=b"x" * 16, tensors=image.tensors | {name: short})
    rid = engine.add(prompt.ids, PARAMS, images=[broken])
    outside = engine.add(prompt.ids, PARAMS, images=[replace(image, start=10**6)])
    good = engine.send(case.prompts[0])
    engine.step()
    gone = engine.add(prompt.ids, PARAMS, images=[replace(broken, digest=b"y" * 16)])
    engine.step()
    engine.engine.abort([gone])
    engine.run()
    assert "computation failed" in engine.errors[rid]
    assert "outside of the prompt" in engine.errors[outside]
    assert engine.found[good][0] == case.wanted[0] and tensor.shape != [1, 3]
    engine.end()


def test_without_vision_images_are_refused_and_nothing_is_loaded(case: Case) -> None:
    engine = VisionEngine(case.folder, disable_vision=True)
    assert engine.encodings is None
    rid, text = engine.send(case.prompts[0]), engine.send(case.prompts[2])
    engine.run()
    assert "takes no images" in engine.errors[rid]
    assert engine.found[text][0] == case.wanted[2]
    engine.end()


def test_a_lower_tier_keeps_images_apart(case: Case, tmp_path: Path) -> None:
    """Blocks on disk are found again for the same picture only."""
    prompt, other = case.prompts[3], case.prompts[1]
    first = VisionEngine(case.folder, folder=tmp_path)
    assert first.answer(prompt)[0] == case.wanted[3]
    first.end()
    second = VisionEngine(case.folder, folder=tmp_path)
    tokens, _, cached = second.answer(prompt)
    assert tokens == case.wanted[3] and cached > prompt.images[0].end - 8
    swapped = replace(prompt.images[0], digest=other.images[0].digest)
    rid = second.add(prompt.ids, PARAMS, images=[swapped])
    _, cached = second.run()[rid]
    assert cached <= prompt.images[0].start
    second.end()


@pytest.mark.parametrize("case", ["idefics3"], indirect=True)
def test_sleep_and_new_weights_include_the_tower(case: Case, tmp_path: Path) -> None:
    other = shutil.copytree(case.folder, tmp_path / "other")
    weights = load_file(other / "model.safetensors")
    of_tower = [name for name in weights if "vision_model" in name and weights[name].dim() > 1]
    for name in of_tower:
        weights[name] = weights[name].flip(-1).contiguous()
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    fresh = VisionEngine(other)
    changed = [fresh.answer(prompt)[1] for prompt in case.prompts]
    fresh.end()
    engine = VisionEngine(case.folder)
    known = [engine.answer(prompt)[1] for prompt in case.prompts]
    assert changed != known
    for level in (1, 2):
        assert engine.control(Sleep(level=level)).error is None
        assert engine.encodings.totals()["encoder_bytes"] == 0
        assert engine.control(WakeUp()).error is None
        assert [engine.answer(prompt)[1] for prompt in case.prompts] == known
    assert engine.control(UpdateWeights(model_path=str(other))).error is None
    assert [engine.answer(prompt)[1] for prompt in case.prompts] == changed
    engine.end()


@pytest.mark.parametrize("case", ["idefics3"], indirect=True)
def test_equal_bits_are_promised_for_texts_alone(case: Case) -> None:
    with pytest.raises(ValueError, match="--batch-invariant takes texts alone: add --disable-v"):
        VisionEngine(case.folder, batch_invariant=True, dtype="bfloat16", disable_cuda_graph=False)


@pytest.mark.parametrize("case", ["gemma3"], indirect=True)
def test_the_engine_in_process_reads_images(case: Case) -> None:
    llm = LLM(
        str(case.folder), dtype="float32", device="cpu", max_total_tokens=512, context_length=256,
        speculative_algorithm="none",
    )  # fmt: skip
    place = Preprocessor(str(case.folder)).family.placeholder
    texts = [f"{place} again", "No picture at all, only words."]
    found = llm.generate(texts, OFFLINE, images=[[FILES[1]], []])
    assert [each.token_ids for each in found] == case.wanted[1:3]
    with pytest.raises(ValueError, match="image 0: the file is no image"):
        llm.generate(texts[0], OFFLINE, images=[[b"text"]])
    url = f"data:image/png;base64,{base64.b64encode(FILES[1]).decode()}"
    content: list[dict[str, Any]] = [
        {"type": "text", "text": "What is it?"},
        {"type": "image_url", "image_url": {"url": url, "detail": "auto"}},
    ]
    answer = llm.chat([{"role": "user", "content": content}], OFFLINE)
    prompt = f"<|im_start|>user\nWhat is it?{place}<|im_end|>\n<|im_start|>assistant\n"
    wanted = llm.generate(prompt, OFFLINE, images=[[FILES[1]]])[0]
    assert answer.error is None and answer.prompt_ids == wanted.prompt_ids
    assert answer.token_ids == wanted.token_ids and wanted.cached_tokens
    with pytest.raises(ValueError, match=r"messages\[0\]\.content\[1\]\.image_url: move"):
        llm.chat([{"role": "system", "content": content}], OFFLINE)
    for wrong in ("http://a.example/cat.png", "data:image/png;base64,/"):
        content[1] = {"type": "image_url", "image_url": wrong}
        with pytest.raises(ValueError, match=r"messages\[0\]\.content\[1\]\.image_url"):
            llm.chat([{"role": "user", "content": content}], OFFLINE)


def test_totals_count_images_that_were_encoded_and_kept(case: Case) -> None:
    engine = VisionEngine(case.folder, disable_radix_cache=True)
    assert [engine.answer(case.prompts[3])[0] for _ in range(2)] == [case.wanted[3]] * 2
    stats = engine.engine._core.stats()
    assert (stats.encoded_images_total, stats.image_hits_total) == (1, 1)
    assert stats.encoder_seconds_total > 0 and stats.encoder_bytes > 0
    engine.end()
