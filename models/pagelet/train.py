"""Trains pagelet and writes its folder: python -m jax_paged.models.pagelet.train.

Every two minutes, the run writes a checkpoint from which it can be resumed. Batches depend only on the seed
and the step number, so a resumed run produces the same weights as an uninterrupted one.
"""

import argparse
import json
import time
import zlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
from flax import nnx
from safetensors.numpy import load_file, save_file
from tqdm import tqdm

from jax_paged.models.pagelet.corpus import (
    END,
    END_OF_TEXT,
    VOCAB_SIZE,
    Corpus,
    library_texts,
    make_tokenizer,
)
from jax_paged.models.weights import random_model, save_model

FOLDER = Path(__file__).parent
SEED = 0
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 256,
    "intermediate_size": 640,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
}
# The learning rate rises for WARM_UP steps, stays at its peak, and falls to 0 during the last FALL of the
# steps.
PEAK_RATE, WARM_UP, FALL = 3e-3, 40, 0.35
# (rows, tokens per row) of a batch. The last LONG_SHARE of the steps use long rows.
SHORT, LONG, LONG_SHARE = (24, 160), (8, 512), 0.1
# The training first emphasizes language, then answers, then sums. Each entry is (first step, share of chat
# rows, loss weight of the library's texts, share of conversations that consist of arithmetic only).
PARTS = ((0, 0.65, 1.0, 0.3), (422, 0.8, 0.25, 0.3), (611, 0.85, 0.25, 0.55))
CHECKPOINT_S = 120


def learning_rate(num_steps: int) -> optax.Schedule:
    """Returns the learning rate schedule.

    The rate does not depend on `num_steps` until it begins to fall. Up to that step, a run can be resumed
    with another number of steps.

    Args:
        num_steps: Total number of steps.
    """
    start = int(num_steps * (1 - FALL))
    rise = optax.linear_schedule(0, PEAK_RATE, WARM_UP)
    return optax.join_schedules([rise, optax.linear_schedule(PEAK_RATE, 0, num_steps - start)], [start])


def make_optimizer(num_steps: int) -> optax.GradientTransformation:
    """Returns an optimizer: Muon for the matrices of the layers, Adam for the embedding table and the norms.

    Source: Liu et al., Muon is Scalable for LLM Training, 2025 (updates scaled to the size of Adam's).

    Args:
        num_steps: Total number of steps.
    """

    def dimensions(params: Any) -> Any:
        def of(path: Any, weight: jax.Array) -> Any:
            is_matrix = weight.ndim == 2 and "embed_tokens" not in jax.tree_util.keystr(path)
            return optax.contrib.MuonDimensionNumbers() if is_matrix else None

        return jax.tree_util.tree_map_with_path(of, params)

    muon = optax.contrib.muon(
        learning_rate(num_steps),
        weight_decay=0.02,
        adam_b2=0.98,
        muon_weight_dimension_numbers=dimensions,
        consistent_rms=0.2,
    )
    return optax.chain(optax.clip_by_global_norm(1.0), muon)


def make_step(graph: Any, optimizer: optax.GradientTransformation) -> Any:
    """Returns the jitted step: (params, optimizer state, *batch) -> (params, optimizer state, losses).

    The losses are float32 [2]: the mean loss of the conversations, and the mean loss of the library's texts.

    Args:
        graph: The graph definition of the model (nnx.GraphDef).
        optimizer: The optimizer.
    """

    def losses(
        params: nnx.State, tokens: jax.Array, weights: jax.Array, is_chat: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        logits = nnx.merge(graph, params)(tokens[:, :-1])
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]) * weights
        parts = [jnp.sum(loss.T * rows) / jnp.sum(weights.T * rows) for rows in (is_chat, ~is_chat)]
        return jnp.sum(loss) / jnp.sum(weights), jnp.stack(parts)

    def step(params: nnx.State, state: Any, *batch: jax.Array) -> Any:
        (_, parts), grads = jax.value_and_grad(losses, has_aux=True)(params, *batch)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, parts

    return jax.jit(step, donate_argnums=(0, 1))


