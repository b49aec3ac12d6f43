"""A Llama in NumPy float64, written from the formulas: what an engine has in its pool and draws from."""

import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
from safetensors.numpy import load_file


class Forward(NamedTuple):
    """What a forward pass has computed: T tokens, L layers.

    Args:
        logits: [T, V].
        keys: L of [T, K, D], rotated.
        values: L of [T, K, D].
        attention: L of [H, T, T], probabilities.
        hidden: L + 1 of [T, E], what goes into each layer, and what comes out of the last.
    """

    logits: np.ndarray
    keys: list[np.ndarray]
    values: list[np.ndarray]
    attention: list[np.ndarray]
    hidden: list[np.ndarray]


def forward(folder: Path, tokens: list[int], visible: np.ndarray | None = None) -> Forward:
    """Computes a text.

    Args:
        folder: A checkpoint in Hugging Face layout, float32, without tied embeddings.
        tokens: The text.
        visible: bool [T, T], whether a token (row) may attend to another; None for all before it, and itself.
    """
    config = json.loads((folder / "config.json").read_text())
    weights = {name: w.astype(np.float64) for name, w in load_file(folder / "model.safetensors").items()}
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim, n = config["hidden_size"] // heads, len(tokens)
    visible = np.tril(np.ones((n, n), bool)) if visible is None else visible
    angles = np.arange(n)[:, None] * config["rope_theta"] ** (-np.arange(0, head_dim, 2) / head_dim)

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + config["rms_norm_eps"]) * weights[name]

    def rotate(x: np.ndarray) -> np.ndarray:
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        first, second = np.split(x, 2, -1)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)

    x, out = weights["model.embed_tokens.weight"][tokens], Forward(np.empty(0), [], [], [], [])
    for i in range(config["num_hidden_layers"]):
        out.hidden.append(x)
        prefix = f"model.layers.{i}."
        h = norm(x, prefix + "input_layernorm.weight")
        q, k, v = (
            (h @ weights[f"{prefix}self_attn.{name}_proj.weight"].T).reshape(n, -1, head_dim)
            for name in "qkv"
        )
        q, k = rotate(q), rotate(k)
        every_k, every_v = (np.repeat(y, heads // kv_heads, axis=1) for y in (k, v))
        scores = np.einsum("thd,nhd->htn", q, every_k) / np.sqrt(head_dim)
        scores = np.exp(
            np.where(visible, scores, -np.inf) - scores.max(-1, keepdims=True, where=visible, initial=-np.inf)
        )
        attention = scores / scores.sum(-1, keepdims=True)
        mixed = np.einsum("htn,nhd->thd", attention, every_v).reshape(n, -1)
        x = x + mixed @ weights[prefix + "self_attn.o_proj.weight"].T
        h = norm(x, prefix + "post_attention_layernorm.weight")
        gate = h @ weights[prefix + "mlp.gate_proj.weight"].T
        up = h @ weights[prefix + "mlp.up_proj.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ weights[prefix + "mlp.down_proj.weight"].T
        out.keys.append(k)
        out.values.append(v)
        out.attention.append(attention)
    out.hidden.append(x)
    return out._replace(logits=norm(x, "model.norm.weight") @ weights["lm_head.weight"].T)
