"""EAGLE-3 heads for tests: random ones, trained ones, and one in NumPy float64, from the formulas."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from helpers.numpy_llama import forward
from helpers.real_model import VOCAB_SIZE
from safetensors.numpy import load_file, save_file

from jax_paged.models.attention import dense_attention
from jax_paged.models.families.eagle import DraftLogitIndex, EagleConfig, EagleHead
from jax_paged.models.families.llama import LlamaForCausalLM
from jax_paged.models.features.hooks import recording_hooks
from jax_paged.models.loading.weight_reading import weights_of

# What a token attends to in a model, and an entry in its head; None for all.
Windows = tuple[int | None, int | None]
# Of the checkpoint of real_model; its heads and rotations are others, and it has room for fewer tokens.
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "draft_vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-4,
    "rope_theta": 500.0,
    "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
}


def random_tensors(config: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """Returns the tensors of a random head: norms are random, too, as ones hide mistakes."""
    rng = np.random.default_rng(seed)
    size, inner = config["hidden_size"], config["intermediate_size"]
    head_dim, vocab_size = config["head_dim"], config["draft_vocab_size"]
    width, kv_width = (config[f"num_{name}_heads"] * head_dim for name in ("attention", "key_value"))
    shapes = {
        "fc.weight": (size, 3 * config.get("target_hidden_size", size)),
        "midlayer.self_attn.q_proj.weight": (width, 2 * size),
        "midlayer.self_attn.k_proj.weight": (kv_width, 2 * size),
        "midlayer.self_attn.v_proj.weight": (kv_width, 2 * size),
        "midlayer.self_attn.o_proj.weight": (size, width),
        "midlayer.mlp.gate_proj.weight": (inner, size),
        "midlayer.mlp.up_proj.weight": (inner, size),
        "midlayer.mlp.down_proj.weight": (size, inner),
        "lm_head.weight": (vocab_size, size),
    }
    norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    tensors = {name: rng.normal(0, 0.3, shape) for name, shape in shapes.items()}
    tensors |= {f"midlayer.{name}.weight": rng.normal(1, 0.2, size) for name in norms}
    tensors["norm.weight"] = rng.normal(1, 0.2, size)
    tensors = {name: x.astype(np.float32) for name, x in tensors.items()}
    ids = np.sort(rng.permutation(config["vocab_size"])[:vocab_size])
    return tensors | vocabulary(ids, config["vocab_size"])


def vocabulary(ids: np.ndarray, vocab_size: int) -> dict[str, np.ndarray]:
    """Returns the tensors that say which tokens a head can draft."""
    return {"d2t": ids - np.arange(len(ids)), "t2d": np.isin(np.arange(vocab_size), ids)}


def write_head(folder: Path, config: dict[str, Any], tensors: dict[str, np.ndarray]) -> Path:
    """Writes a checkpoint; returns its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def _visible(n: int, window: int | None) -> np.ndarray:
    distance = np.arange(n)[:, None] - np.arange(n)
    return (distance >= 0) & (distance < (window or n))


