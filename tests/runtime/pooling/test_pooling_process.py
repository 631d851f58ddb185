"""What the engine process of a pooling model does where it is asked for nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from idle_mailbox import idle_mailbox
from tiny_encoders import make_tiny_encoder

from piecework.kernels.platform import Platform
from piecework.runtime.pooling.config import PoolingConfig
from piecework.runtime.pooling.engine_process import PoolingProcess


@pytest.mark.parametrize(("looks", "rests"), [(0, 0), (1, 1), (4, 1)])
def test_memory_is_given_back_after_loading_and_once_at_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, looks: int, rests: int
) -> None:
    given: list[bool] = []
    monkeypatch.setattr(Platform, "give_back_memory", lambda self: given.append(True))
    config = PoolingConfig(model_path=str(make_tiny_encoder(tmp_path, "bert")), num_threads=1)
    process = PoolingProcess(config, idle_mailbox(looks))
    assert len(given) == 1
    process.run()
    assert len(given) == 1 + rests
