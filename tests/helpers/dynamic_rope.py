"""A checkpoint with dynamic rotary positions: the one that tests/models/dynamic_rope.json was made with."""

import json
import shutil
from pathlib import Path

FIXTURE = Path(__file__).parents[1] / "models" / "fixtures" / "mha_old_config"
ROPE = {"rope_theta": 10000.0, "rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}


def dynamic_checkpoint(folder: Path) -> Path:
    """Returns a new folder of a model with an original context of 64 tokens."""
    copy = folder / "dynamic"
    shutil.copytree(FIXTURE, copy)
    config = json.loads((copy / "config.json").read_text()) | ROPE | {"max_position_embeddings": 64}
    (copy / "config.json").write_text(json.dumps(config))
    return copy
