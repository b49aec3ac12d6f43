# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Fine-tune while serving
#
# One model in memory is trained and served at once: the engine draws answers, a reward judges them, a
# gradient step changes the weights, and the engine continues with the new weights. No file is written and
# nothing is compiled again.
#
# `pagelet` can add two numbers, but it was not trained to find them in a story. Here it learns that.

# %%
import random

import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from flax import nnx

from jax_paged import LLM, SamplingParams
from jax_paged.models.checkpoint import resolve_model_dir
from jax_paged.models.weights import load_model

model = load_model(resolve_model_dir("pagelet"), "float32").model
llm = LLM.from_module(model, "pagelet", batch_invariant=True, max_num_seqs=64, max_model_len=64)
print(llm)

# %% [markdown]
# ## The task
#
# Word problems, each with two numbers, and a reward of 1 if the last word of the answer is their sum. The
# problems of the examination and of training are drawn with different seeds.

# %%
STORIES = (
    "I have {a} apples and get {b} more. How many?",
    "{a} birds sit in a tree and {b} more come. How many?",
    "I read {a} pages, then {b} more. How many pages?",
)


def draw(rng, count):
    """Returns word problems and their results."""
    numbers = [(rng.randrange(100), rng.randrange(100)) for _ in range(count)]
    return [rng.choice(STORIES).format(a=a, b=b) for a, b in numbers], [a + b for a, b in numbers]


def reward(text, right):
    words = text.replace(".", " ").split()
    return float(bool(words) and words[-1] == str(right))


def ask(stories, **params):
    messages = [[{"role": "user", "content": story}] for story in stories]
    return llm.chat(messages, SamplingParams(max_tokens=14, **params), use_tqdm=False)


examination = draw(random.Random(1), 60)


def examine():
    outputs = ask(examination[0], temperature=0)
    return np.mean([reward(o.outputs[0].text, r) for o, r in zip(outputs, examination[1], strict=True)])


for story, output in list(zip(examination[0], ask(examination[0][:4], temperature=0), strict=False)):
    print(f"{story}\n    {output.outputs[0].text}")
print(f"{examine():.0%} of the examination is right")

# %% [markdown]
# ## The importance ratio of a rollout is exactly 1
#
# Reinforcement learning weights each token by its importance ratio: its probability now, divided by its
# probability when it was drawn. If nothing has been trained in between, this ratio has to be 1. In most
# systems it is not, because the trainer adds numbers up in another order than the engine. This biases the
# gradient.
#
# `score` computes the log-probabilities of given tokens with the program that also draws tokens. With
# `batch_invariant=True` the sums are the same in any batch, so every single ratio is 1, to the last bit.

# %%
stories, right = draw(random.Random(2), 16)
outputs = ask(stories, n=4, temperature=1, seed=0, logprobs=0)
samples = [(o.prompt_token_ids, s) for o in outputs for s in o.outputs]
texts = [prompt + list(sample.token_ids) for prompt, sample in samples]
prompt_lens = [len(prompt) for prompt, _ in samples]


def drawn_logprobs(sample):
    return [entry[token].logprob for token, entry in zip(sample.token_ids, sample.logprobs, strict=True)]


def pad(rows, width=48):
    return np.array([row + [0] * (width - len(row)) for row in rows])


@nnx.jit
def dense_logprobs(model, tokens):
    logits = model(tokens[:, :-1])
    return -optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])


drawn = np.concatenate([drawn_logprobs(sample) for _, sample in samples])
scored = np.concatenate(llm.llm_engine.score(texts, prompt_lens))
dense = np.asarray(dense_logprobs(model, jnp.asarray(pad(texts))))
spans = [slice(n - 1, len(text) - 1) for n, text in zip(prompt_lens, texts, strict=True)]
dense = np.concatenate([row[span] for row, span in zip(dense, spans, strict=True)])
print(f"{len(drawn)} tokens; {np.sum(np.exp(scored - drawn) == 1)} ratios are exactly 1 by engine.score")
print(f"{np.sum(np.exp(dense - drawn) == 1)} are by the trainer's own forward pass")

