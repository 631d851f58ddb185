"""Makes the helper modules of this folder importable by its tests; one thread, for the models are tiny."""

import sys
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parent))
torch.set_num_threads(1)