def train(num_steps: int, checkpoint: Path, out: Path, picture: Path | None) -> None:
    """Trains the model up to `num_steps` and writes its folder.

    Args:
        num_steps: Total number of steps, including the steps before the checkpoint.
        checkpoint: File to resume from if it exists, and to write every CHECKPOINT_S seconds.
        out: Folder for the config, the weights and the tokenizer.
        picture: File for a plot of the loss curve; None for no plot.
    """
    texts = list(library_texts())
    tokenizer = make_tokenizer(texts)
    corpus = Corpus(tokenizer, texts, SEED)
    # A checksum that changes with the texts and with the tokenizer.
    data = zlib.crc32(corpus.library.tobytes())
    print(f"{len(corpus.library):,} tokens of the standard library")

    graph, params = nnx.split(random_model(CONFIG, "float32", SEED).model)
    print(f"{sum(p.size for p in jax.tree.leaves(params)):,} parameters")
    optimizer = make_optimizer(num_steps)
    leaves, structure = jax.tree.flatten((params, optimizer.init(params)))
    curve, seconds = np.zeros((0, 2), np.float32), 0.0
    if checkpoint.exists():
        saved = load_file(checkpoint)
        if int(saved["data"]) != data:
            raise ValueError(
                f"`checkpoint` must be for the same training text, or a new file, got {checkpoint}"
            )
        leaves = [jnp.asarray(saved[f"leaf{i}"]) for i in range(len(leaves))]
        curve, seconds = saved["curve"], float(saved["seconds"])
    params, state = jax.tree.unflatten(structure, leaves)

    def save() -> None:
        arrays = {f"leaf{i}": np.asarray(x) for i, x in enumerate(jax.tree.leaves((params, state)))}
        checkpoint.parent.mkdir(parents=True, exist_ok=True)
        part = checkpoint.with_suffix(".part")
        save_file({**arrays, "curve": curve, "seconds": np.array(seconds), "data": np.array(data)}, part)
        part.replace(checkpoint)

    step = make_step(graph, optimizer)
    last = began = time.monotonic()
    before = seconds
    bar = tqdm(range(len(curve), num_steps), initial=len(curve), total=num_steps, unit="step", mininterval=2)
    for i in bar:
        shape = LONG if i >= num_steps * (1 - LONG_SHARE) else SHORT
        _, *shares = max(part for part in PARTS if part[0] <= i)
        batch = corpus.batch(i, *shape, *shares)
        params, state, parts = step(params, state, *batch)
        curve = np.concatenate([curve, np.asarray(parts)[None]])
        seconds = before + time.monotonic() - began
        chat, library = curve[-20:].mean(0)
        bar.set_postfix(chat=f"{chat:.3f}", library=f"{library:.3f}", refresh=False)
        if time.monotonic() - last > CHECKPOINT_S or i == num_steps - 1:
            save()
            last = time.monotonic()
    print(
        f"{len(curve)} steps in {seconds / 60:.1f} minutes, mean loss of the last 20: {curve[-20:].mean(0)}"
    )

    weights = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in (END_OF_TEXT, END)}
    end = {"eos_token_id": list(ids.values()), "pad_token_id": ids[END_OF_TEXT]}
    save_model(nnx.merge(graph, weights), out, CONFIG | end)
    tokenizer.save_pretrained(out)
    (out / "generation_config.json").write_text(json.dumps({"do_sample": False} | end, indent=2) + "\n")
    if picture:
        draw(curve, picture)


def draw(curve: np.ndarray, picture: Path) -> None:
    """Plots the losses of the conversations and of the library's texts by step.

    Args:
        curve: float32 [steps, 2], the losses of each step.
        picture: The file to write.
    """
    from matplotlib import pyplot  # an optional dependency, only needed for the plot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    window = np.ones(min(25, len(curve))) / min(25, len(curve))
    for column, name in enumerate(["conversations (answers only)", "Python's standard library"]):
        smooth = np.convolve(curve[:, column], window, "valid")
        axes.plot(np.arange(len(smooth)) + len(window), smooth, label=name)
    axes.set(
        xlabel="step", ylabel="loss, nats per token (log scale)", yscale="log", title="pagelet: training loss"
    )
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(picture, dpi=110)


def main() -> None:
    """Parses the command line and trains the model."""
    parser = argparse.ArgumentParser(description="Train pagelet.")
    parser.add_argument("--steps", type=int, default=1500, help="total number of steps")
    file = Path("build/pagelet/checkpoint.safetensors")
    parser.add_argument("--checkpoint", type=Path, default=file, help="file to resume from and to write")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder to write the model to")
    parser.add_argument("--picture", type=Path, help="file to draw the loss curve to")
    args = parser.parse_args()
    train(args.steps, args.checkpoint, args.out, args.picture)


if __name__ == "__main__":
    main()
