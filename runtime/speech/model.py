"""A loaded speech model: it hears windows of audio and gives the logits of the next tokens."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch
from transformers.models.whisper.feature_extraction_whisper import WhisperFeatureExtractor
from transformers.models.whisper.tokenization_whisper import LANGUAGES, WhisperTokenizer

from ...compilation.piece_store import weight_bytes
from ...kernels.attention import AttentionMetadata
from ...kernels.platform.detect import detect
from ...kernels.platform.platform import Platform
from ...kernels.varlen_attention import VarlenAttention
from ..cache.pool import KVPool
from ..core.forward_context import PagedAttention
from ..core.speech_messages import SAMPLE_RATE, SpeechInfo
from ..files.resolve import find_model
from ..layers.attention import register_attention
from ..pooling.packing import pack_numbers
from .config import SpeechConfig
from .folder import ARCHITECTURE, SpeechFolder, read_speech_folder
from .loading import load_whisper
from .whisper import LayerCache, TextStep


class SpeechModel:
    """Maps audio to text. Raises `ValueError` with a remedy.

    A window of audio is heard in a slot, which keeps its keys and values and those of its text:

        states = model.encode(model.spectrogram(audio))
        model.hear(slot, states)
        logits = model.read(slot, [start, language, task])
        while ...:
            logits = model.step([token], [position])  # The first slots get a token each.
    """

    def __init__(self, config: SpeechConfig) -> None:
        began = time.perf_counter()
        self.config = config
        self.folder: SpeechFolder = read_speech_folder(find_model(config.model_path))
        self.tokenizer = load_tokenizer(self.folder)
        sizes = self.folder.sizes
        self.platform: Platform = detect(config.device)
        self.platform.set_up(config.num_threads)
        register_attention(self.platform.dispatch_key)
        self.device = self.platform.device()
        self.dtype: torch.dtype = (
            self.platform.default_dtype if config.dtype == "auto" else getattr(torch, config.dtype)
        )
        backend = self.platform.attention_backend()
        kernels = self.platform.linear_kernels(self.dtype, backend)
        self._whisper = load_whisper(self.folder, self.dtype, self.device, kernels)
        self._weight_bytes = weight_bytes(self._whisper)
        pack_numbers(self._whisper, self.platform)
        layouts = self._whisper.encoder_layouts(self.dtype)
        # Attention needs a cache, so there is one page. Nothing is kept in it.
        cache = KVPool(layouts, num_pages=1, page_size=1, platform=self.platform)
        self._attention = PagedAttention(backend=VarlenAttention(), pool=cache)
        self._nothing = torch.empty(0, dtype=torch.int64)
        self.slots = config.max_running_requests
        self._caches = [self._make_cache() for _ in range(sizes.decoder_layers)]
        self._extractor = WhisperFeatureExtractor(
            feature_size=sizes.num_mel_bins, chunk_length=self.folder.window_seconds
        )
        self.platform.give_back_memory()
        self._load_seconds = time.perf_counter() - began

    def _make_cache(self) -> LayerCache:
        sizes, make = self.folder.sizes, self.platform.zeros
        heads = sizes.decoder_attention_heads
        text, audio = (
            (self.slots, heads, positions, sizes.d_model // heads)
            for positions in (sizes.max_target_positions, sizes.max_source_positions)
        )
        return LayerCache(*(make(shape, self.dtype) for shape in (text, text, audio, audio)))

    def spectrogram(self, audio: bytes) -> torch.Tensor:
        """Return the spectrogram [mels, frames] of a window: float32, on the host."""
        samples = np.frombuffer(audio, "<i2").astype(np.float32) / 2**15
        found = self._extractor(samples, sampling_rate=SAMPLE_RATE, return_tensors="pt")
        spectrogram: torch.Tensor = found["input_features"][0]
        return spectrogram

    @torch.inference_mode()
    def encode(self, spectrogram: torch.Tensor) -> torch.Tensor:
        """Return the states [S, C] of a window's spectrogram."""
        length = self.folder.sizes.max_source_positions
        metadata = AttentionMetadata(
            query_lens=[length],
            seq_lens=[length],
            block_table=self._nothing,
            slot_mapping=self._nothing,
        )
        with self._attention.step(metadata):
            return self._whisper.encode(spectrogram[None].to(self.device, self.dtype))

    @torch.inference_mode()
    def hear(self, slot: int, states: torch.Tensor) -> None:
        """Keep the keys and values of a window's states in a slot."""
        self._whisper.hear(states, self._caches, slot)

    @torch.inference_mode()
    def read(self, slot: int, ids: Sequence[int], rows: Sequence[int] = (-1,)) -> torch.Tensor:
        """Read the beginning of a text into a slot. Return the logits [rows, vocab] after these of
        its tokens: float32, on the host.
        """
        states = self._read(slot, ids, None)
        return self._whisper.logits(states[list(rows)]).cpu()

    @torch.inference_mode()
    def step(self, ids: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
        """Append a token to each of the first slots. Return logits [slots, vocab]: float32, on the
        host.
        """
        places = torch.tensor(positions)
        longest = max(positions) + 1
        mask = None
        if min(positions) + 1 < longest:
            unseen = torch.arange(longest) > places[:, None]
            mask = torch.zeros(unseen.shape, dtype=self.dtype).masked_fill_(unseen, -torch.inf)
            mask = mask[:, None, None].to(self.device)
        step = TextStep(places.to(self.device), longest, mask)
        states = self._whisper.decode(
            torch.tensor(ids, device=self.device)[:, None], self._caches, step
        )
        return self._whisper.logits(states).cpu()

    @torch.inference_mode()
    def alignment(self, slot: int, ids: Sequence[int]) -> torch.Tensor:
        """Return the weights [alignment heads, tokens, S] with which each token of a text looks at
        the audio of a slot: float32, on the host.
        """
        found: dict[int, torch.Tensor] = {}
        self._read(slot, ids, lambda layer, weights: found.update({layer: weights[0]}))
        heads = [found[layer][head] for layer, head in self.folder.alignment_heads]
        return torch.stack(heads).cpu()

    def move(self, source: int, target: int) -> None:
        """Copy what one slot keeps to another."""
        for cache in self._caches:
            for tensor in cache:
                tensor[target] = tensor[source]

    def _read(self, slot: int, ids: Sequence[int], watch: object) -> torch.Tensor:
        own = slice(slot, slot + 1)
        caches = [LayerCache(*(tensor[own] for tensor in cache)) for cache in self._caches]
        positions = torch.zeros(1, dtype=torch.int64, device=self.device)
        step = TextStep(positions, len(ids), watch=watch)  # type: ignore[arg-type]
        return self._whisper.decode(torch.tensor([ids], device=self.device), caches, step)

    def info(self) -> SpeechInfo:
        return SpeechInfo(
            model_path=self.config.model_path,
            architecture=ARCHITECTURE,
            dtype=str(self.dtype).removeprefix("torch."),
            device=self.platform.device_type,
            window_seconds=self.folder.window_seconds,
            languages={code: LANGUAGES.get(code, code) for code in self.folder.languages},
            vocab_size=self.folder.sizes.vocab_size,
            max_running_requests=self.slots,
            weight_bytes=self._weight_bytes,
            load_seconds=self._load_seconds,
            remarks=self.platform.remarks(),
        )


def load_tokenizer(folder: SpeechFolder) -> WhisperTokenizer:
    """Return the tokenizer. Raises `ValueError` that names the folder."""
    try:
        return WhisperTokenizer.from_pretrained(str(folder.path))
    except Exception as error:  # The library raises errors of many kinds for broken files.
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"{folder.path}: the tokenizer cannot be read ({reason}); download the model again"
        ) from None
