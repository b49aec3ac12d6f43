"""Measures how many of pagelet's answers are correct: python -m jax_paged.models.pagelet.evaluate.

The model runs as a dense call, without a KV cache.
"""

import json
import random
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from transformers import AutoTokenizer

from jax_paged.models.causal_lm import CausalLM
from jax_paged.models.pagelet.dialogue import (
    TEMPLATES,
    is_held_out,
    read_held_out,
    read_topics,
    sum_answer,
)
from jax_paged.models.weights import load_model

FOLDER = Path(__file__).parent


def answer(model: CausalLM, tokenizer: Any, questions: list[str], max_tokens: int) -> list[str]:
    """Returns greedy answers to questions, generated in one dense batch.

    Args:
        model: The model.
        tokenizer: The tokenizer of the model, which has the chat template.
        questions: The questions.
        max_tokens: The maximum length of an answer (tokens).
    """
    ids = prompts(tokenizer, questions)
    tokens, lens = pad([row + [tokenizer.pad_token_id] * max_tokens for row in ids], tokenizer.pad_token_id)
    starts = lens - max_tokens
    tokens = np.asarray(_generate(model, jnp.asarray(tokens), jnp.asarray(starts), max_tokens))
    new = [row[n : n + max_tokens] for row, n in zip(tokens, starts, strict=True)]
    return [tokenizer.decode(row).split("<|end")[0] for row in new]


def would_answer(model: CausalLM, tokenizer: Any, questions: list[str], answers: list[str]) -> np.ndarray:
    """Returns whether greedy decoding would generate each answer and then end.

    All answers are checked in one forward pass per batch: every token must be the most likely one.

    Args:
        model: The model.
        tokenizer: The tokenizer of the model, which has the chat template.
        questions: The questions.
        answers: The expected answers.

    Returns:
        bool [questions].
    """
    ends = [tokenizer(text + "<|end|>")["input_ids"] for text in answers]
    rows = [prompt + end for prompt, end in zip(prompts(tokenizer, questions), ends, strict=True)]
    tokens, lens = pad(rows, tokenizer.pad_token_id)
    best = np.concatenate(
        [_best(model, jnp.asarray(part)) for part in np.split(tokens, range(32, len(tokens), 32))]
    )
    starts = lens - [len(end) for end in ends]
    spans = [slice(start, end) for start, end in zip(starts, lens, strict=True)]
    return np.array([(best[i, s.start - 1 : s.stop - 1] == tokens[i, s]).all() for i, s in enumerate(spans)])


def prompts(tokenizer: Any, questions: list[str]) -> list[list[int]]:
    """Returns the token ids of each question in the chat template.

    Args:
        tokenizer: The tokenizer of the model, which has the chat template.
        questions: The questions.
    """
    chats = [[{"role": "user", "content": question}] for question in questions]
    return tokenizer(tokenizer.apply_chat_template(chats, tokenize=False, add_generation_prompt=True))[
        "input_ids"
    ]


def pad(rows: list[list[int]], pad_id: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the rows padded at their end to a common length, a multiple of 32.

    Args:
        rows: Token ids of each row.
        pad_id: Id of the padding token.

    Returns:
        int32 [rows, length], the padded rows, and int [rows], their lengths without padding.
    """
    lens = np.array([len(row) for row in rows])
    tokens = np.full((len(rows), -(-lens.max() // 32) * 32), pad_id, np.int32)
    for padded, row in zip(tokens, rows, strict=True):
        padded[: len(row)] = row
    return tokens, lens


@nnx.jit
def _best(model: CausalLM, tokens: jax.Array) -> jax.Array:
    return jnp.argmax(model(tokens), axis=-1)


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
    """Returns a question in a random wording for each pair of numbers, and the correct answers.

    Args:
        wordings: Templates of questions.
        pairs: The pairs of numbers.
        seed: Random seed for the wordings.
    """
    rng = random.Random(seed)
    asked = [rng.choice(wordings).format(a=a, b=b) for a, b in pairs]
    return [text[0].upper() + text[1:] for text in asked], [sum_answer(a, b) for a, b in pairs]


def measure(model: CausalLM, tokenizer: Any, num_sums: int) -> dict[str, float]:
    """Returns the share of exactly correct answers for each type of question, and prints some wrong answers.

    Args:
        model: The model to measure.
        tokenizer: The tokenizer of the model, which has the chat template.
        num_sums: Number of random sums for each type of question.
    """
    rng = random.Random(1)
    pairs = [(rng.randrange(10, 100), rng.randrange(10, 100)) for _ in range(num_sums)]
    unseen = [(a, b) for a in range(10, 100) for b in range(10, 100) if is_held_out(a, b)]
    topics = {topic.name: topic for topic in read_topics()}
    held_out = [(topics[name], text) for name, texts in read_held_out().items() for text in texts]
    known = [(topic, rng.choice(topic.written)) for topic in topics.values()]
    chats = {"held-out wordings": held_out, "wordings of the training text": known}
    groups = {
        name: ([text for _, text in chat], [topic.answer for topic, _ in chat])
        for name, chat in chats.items()
    }
    groups["random two-digit sums"] = sum_questions(TEMPLATES["sum"], pairs, 2)
    groups["random two-digit sums, held-out wordings"] = sum_questions(TEMPLATES["held_out_sum"], pairs, 3)
    unseen = rng.sample(unseen, min(num_sums, len(unseen)))
    groups["two-digit sums never seen"] = sum_questions(TEMPLATES["sum"], unseen, 4)
    shares = {}
    for group, (questions, wanted) in groups.items():
        right = would_answer(model, tokenizer, questions, wanted)
        shares[group] = float(right.mean())
        print(f"{group}: {shares[group]:.1%} of {len(questions)}")
        wrong = [question for question, ok in zip(questions, right, strict=True) if not ok]
        for question, said in zip(
            wrong[:8], answer(model, tokenizer, wrong[:8], 40) if wrong else [], strict=True
        ):
            print(f"  {question}\n    {said}")
    return shares


def main() -> None:
    """Measures the built-in model and prints the results as JSON."""
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    model = load_model(FOLDER, "float32").model
    assert isinstance(model, CausalLM)
    print(json.dumps(measure(model, tokenizer, 500), indent=2))


if __name__ == "__main__":
    main()
