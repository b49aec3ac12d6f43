"""Adapters as PEFT writes them, random ones, and what a model becomes when one is merged into it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx
from safetensors.numpy import save_file

from jax_paged.models.features.lora.adapter_files import AdapterLimits, read_adapter
from jax_paged.models.features.lora.layers import lora_maps
from jax_paged.models.weights import load_model

ADAPTERS = Path(__file__).parents[1] / "models" / "adapters"
FIXTURES = ADAPTERS.parent / "fixtures"
CONFIG: dict[str, Any] = {"peft_type": "LORA", "lora_alpha": 4, "bias": "none", "task_type": "CAUSAL_LM"}


def reference(name: str) -> dict[str, Any]:
    """Returns what PEFT has computed with an adapter of tests/models/adapters."""
    return json.loads((ADAPTERS / name / "reference.json").read_text())


def limits_of(base: Path, **changes: Any) -> AdapterLimits:
    """Returns what adapters of a checkpoint must fit."""
    model = load_model(base, "float32").model
    maps = {m.name: (m.num_in, m.num_out) for m in lora_maps(model)}
    known = {"max_rank": 16, "hidden_size": 64, "max_prompt_tokens": 100, "dtype": "float32"}
    return AdapterLimits(**({"maps": maps} | known | changes))


def write(folder: Path, tensors: dict[str, np.ndarray], **config: Any) -> Path:
    """Writes an adapter; returns its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG | config))
    return folder


def write_random(folder: Path, base: Path, rank: int, seed: int, scale: float = 0.3) -> Path:
    """Writes a random adapter of all linear maps of a checkpoint; returns its folder."""
    rng, tensors = np.random.default_rng(seed), {}
    for name, (num_in, num_out) in limits_of(base).maps.items():
        for letter, shape in (("A", (rank, num_in)), ("B", (num_out, rank))):
            key = f"base_model.model.{name}.lora_{letter}.weight"
            tensors[key] = rng.normal(0, scale, shape).astype(np.float32)
    return write(folder, tensors, r=rank, target_modules="all-linear")


def merged(base: Path, adapter: Path) -> Any:
    """Returns a dense model into whose weights an adapter was added, in float64."""
    model = load_model(base, "float32").model
    read = read_adapter(adapter, limits_of(base))
    paths = {m.name: m.path for m in lora_maps(model)}
    modules = {".".join(map(str, path)): module for path, module in nnx.iter_modules(model)}
    for name, (a, b) in read.pairs.items():
        kernel: Any = modules[paths[name]].kernel
        added = np.asarray(kernel[...], np.float64) + a.astype(np.float64) @ b.astype(np.float64)
        kernel[...] = added.astype(np.float32)
    return model
