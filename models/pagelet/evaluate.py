"""Measures pagelet with the dense call: python -m jax_paged.models.pagelet.evaluate"""

import json
import random
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax_paged.models.pagelet.dialogue import (
    TEMPLATES,
    is_held_out,
    read_held_out,
    read_topics,
    sum_answer,
)
from jax_paged.models.registry import CausalLM
from jax_paged.models.weights import load_model
from transformers import AutoTokenizer

FOLDER = Path(__file__).parent


def answer(model: CausalLM, tokenizer: Any, questions: list[str], max_tokens: int) -> list[str]:
    """Answers each question greedily through the chat template, all in one dense batch without a cache."""
    chats = [[{"role": "user", "content": question}] for question in questions]
    text = tokenizer.apply_chat_template(chats, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text)["input_ids"]
    lens = np.array([len(row) for row in ids])
    tokens = np.full((len(ids), -(-(lens.max() + max_tokens) // 32) * 32), tokenizer.pad_token_id, np.int32)
    for row, prompt in zip(tokens, ids, strict=True):
        row[: len(prompt)] = prompt
    tokens = np.asarray(_generate(model, jnp.asarray(tokens), jnp.asarray(lens), max_tokens))
    new = [row[n : n + max_tokens] for row, n in zip(tokens, lens, strict=True)]
    return [tokenizer.decode(row).split("<|end")[0] for row in new]


@nnx.jit(static_argnums=3)
def _generate(model: CausalLM, tokens: jax.Array, lens: jax.Array, max_tokens: int) -> jax.Array:
    rows = jnp.arange(tokens.shape[0])

    def step(i: jax.Array, tokens: jax.Array) -> jax.Array:
        best = jnp.argmax(model(tokens)[rows, lens + i - 1], axis=-1)
        return tokens.at[rows, lens + i].set(best.astype(tokens.dtype))

    return jax.lax.fori_loop(0, max_tokens, step, tokens)


def sum_questions(
    wordings: tuple[str, ...], pairs: list[tuple[int, int]], seed: int
) -> tuple[list[str], list[str]]:
    """Returns a question for each pair, in a random one of the wordings, and the right answers."""
    rng = random.Random(seed)
    asked = [rng.choice(wordings).format(a=a, b=b) for a, b in pairs]
    return [text[0].upper() + text[1:] for text in asked], [sum_answer(a, b) for a, b in pairs]


def measure(model: CausalLM, tokenizer: Any, num_sums: int) -> dict[str, float]:
    """Returns the shares of exactly right answers, and prints what went wrong.

    Args:
        model: The weights to measure.
        tokenizer: Their tokenizer.
        num_sums: Random sums a kind.
    """
    rng = random.Random(1)
    pairs = [(rng.randrange(10, 100), rng.randrange(10, 100)) for _ in range(num_sums)]
    unseen = [(a, b) for a in range(10, 100) for b in range(10, 100) if is_held_out(a, b)]
    topics = {topic.name: topic for topic in read_topics()}
    held_out = [(topics[name], text) for name, texts in read_held_out().items() for text in texts]
    known = [(topic, rng.choice(topic.written)) for topic in topics.values()]
    chats = {"held-out wordings": held_out, "wordings of the training text": known}
    kinds: dict[str, tuple[list[str], list[str], int]] = {
        name: ([text for _, text in chat], [topic.answer for topic, _ in chat], 100)
        for name, chat in chats.items()
    }
    kinds["random two-digit sums"] = (*sum_questions(TEMPLATES["sum"], pairs, 2), 16)
    kinds["the same, held-out wordings"] = (*sum_questions(TEMPLATES["held_out_sum"], pairs, 3), 16)
    unseen = rng.sample(unseen, min(num_sums, len(unseen)))
    kinds["two-digit sums never seen"] = (*sum_questions(TEMPLATES["sum"], unseen, 4), 16)
    shares = {}
    for kind, (questions, wanted, max_tokens) in kinds.items():
        answers = answer(model, tokenizer, questions, max_tokens)
        wrong = [(q, a) for q, a, right in zip(questions, answers, wanted, strict=True) if a != right]
        shares[kind] = 1 - len(wrong) / len(questions)
        print(
            f"{kind}: {shares[kind]:.1%} of {len(questions)}",
            *[f"  {q}\n    {a}" for q, a in wrong[:20]],
            sep="\n",
        )
    return shares


def main() -> None:
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    model = load_model(FOLDER, "float32").model
    print(json.dumps(measure(model, tokenizer, 500), indent=2))


if __name__ == "__main__":
    main()
