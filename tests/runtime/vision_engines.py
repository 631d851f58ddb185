"""Engines of tiny models of images and text, and what transformers computes for their prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from text_engines import Engine
from transformers import AutoModelForImageTextToText
from transformers.modeling_outputs import MoeCausalLMOutputWithPast

from piecework.runtime.core.control_messages import Controlled
from piecework.runtime.core.images import ImageFile, ImageInput, Preprocess
from piecework.runtime.core.messages import StepOutput
from piecework.runtime.core.sampling_params import SamplingParams
from piecework.runtime.multimodal.preprocess_process import Preprocessor

if not hasattr(MoeCausalLMOutputWithPast, "image_outputs"):
    # transformers 5.24 asks Llama 4's text model for a member that its output lacks.
    MoeCausalLMOutputWithPast.image_outputs = None

PARAMS = SamplingParams(temperature=0.0, max_new_tokens=4, ignore_eos=True, logprobs=0)


class Prompt:
    """The ids and images of a text with placeholders."""

    def __init__(self, preprocessor: Preprocessor, text: str, *files: bytes) -> None:
        text = text.replace("IMAGE", preprocessor.family.placeholder)
        asked = Preprocess(
            text=text, images=[ImageFile(data=file) for file in files], most_pixels=10**7
        )
        answer = preprocessor.answer(asked)
        assert answer.error is None, answer.error
        self.ids: list[int] = answer.input_ids
        self.images: list[ImageInput] = answer.images


class VisionEngine(Engine):
    """A text engine that takes images.

    Attributes:
        logprobs: The log-probabilities of the tokens of each request.
    """

    def __init__(self, model: Path, **settings: Any) -> None:
        folder = settings.pop("folder", None)
        super().__init__(model, folder, **settings)
        self.logprobs: dict[str, list[float]] = {}
        self.errors: dict[str, str] = {}

    @property
    def encodings(self) -> Any:
        return self.engine._runner.images

    def step(self) -> None:
        for message in self.engine.step():
            if isinstance(message, Controlled):
                self.answers.append(message)
            for output in message.outputs if isinstance(message, StepOutput) else ():
                if output.error is not None:
                    self.errors[output.rid] = output.error
                    continue
                tokens = self.found.get(output.rid, ([], 0))[0] + output.token_ids
                self.found[output.rid] = tokens, output.cached_tokens
                known = self.logprobs.setdefault(output.rid, [])
                known += [each.logprob for each in output.logprobs or ()]
        self.engine._core.check()

    def send(self, prompt: Prompt, params: SamplingParams = PARAMS, **members: Any) -> str:
        return self.add(prompt.ids, params, images=prompt.images, **members)

    def answer(
        self, prompt: Prompt, params: SamplingParams = PARAMS
    ) -> tuple[list[int], list[float], int]:
        """Return the tokens, their log-probabilities, and how many of the prompt were cached."""
        rid = self.send(prompt, params)
        tokens, cached = self.run()[rid]
        return tokens, self.logprobs[rid], cached


class Reference:
    """Transformers' model of a folder."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForImageTextToText.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()

    @torch.inference_mode()
    def logprobs(self, prompt: Prompt, tokens: list[int]) -> list[float]:
        """Return the log-probabilities of tokens after a prompt."""
        ids = torch.tensor([prompt.ids + tokens])
        names = dict.fromkeys(name for image in prompt.images for name in image.tensors)
        kind = self.model.config.model_type
        is_padded = kind in ("llava_onevision", "llava_next", "gemma4")
        together = _stacked if is_padded else _together
        tensors = {
            name: together([i.tensors[name].array() for i in prompt.images]) for name in names
        }
        inputs: dict[str, Any] = {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            **tensors,
        }
        image_id = getattr(self.model.config, "image_token_id", None)
        inputs |= self.extra(ids, image_id)
        if self.model.config.model_type == "llava_onevision" and prompt.images:
            inputs["batch_num_images"] = [len(prompt.images)]
        logits = self.model(**inputs).logits[0].float().log_softmax(-1)
        first = len(prompt.ids) - 1
        return [float(logits[first + at, token]) for at, token in enumerate(tokens)]

    def extra(self, ids: torch.Tensor, image_id: int) -> dict[str, torch.Tensor]:
        """Return what some models read of the kinds of tokens."""
        kind = self.model.config.model_type
        if kind == "gemma3":
            return {"token_type_ids": (ids == image_id).long()}
        if kind == "gemma4" or kind.startswith("qwen"):
            return {"mm_token_type_ids": (ids == image_id).int()}
        return {}


def _stacked(arrays: list[np.ndarray]) -> torch.Tensor:
    """Return tensors along a first dimension. Tiles are padded, and rows of patches, at position
    -1.
    """
    if arrays[0].ndim in (3, 5):
        most = max(array.shape[1] for array in arrays)
        padding = -1 if arrays[0].dtype == np.int64 else 0
        arrays = [
            np.pad(
                array,
                [(0, 0), (0, most - array.shape[1])] + [(0, 0)] * (array.ndim - 2),
                constant_values=padding,
            )
            for array in arrays
        ]
    return torch.from_numpy(np.concatenate(arrays))


def _together(arrays: list[np.ndarray]) -> torch.Tensor:
    """Return the tensors of images as those of one prompt: side by side, padded with 0."""
    axis = 1 if arrays[0].ndim > 3 and arrays[0].shape[0] == 1 and arrays[0].ndim == 5 else 0
    if arrays[0].ndim == 4 and arrays[0].dtype == np.bool_:
        axis = 1
    if arrays[0].ndim > 3:
        most = np.max([array.shape[-2:] for array in arrays], axis=0)
        arrays = [
            np.pad(
                array,
                [(0, 0)] * (array.ndim - 2)
                + [(0, size - own) for size, own in zip(most, array.shape[-2:], strict=True)],
            )
            for array in arrays
        ]
    return torch.from_numpy(np.concatenate(arrays, axis=axis))