class NumpyHead:
    """A head in float64, without a cache: every pass computes the whole text.

    Args:
        folder: The head's checkpoint; its config.json names the layers whose inputs it reads.
        target: That of the model; float32, without tied embeddings.
        windows: Tokens that a token attends to in the model, and an entry in the head; None for all.
    """

    def __init__(self, folder: Path, target: Path, windows: Windows = (None, None)) -> None:
        self._config = json.loads((folder / "config.json").read_text())
        self._w = {k: w.astype(np.float64) for k, w in load_file(folder / "model.safetensors").items()}
        self._target, self._windows = target, windows
        self._embedding = load_file(target / "model.safetensors")["model.embed_tokens.weight"].astype(float)
        self._ids = np.arange(len(self._w["d2t"])) + self._w["d2t"].astype(np.int64)

    def drafts(self, tokens: list[int], num_drafts: int) -> tuple[list[int], float]:
        """Returns the greedy drafts behind a text, and by how much the best lead at least.

        Args:
            tokens: The text; of the last token nothing is computed yet.
            num_drafts: How many.
        """
        embedding, layers = self._embedding, self._config["eagle_aux_hidden_state_layer_ids"]
        hidden = forward(self._target, tokens[:-1], _visible(len(tokens) - 1, self._windows[0])).hidden
        features = np.concatenate([hidden[i] for i in layers], axis=1) @ self._w["fc.weight"].T
        behind, drafts, lead = tokens[1:], [], np.inf
        for _ in range(num_drafts):
            last = self._pass(embedding[behind], features)[-1]
            logits = self._norm(last, "norm") @ self._w["lm_head.weight"].T
            best = np.sort(logits)
            lead = min(lead, best[-1] - best[-2])
            drafts.append(int(self._ids[np.argmax(logits)]))
            behind, features = [*behind, drafts[-1]], np.concatenate([features, last[None]])
        return drafts, float(lead)

    def _norm(self, x: np.ndarray, name: str) -> np.ndarray:
        eps = self._config["rms_norm_eps"]
        return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + eps) * self._w[f"{name}.weight"]

    def _pass(self, embedded: np.ndarray, features: np.ndarray) -> np.ndarray:
        """Returns the hidden states of all entries; the entry at position p is that of token p + 1."""
        config, w, n = self._config, self._w, len(embedded)
        head_dim = config["head_dim"]
        angles = np.arange(n)[:, None] * config["rope_theta"] ** (-np.arange(0, head_dim, 2) / head_dim)

        def rotate(x: np.ndarray) -> np.ndarray:
            cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
            first, second = np.split(x, 2, -1)
            return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)

        normed = self._norm(features, "midlayer.hidden_norm")
        x = np.concatenate([self._norm(embedded, "midlayer.input_layernorm"), normed], axis=1)
        q, k, v = (
            (x @ w[f"midlayer.self_attn.{name}_proj.weight"].T).reshape(n, -1, head_dim) for name in "qkv"
        )
        q, k = rotate(q), rotate(k)
        k, v = (np.repeat(y, q.shape[1] // y.shape[1], axis=1) for y in (k, v))
        scores = np.einsum("thd,nhd->htn", q, k) / np.sqrt(head_dim)
        scores = np.where(_visible(n, self._windows[1]), scores, -np.inf)
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = np.einsum("htn,nhd->thd", scores / scores.sum(-1, keepdims=True), v).reshape(n, -1)
        h = normed if config.get("norm_before_residual") else features
        h = h + mixed @ w["midlayer.self_attn.o_proj.weight"].T
        y = self._norm(h, "midlayer.post_attention_layernorm")
        gate = y @ w["midlayer.mlp.gate_proj.weight"].T
        up = y @ w["midlayer.mlp.up_proj.weight"].T
        return h + (gate / (1 + np.exp(-gate)) * up) @ w["midlayer.mlp.down_proj.weight"].T


def trained_tensors(
    model: LlamaForCausalLM,
    config: dict[str, Any],
    texts: list[list[int]],
    num_prompt: list[int],
    *,
    num_steps: int,
    batch: int,
    rate: float = 1e-2,
    num_passes: int = 3,
) -> dict[str, np.ndarray]:
    """Trains a head on what a model has written; returns its tensors.

    Passes behind the first see the hidden states of the one before, as they do when drafts are made.

    Args:
        model: The model that it is to draft for.
        config: As in config.json.
        texts: Prompts and outputs.
        num_prompt: Tokens of each prompt, which are not learned.
        num_steps: Of the optimiser.
        batch: Texts of a step.
        rate: Of learning, at its height.
        num_passes: Passes that are trained.
    """
    shape = EagleConfig.from_hf(config)
    length = max(map(len, texts))
    tokens, is_output = np.zeros((len(texts), length), np.int32), np.zeros((len(texts), length), bool)
    for i, (text, first) in enumerate(zip(texts, num_prompt, strict=True)):
        tokens[i, : len(text)] = text
        is_output[i, first : len(text)] = True
    counts = np.bincount(tokens[is_output], minlength=shape.vocab_size)
    ids = np.sort(np.argsort(-counts, kind="stable")[: shape.draft_vocab_size])
    columns = np.full(shape.vocab_size, shape.draft_vocab_size, np.int32)
    columns[ids] = np.arange(len(ids))
    dtype = model.embed_tokens.embedding.dtype
    head = EagleHead(shape, has_embedding=False, dtype=jnp.dtype("float32"), rngs=nnx.Rngs(0))
    head.columns = DraftLogitIndex(jnp.asarray(columns))
    paths = shape.feature_paths(model.config.num_hidden_layers)

    @nnx.jit
    def features_of(model: LlamaForCausalLM, tokens: jax.Array) -> tuple[jax.Array, ...]:
        found: dict[str, jax.Array] = {}
        context = model.dense_context(tokens)
        model.hidden(
            tokens,
            context.__class__(
                model, context.positions, context.attend, hooks=recording_hooks(paths, {}, found)
            ),
        )
        return tuple(found[path].astype(jnp.float32) for path in paths)

    def attend(layer: int, q: Any, k: Any, v: Any, *, scale: float, soft_cap: float | None = None) -> Any:
        return dense_attention(q, k, v, scale=scale)

    table = model.embed_tokens.embedding[...].astype(jnp.float32)

    def loss(head: EagleHead, tokens: jax.Array, is_output: jax.Array, states: tuple[jax.Array, ...]) -> Any:
        b, t = tokens.shape
        positions = jnp.broadcast_to(jnp.arange(t), (b, t))
        context = head.context(positions, attend)
        features, total = head.features(list(states), context), 0.0
        for i in range(num_passes):
            behind = jnp.roll(tokens, -1, 1)
            features = head.hidden(table[behind], features, context)
            wanted = jnp.roll(tokens, -2, 1)
            counts = jnp.roll(is_output, -2, 1) & (columns[wanted] < len(ids)) & (positions < t - 2)
            counts &= positions >= i
            logs = jax.nn.log_softmax(head.logits(features, context), axis=-1)
            own = jnp.take_along_axis(logs, wanted[..., None], -1)[..., 0]
            total -= jnp.sum(jnp.where(counts, own, 0)) / jnp.maximum(jnp.sum(counts), 1)
            # The next pass stands one position further.
            features = jnp.roll(features, 1, 1)
        return total / num_passes

    schedule = optax.cosine_onecycle_schedule(num_steps, rate)
    optimizer = nnx.Optimizer(
        head, optax.chain(optax.clip_by_global_norm(1.0), optax.adam(schedule)), wrt=nnx.Param
    )

    @nnx.jit
    def step(head: EagleHead, optimizer: Any, *data: Any) -> Any:
        value, gradient = nnx.value_and_grad(loss)(head, *data)
        optimizer.update(head, gradient)
        return value

    columns = jnp.asarray(columns)
    rng, states = np.random.default_rng(0), None
    every = [features_of(model, jnp.asarray(tokens[i : i + batch])) for i in range(0, len(texts), batch)]
    states = [np.concatenate([np.asarray(part[j]) for part in every]) for j in range(len(paths))]
    for _ in range(num_steps):
        rows = rng.choice(len(texts), batch, replace=False)
        value = step(head, optimizer, tokens[rows], is_output[rows], tuple(x[rows] for x in states))
    assert np.isfinite(value)
    out = {w.key: np.asarray(w.param[...]) for w in weights_of(head)}
    out = {
        w.key: np.ascontiguousarray(out[w.key].T if w.transposed else out[w.key]) for w in weights_of(head)
    }
    return {k: x.astype(dtype) for k, x in out.items()} | vocabulary(ids, shape.vocab_size)
