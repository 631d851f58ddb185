"""What every test can use: helper modules beside the tests, and few threads."""

from __future__ import annotations

import sys
from pathlib import Path

_TESTS = Path(__file__).parent
# Test files import their helper modules (toy_runner, tiny_models, ...) by plain name.
sys.path[:0] = [str(_TESTS), str(_TESTS / "runtime"), str(_TESTS / "runtime" / "weights"), str(_TESTS / "server")]
