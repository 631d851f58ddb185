"""The encoded images of an engine: which are known, which are being encoded, and what a step reads.

Images are encoded between steps, in the order in which requests need them. A request computes its
tokens up to the first image that is not encoded yet, and waits there.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import nn

from ...kernels.span_attention import Span
from ...kernels.staging import to_device
from ..core.forward_context import layer_begins
from ..core.images import ImageInput
from ..core.request import Request, Scheduled
from ..core.step_images import StepImages
from ..layers.rotary import Rotary
from .family import ImageFamily
from .pace import Pace

# The tensors of `StepImages.stages` for all rows of an image.
Stages = list[torch.Tensor]


class Job(Protocol):
    """An image on its way through the encoder (`pieces.Pieces`)."""

    result: Stages | None

    @property
    def is_done(self) -> bool: ...

    def advance(self) -> int:
        """Compute a piece. Return how many numbers it multiplied."""
        ...


class Encoded(NamedTuple):
    """The result of the encoder for an image: `StepImages.stages` for all of its rows."""

    stages: Stages

    @property
    def num_bytes(self) -> int:
        return sum(stage.nbytes for stage in self.stages)


class Encodings:
    """The encoder of a model, and its results by the digests of images.

    Every rank has its own. All ranks encode the same images between the same steps.

    Attributes:
        tower: The modules.
        rotary: The model's table of rotations, if its family has `turns`.
        pace: How much rank 0 lets all ranks encode between two steps.
        most_bytes: Results of at most these bytes are kept.
        encode_largest: Encodes as much of a large image as is encoded at once.
        images_total: Number of images that were encoded.
        hits_total: Number of images of new requests whose result was kept.
        seconds_total: Time between steps in which images were encoded.
        encoding_for: Requests that need the image which `advance` encodes, or encoded last.
    """

    def __init__(
        self,
        tower: nn.Module,
        family: ImageFamily,
        encode: Callable[[ImageInput], Job],
        encode_largest: Callable[[], None],
        device: torch.device,
        *,
        pace: Pace,
        most_bytes: int,
    ) -> None:
        """`encode` makes the job of an image."""
        self.tower, self.family = tower, family
        self._encode, self._device = encode, device
        self.encode_largest = encode_largest
        self.pace, self.most_bytes = pace, most_bytes
        self._known: OrderedDict[bytes, Encoded] = OrderedDict()
        self._known_bytes = 0
        # What the last plan lacked, in the order of its requests.
        self._wanted: dict[bytes, ImageInput] = {}
        self._askers: dict[bytes, dict[Request, None]] = {}
        self._needed: set[bytes] = set()
        self._jobs: dict[bytes, Job] = {}
        self.rotary: Rotary | None = None
        self.images_total = self.hits_total = 0
        self.seconds_total = 0.0
        self.encoding_for: list[Request] = []

    @property
    def pending(self) -> bool:
        """Whether an image is to be encoded."""
        return bool(self._wanted)

    def check(self, images: Sequence[ImageInput], num_prompt: int) -> None:
        """Raise `ValueError` if images are not those of a prompt of this model."""
        end = 0
        for image in images:
            is_inside = image.start >= end and image.length > 0 and image.end <= num_prompt
            rows = image.rows
            in_order = all(a < b for a, b in pairwise(rows))
            if not is_inside or (rows and not (rows[0] == 0 and rows[-1] == image.length - 1)):
                raise ValueError("an image lies outside of the prompt, or before another one")
            if not in_order or self.family.tensors[0] not in image.tensors:
                raise ValueError("an image is not one that the model's processor made")
            end = image.end

    def prepare(self, request: Request) -> None:
        """Set the positions by which the tokens of a new request are rotated."""
        self.hits_total += sum(image.digest in self._known for image in request.images)
        if request.images and (turns := self.family.turns(request.num_prompt, request.images)):
            request.turns, request.turn_shift = turns

    def ready(self, request: Request, num_new: int) -> int:
        """Return how many of the next `num_new` tokens can be computed: those before the first
        image that is not encoded. Remember that this image and later ones are needed.

        May return more than `num_new`, so that no step ends within an image that must be whole.
        """
        begin = request.num_computed
        if begin >= request.images_end:
            return num_new
        ready = num_new
        for image in request.images:
            if image.end <= begin:
                continue
            self._needed.add(image.digest)
            if image.digest not in self._known:
                self._wanted.setdefault(image.digest, image)
                self._askers.setdefault(image.digest, {})[request] = None
                ready = min(ready, max(0, image.start - begin))
        if self.family.sees_ahead:
            for image in request.images:
                if image.start < begin + ready < image.end:
                    # Such an image is computed in one step, even if that is longer than asked.
                    ready = image.start - begin if image.start > begin else image.end - begin
        return ready

    def totals(self) -> dict[str, Any]:
        """Return the fields of `EngineStats` about images."""
        return {
            "encoded_images_total": self.images_total,
            "image_hits_total": self.hits_total,
            "encoder_seconds_total": self.seconds_total,
            "encoder_bytes": self._known_bytes,
        }

    def advance(self, allowance: float) -> None:
        """Encode as much as rank 0's `Pace` allows, at least one piece.

        Call it before a step is planned. The plan states again which images it needs.
        """
        began = time.perf_counter()
        spent = last = 0
        try:
            for job, askers in self._next_jobs():
                self.encoding_for[:] = askers
                while not job.is_done:
                    # The next piece is probably like the last one.
                    if spent and spent + last > allowance:
                        return
                    layer_begins()
                    last = self._piece(job)
                    spent += last
        finally:
            seconds = time.perf_counter() - began
            self.seconds_total += seconds
            self.pace.encoded(spent, seconds)

    def _piece(self, job: Job) -> int:
        """Compute a piece. If it raises, the image is encoded from its beginning when needed."""
        try:
            return job.advance()
        except BaseException:
            self._jobs = {digest: each for digest, each in self._jobs.items() if each is not job}
            raise

    def forget(self, request: Request) -> None:
        """Drop what is only kept because of a request that has ended."""
        for digest in [each for each, askers in self._askers.items() if request in askers]:
            del self._askers[digest][request]
            if not self._askers[digest]:
                del self._askers[digest], self._wanted[digest]
                self._jobs.pop(digest, None)

    def _next_jobs(self) -> Iterator[tuple[Job, list[Request]]]:
        """Yield the jobs of the images that the last plan lacked, with the requests that need them.
        Keep the result of each that is done when the next one is asked for.
        """
        wanted, askers, needed = self._wanted, self._askers, self._needed
        self._wanted, self._askers, self._needed = {}, {}, set()
        self._jobs = {digest: job for digest, job in self._jobs.items() if digest in wanted}
        for digest, image in wanted.items():
            if digest not in self._jobs:
                self._jobs[digest] = self._encode(image)
            yield self._jobs[digest], list(askers[digest])
            stages = self._jobs.pop(digest).result
            assert stages is not None
            self._keep(digest, Encoded(stages), needed)
            if self._known_bytes >= self.most_bytes:
                # Results that the next steps read would be dropped for further ones.
                return

    def of_step(self, scheduled: list[Scheduled]) -> StepImages | None:
        """Return the rows of images of a step, or None if it has none."""
        rows: list[np.ndarray] = []
        turns: list[np.ndarray] = []
        parts: list[list[torch.Tensor]] = []
        first, spans = 0, list[Span]()
        for number, (request, num_new) in enumerate(scheduled):
            begin, end = request.num_computed, request.num_computed + num_new
            for image in request.images if begin < request.images_end else ():
                own = np.array(image.rows or range(image.length)) + image.start
                inside = np.flatnonzero((own >= begin) & (own < end))
                if not len(inside):
                    continue
                self._known.move_to_end(image.digest)
                cut = slice(int(inside[0]), int(inside[-1]) + 1)
                rows.append(own[cut] - begin + first)
                parts.append([stage[cut] for stage in self._known[image.digest].stages])
                if self.family.sees_ahead:
                    at = max(begin, image.start)
                    spans.append(Span(number, first + at - begin, at, image.end, image.start))
                if request.turns is not None:
                    begin_of_image = int(request.turns[image.start])
                    turns.append(self.family.turned_rows(image, begin_of_image)[:, cut])
            first += num_new
        if not rows:
            return None
        (places,) = to_device([np.concatenate(rows)], self._device)
        stages = [torch.cat(stage) for stage in zip(*parts, strict=True)]
        if not turns:
            return StepImages(rows=places, stages=stages, spans=spans)
        cos, sin = self._rotation(np.concatenate(turns, axis=1))
        return StepImages(rows=places, stages=stages, turned_rows=places, cos=cos, signed_sin=sin)

    def _rotation(self, positions: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and signed_sin [rows, 1, R] of positions [axes, rows]."""
        assert self.rotary is not None
        tables = self.rotary.cos, self.rotary.signed_sin
        axes = self.family.axes(tables[0].shape[-1] // 2)
        (chosen,) = to_device([positions[np.tile(axes, 2)].T.copy()], self._device)
        cos, sin = (table[:, 0].gather(0, chosen)[:, None] for table in tables)
        return cos, sin

    def clear(self) -> None:
        """Drop all results, for example because the weights change."""
        self._known.clear()
        self._known_bytes = 0
        self._jobs.clear()

    def _keep(self, digest: bytes, encoded: Encoded, needed: set[bytes]) -> None:
        self.images_total += 1
        self._known[digest] = encoded
        self._known_bytes += encoded.num_bytes
        for old in [each for each in self._known if each not in needed and each != digest]:
            if self._known_bytes <= self.most_bytes:
                break
            self._known_bytes -= self._known.pop(old).num_bytes
