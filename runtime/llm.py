"""`piecework.LLM`: the engine in the calling process, without HTTP, for scripts, tests and
measurements.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Sequence
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, cast

from .config.engine import EngineConfig, PassConfig
from .config.foreign_names import own_names
from .core.adapter_info import AdapterInfo
from .core.generation import FinishReason, TokenLogprob
from .core.images import ImageFile, ImageInput, Preprocess
from .core.messages import ProfileAnswer, StartProfile
from .core.sampling_params import SamplingParams
from .distributed.processes import start_ranks
from .engine.build import build_engine
from .engine.profiling import Profiler
from .files.resolve import resolve_model_path
from .loader.check import check_engine
from .lora.store import AdapterStore
from .tokenizer.conversation import conversation_text
from .tokenizer.image_marks import render_with_images
from .tokenizer.image_parts import take_images
from .tokenizer.output_processor import RequestOutput, RequestState, TextOptions, process_outputs
from .tokenizer.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from .multimodal.preprocess_process import Preprocessor

logger = logging.getLogger(__name__)

_MOST_PIXELS = 2**28  # The caller's own images.


class Completion:
    """One finished sequence."""

    def __init__(self, prompt_ids: list[int]) -> None:
        self.prompt_ids = prompt_ids
        self.text = ""
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: list[TokenLogprob | None] | None = None
        self.finish_reason: FinishReason | None = None
        self.cached_tokens = 0
        self.error: str | None = None

    def __repr__(self) -> str:
        counts = (
            f"prompt_tokens={len(self.prompt_ids)}, completion_tokens={len(self.token_ids)}, "
            f"cached_tokens={self.cached_tokens}"
        )
        error = f", error={self.error!r}" if self.error is not None else ""
        return (
            f"Completion(text={self.text!r}, "
            f"finish_reason={self.finish_reason and self.finish_reason.value!r}, {counts}{error})"
        )

    def add(self, output: RequestOutput) -> None:
        self.text += output.text
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs or []
        self.prompt_logprobs = (
            output.prompt_logprobs if output.prompt_logprobs is not None else self.prompt_logprobs
        )
        self.finish_reason, self.error = output.finish_reason, output.error
        self.cached_tokens = output.cached_tokens


class LLM:
    """An engine in this process.

    >>> llm = LLM("smollm2-135m")
    >>> params = SamplingParams(temperature=0, max_tokens=8)
    >>> llm.generate("The capital of France is", params)[0].text

    Keyword arguments are the fields of `EngineConfig`, or their names in vLLM (`foreign_names`).
    With `piecewise_cuda_graph=True`, pieces are compiled or loaded before the constructor returns.
    By default there are no pieces, unlike in a server. Raise `ValueError` with a remedy if a
    setting is wrong.
    """

    def __init__(
        self, model_path: str | None = None, *, progress: bool = False, **settings: Any
    ) -> None:
        named = {} if model_path is None else {"model_path": model_path}
        if isinstance(passes := settings.get("passes"), PassConfig):
            settings["passes"] = str(passes)
        # Pieces may exist at one start and not at another, which would change the last digits of
        # results. The process belongs to the caller, so it is not bound to cores by default.
        # Steps whose tokens depend on time would change the last digits too, and nothing reads an
        # answer as it grows.
        defaults: dict[str, Any] = {
            "piecewise_cuda_graph": False,
            "cpu_bind": "none",
            "mixed_step_seconds": 0.0,
        }
        self.config = EngineConfig(**defaults | own_names({**named, **settings}))
        for name in ("kv_events_config", "kv_disk", "kv_host_memory"):
            if getattr(self.config, name) is not None:
                raise ValueError(f"{name} needs an engine process: use it with `piecework serve`")
        path = resolve_model_path(self.config.model_path)
        check_engine(path, self.config)
        self.tokenizer = load_tokenizer(
            path,
            self.config.tokenizer_path,
            gguf_pre_tokenizer=self.config.gguf_pre_tokenizer,
        )
        ranks = start_ranks(self.config, logger.error)
        # Also if the constructor raises.
        weakref.finalize(self, ranks.close)
        self.core, runner, startup = build_engine(self.config, progress=progress, ranks=ranks)
        # There is no loop that could load pieces between batches.
        startup.complete(progress=progress)
        self.info, self._adapters, self._ranks = runner.info(), runner.adapters, ranks
        self._numbers = count()
        self._profiler = Profiler()
        # Made for the first prompt with an image.
        self._preprocessor: Preprocessor | None = None

    def generate(
        self,
        prompts: str | Sequence[int] | Sequence[str | list[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        text: TextOptions | None = None,
        *,
        adapters: str | Sequence[str] = "",
        images: Sequence[Sequence[bytes]] = (),
    ) -> list[Completion]:
        """Complete all prompts (texts or token ids) in one batch.

        `params` and `adapters` are for all prompts, or one per prompt. A single prompt gives a list
        of one. An adapter is a name of `lora_modules` or `load_adapter`; "": the base model.
        `images` are the files of each prompt's images, whose text has the model's placeholder for
        each (docs/images.md). Raise `ValueError` if a file is no image that can be read.
        """
        listed = _listed(prompts)
        own_params = (
            [params or SamplingParams()] * len(listed)
            if params is None or isinstance(params, SamplingParams)
            else list(params)
        )
        if len(own_params) != len(listed):
            raise ValueError(
                f"{len(listed)} prompts came with {len(own_params)} sampling parameters; give one "
                "for all, or one each"
            )
        own_adapters = [adapters] * len(listed) if isinstance(adapters, str) else list(adapters)
        if len(own_adapters) != len(listed):
            raise ValueError(f"{len(listed)} prompts came with {len(own_adapters)} adapters")
        if images and len(images) != len(listed):
            raise ValueError(f"{len(listed)} prompts came with {len(images)} lists of images")
        encoded = [
            self._encoded(prompt, [ImageFile(data=file) for file in files])
            for prompt, files in zip(listed, images or [()] * len(listed), strict=True)
        ]
        return self._complete(encoded, own_params, own_adapters, text)

    def _complete(
        self,
        prompts: Sequence[tuple[list[int], list[ImageInput]]],
        params: Sequence[SamplingParams],
        adapters: Sequence[str],
        text: TextOptions | None = None,
    ) -> list[Completion]:
        """Complete prompts with their images in one batch."""
        completions: list[Completion] = []
        live: dict[str, RequestState] = {}
        for (ids, found), own, adapter in zip(prompts, params, adapters, strict=True):
            request = RequestState(
                f"llm-{next(self._numbers):08d}",
                ids,
                own,
                self.tokenizer,
                text=text,
                arrival_time=time.monotonic(),
                adapter=self._identity(adapter),
                images=found,
            )
            completions.append(Completion(ids))
            request.deliver = completions[-1].add
            self.core.add(request.to_message())
            live[request.rid] = request
        while live:
            ended, to_abort = process_outputs(live, self.core.step().outputs)
            if self._profiler.is_running:
                self._profiler.step()
            for rid in ended:
                del live[rid]
            if to_abort:
                self.core.abort(to_abort)
        return completions

    def _encoded(
        self,
        prompt: str | list[int],
        files: Sequence[ImageFile],
        *,
        add_special_tokens: bool = True,
    ) -> tuple[list[int], list[ImageInput]]:
        """Return the ids and images of a prompt."""
        if not files:
            if not isinstance(prompt, str):
                return prompt, []
            return self.tokenizer.encode(prompt, add_special_tokens=add_special_tokens), []
        if not isinstance(prompt, str):
            raise ValueError("a prompt with images must be a text with placeholders, not token ids")
        asked = Preprocess(
            text=prompt,
            images=list(files),
            most_pixels=_MOST_PIXELS,
            add_special_tokens=add_special_tokens,
        )
        answer = self._image_preprocessor().answer(asked)
        if answer.error is not None:
            where = "" if answer.image is None else f"image {answer.image}: "
            raise ValueError(f"{where}{answer.error}")
        return answer.input_ids, answer.images

    def _image_preprocessor(self) -> Preprocessor:
        if self._preprocessor is None:
            # Imported here, because models of text need no decoders of images.
            from .multimodal.preprocess_process import Preprocessor

            config = self.config
            self._preprocessor = Preprocessor(
                config.model_path, config.tokenizer_path, config.mmproj, config.gguf_pre_tokenizer
            )
        return self._preprocessor

    def load_adapter(self, name: str, path: str) -> AdapterInfo:
        """Load an adapter (LoRA). Raise `ValueError` if it does not fit the model."""
        store = self._store()
        adapter = store.read(path)
        self._ranks.call("add_adapter", name, path, adapter.identity)
        return store.add(adapter, name, path)

    def _identity(self, name: str) -> str:
        """Return the identity of an adapter, or "" for the base model."""
        if not name:
            return ""
        known = {adapter.name: adapter.identity for adapter in self._store().infos()}
        if name not in known:
            raise ValueError(f"no adapter {name!r:.200} is loaded; there are {', '.join(known)}")
        return known[name]

    def _store(self) -> AdapterStore:
        if self._adapters is None:
            raise ValueError("adapters are off: give enable_lora=True or lora_modules")
        return self._adapters

    def start_profile(self, folder: str, **options: Any) -> str:
        """Profile the next steps by torch.profiler. Return the path of the trace that
        `stop_profile` will write.

        `options` are the other members of `StartProfile`. Raise `ValueError` if it cannot start.
        """
        return _path_of(self._profiler.start(StartProfile(folder=folder, **options)))

    def stop_profile(self) -> str:
        """Stop the profile and return the path of its trace.

        Raise `ValueError` if no profile is running.
        """
        answer = self._profiler.stop()
        self._profiler.wait()
        return _path_of(answer)

    def chat(
        self, messages: Sequence[dict[str, Any]], params: SamplingParams | None = None
    ) -> Completion:
        """Answer a conversation in OpenAI's format by the model's chat template, as a server does.

        Images are parts of the type image_url with data URLs. Raise `ValueError` if the template
        does not support the messages, or an image cannot be read.
        """
        templates = self.tokenizer.templates
        messages, files = take_images(messages)
        if files:
            place = self._image_preprocessor().family.placeholder
            render = partial(conversation_text, templates)
            text, order = render_with_images(templates, messages, place, render)
            files = [files[number] for number in order]
        else:
            text = conversation_text(templates, messages)
        prompt = self._encoded(text, files, add_special_tokens=False)
        return self._complete([prompt], [params or SamplingParams()], [""])[0]


def _path_of(answer: ProfileAnswer) -> str:
    if answer.path is None:
        raise ValueError(answer.error)
    return answer.path


def _listed(prompts: str | Sequence[int] | Sequence[str | list[int]]) -> list[str | list[int]]:
    """Return the prompts as a list. A text or a list of token ids is one prompt."""
    one = isinstance(prompts, str) or (
        len(prompts) > 0 and all(isinstance(prompt, int) for prompt in prompts)
    )
    listed = cast(Sequence[str | list[int]], [prompts] if one else prompts)
    return [prompt if isinstance(prompt, str) else list(prompt) for prompt in listed]
