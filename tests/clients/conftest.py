"""One real server for every client library; `pip install -e .[clients]` brings these."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from server_process import NO_PIECES, ready

FLAGS = ["--num-threads", "1", "--max-total-tokens", "8192", "--log-level", "warning", NO_PIECES]


@pytest.fixture(scope="session")
def base_url() -> Iterator[str]:
    """Of a server of a small model that follows instructions; without `/v1`."""
    with ready("smollm2-135m", common=FLAGS) as server:
        yield server.url