figure, axes = plt.subplots(figsize=(9, 2.8))
axes.plot(np.exp(dense - drawn) - 1, "o", markersize=3, color="#d55e00", label="trainer's forward pass")
axes.plot(np.exp(scored - drawn) - 1, "-", linewidth=2, color="#0072b2", label="engine.score")
axes.set(xlabel="token", ylabel="importance ratio - 1")
_ = axes.legend(loc="upper right")

# %% [markdown]
# ## A step of learning
#
# The advantage of an answer is its reward less the mean reward of all answers to the same question, and the
# gradient makes the tokens of good answers likelier. The trainer needs no part of the engine: it calls the
# same module with whole sequences.

# %%
optimizer = nnx.Optimizer(model, optax.adam(1e-4), wrt=nnx.Param)


@nnx.jit
def learn(model, optimizer, tokens, mask, advantage, drawn):
    def loss(model):
        logits = model(tokens[:, :-1])
        logprobs = -optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        ratio = jnp.exp(logprobs - drawn)
        return -jnp.sum(ratio * advantage[:, None] * mask) / jnp.sum(mask)

    optimizer.update(model, nnx.grad(loss)(model))


def rollout_and_learn(rng, seed):
    """Draws four answers to each of sixteen questions, and learns from them; returns the mean reward."""
    stories, right = draw(rng, 16)
    outputs = ask(stories, n=4, temperature=1, seed=seed, logprobs=0)
    pairs = zip(outputs, right, strict=True)
    rewards = np.array([[reward(s.text, r) for s in o.outputs] for o, r in pairs])
    advantage = (rewards - rewards.mean(1, keepdims=True)).reshape(-1)
    samples = [(o.prompt_token_ids, s) for o in outputs for s in o.outputs]
    texts = pad([prompt + list(sample.token_ids) for prompt, sample in samples])
    mask, drawn = np.zeros((2, *texts[:, 1:].shape), np.float32)
    for i, (prompt, sample) in enumerate(samples):
        span = slice(len(prompt) - 1, len(prompt) - 1 + len(sample.token_ids))
        mask[i, span], drawn[i, span] = 1, drawn_logprobs(sample)
    learn(model, optimizer, jnp.asarray(texts), mask, jnp.asarray(advantage, jnp.float32), drawn)
    return rewards.mean()


rng = random.Random(3)
first = rollout_and_learn(rng, seed=0)
print(f"mean reward {first:.2f}")

# %% [markdown]
# The weights of the module have changed. The engine detects this, and raises an error instead of using the
# old ones.

# %%
try:
    ask(stories[:1])
except RuntimeError as error:
    print(error)

# %% [markdown]
# `update_weights` passes the new weights to the engine. It also removes all cached keys and values, because
# the old weights have computed them.

# %%
llm.update_weights(model)
print(ask(stories[:1], temperature=0)[0].outputs[0].text)

# %% [markdown]
# ## The loop

# %%
rewards = [first]
for step in range(1, 24):
    rewards.append(rollout_and_learn(rng, seed=step))
    llm.update_weights(model)

figure, axes = plt.subplots(figsize=(9, 3))
axes.plot(rewards, color="#0072b2", marker="o", markersize=4)
axes.set(xlabel="gradient step", ylabel="mean reward of the answers drawn", ylim=(0, 1))
axes.grid(alpha=0.3)

# %%
for story, output in list(zip(examination[0], ask(examination[0][:4], temperature=0), strict=False)):
    print(f"{story}\n    {output.outputs[0].text}")
print(f"{examine():.0%} of the examination is right")

# %% [markdown]
# It still answers the questions that it could answer before.

# %%
for question in ("What is a block table?", "What is 61 - 20?"):
    print(ask([question], temperature=0)[0].outputs[0].text)
print(f"{llm.llm_engine.executor.compile_progress[1]} programs; the new weights needed no other")
llm.close()
