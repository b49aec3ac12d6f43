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
# # Batch invariance
#
# A sum of floating-point numbers depends on the order in which they are added up, and that order depends on
# the shape of the step. So the same request gets slightly different log-probabilities when it runs alone and
# when it runs beside others, even with the same seed. With `batch_invariant=True` it gets the same bits.

# %%
import time

import matplotlib.pyplot as plt
import numpy as np

from jax_paged import LLM, SamplingParams


def start(batch_invariant, num_blocks=320):
    """Makes an engine, and waits for all of its programs."""
    llm = LLM(
        "pagelet",
        dtype="float32",
        batch_invariant=batch_invariant,
        num_scheduler_steps=1,  # a batch invariant engine always computes one token per step
        block_size=8,
        num_gpu_blocks_override=num_blocks,
        max_num_seqs=16,
        max_num_batched_tokens=64,
        max_model_len=128,
    )
    llm.llm_engine.executor.wait_until_compiled()
    return llm


engines = {"ordinary": start(False), "batch invariant": start(True)}
for llm in engines.values():
    print(llm, end="\n\n")

# %% [markdown]
# The ordinary engine has a program for each of several shapes of a step, so that a small step costs little.
# The other engine has one program for each kind of step, and pads every step to it.
#
# The programs for prompts and for generated tokens have to add up in the same order, too. Whether they do
# depends on the shapes and on the machine. So a batch invariant engine checks it at its start, and raises an
# error if the results differ.
#
# ## One request in four situations
#
# Each engine answers eight questions one by one, then all at once, and then all at once in the opposite order
# with their prompts in the prefix cache. A batch invariant engine with a small pool answers them, too: it
# preempts some requests and computes them again. Tokens are drawn with a temperature and a seed.

# %%
QUESTIONS = (
    "What is a block table?",
    "What is 61 - 20?",
    "What is paged attention?",
    "What is 17 + 25?",
    "What is a KV cache?",
    "What does the scheduler do?",
    "What is continuous batching?",
    "What is JAX?",
)
tokenizer = engines["ordinary"].get_tokenizer()
params = SamplingParams(temperature=0.8, seed=7, max_tokens=32, ignore_eos=True, logprobs=0)


def prompt(question, salt):
    """Returns a chat as tokens; requests share cached blocks only if they have the same salt."""
    text = (
        f"<|system|>You answer questions about a serving engine, in short sentences.<|end|><|user|>{question}"
    )
    tokens = tokenizer.encode(f"{text}<|end|><|assistant|>", add_special_tokens=False)
    return {"prompt_token_ids": tokens, "cache_salt": salt}


def ask(llm, salt, questions=QUESTIONS):
    prompts = [prompt(question, f"{salt}, {question}") for question in questions]
    return llm.generate(prompts, params, use_tqdm=False)


def logprobs(outputs):
    """Returns the log-probabilities of the tokens drawn, one row for each request."""
    rows = [zip(o.outputs[0].token_ids, o.outputs[0].logprobs, strict=True) for o in outputs]
    return np.array([[entry[token].logprob for token, entry in row] for row in rows])


alone, results = {}, {}
for name, llm in engines.items():
    alone[name] = [ask(llm, "alone", [question])[0] for question in QUESTIONS]
    together = ask(llm, "together")
    cached = ask(llm, "together", QUESTIONS[::-1])[::-1]
    results[name] = {"beside seven others": together, "from the prefix cache": cached}
    print(f"{name}: {sum(o.num_cached_tokens for o in cached)} tokens came from the prefix cache")
with start(True, num_blocks=32) as small:
    preempted = ask(small, "together")
results["batch invariant"]["after preemption"] = preempted
print(f"small pool: {sum(o.metrics.num_preemptions for o in preempted)} preemptions")

# %% [markdown]
# ## How many bits are the same
#
# Here is how many of the tokens are those of the request alone, and how many of the log-probabilities are
# equal to the last bit.

# %%
differences = {}
for name, by_situation in results.items():
    print(name)
    for situation, outputs in by_situation.items():
        pairs = zip(outputs, alone[name], strict=True)
        same = np.array([np.equal(o.outputs[0].token_ids, a.outputs[0].token_ids) for o, a in pairs])
        difference = (logprobs(outputs) - logprobs(alone[name])).ravel()
        differences[name, situation] = difference
        print(
            f"    {situation:21}  {same.sum()} of {same.size} tokens, {np.sum(difference == 0):3} of "
            f"{same.size} log-probabilities, largest difference {np.abs(difference).max():.1e}"
        )
assert not any(differences["batch invariant", situation].any() for situation in results["batch invariant"])

# %%
figure, axes = plt.subplots(1, 3, figsize=(10, 2.8), sharey=True, layout="constrained")
for panel, situation in zip(axes, results["batch invariant"], strict=True):
    if situation in results["ordinary"]:
        panel.plot(1e6 * differences["ordinary", situation], "o", ms=3, color="#d55e00", label="ordinary")
    panel.plot(
        1e6 * differences["batch invariant", situation], lw=2, color="#0072b2", label="batch invariant"
    )
    panel.set(title=situation, xlabel="token")
axes[0].set_ylabel("log-probability less\nthat alone, in millionths")
_ = axes[0].legend(loc="upper right", fontsize=8)

# %% [markdown]
# Differences of this size seldom change a token. They do so when two tokens are almost equally likely, and
# from there on the two texts have nothing in common. They also matter where log-probabilities are compared
# with others, as they are in [reinforcement learning](05_fine_tune_while_serving.ipynb).
#
# ## What it costs
#
# A step for one request is padded to sixteen rows here, and the attention of prompts is computed token by
# token. So the fewer requests there are, the more of a step is padding. Each bar is a single reading on a
# machine with other work, so only large differences mean anything. An ordinary engine can also compute
# several tokens per dispatch (multi-step decoding), which is off here.

# %%
timed = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True, detokenize=False)


def tokens_per_second(llm, count):
    prompts = [prompt(QUESTIONS[i % 8], f"timed {count} {i}") for i in range(count)]
    begin = time.perf_counter()
    outputs = llm.generate(prompts, timed, use_tqdm=False)
    seconds = time.perf_counter() - begin
    return sum(len(output.outputs[0].token_ids) for output in outputs) / seconds


counts = (1, 2, 4, 8, 16)
speeds = {name: [tokens_per_second(llm, count) for count in counts] for name, llm in engines.items()}
for name, speed in speeds.items():
    print(f"{name:16}", *(f"{value:6.0f}" for value in speed), "tokens per second")

figure, axes = plt.subplots(figsize=(8, 3), layout="constrained")
for shift, color, (name, speed) in zip((-0.2, 0.2), ("#d55e00", "#0072b2"), speeds.items(), strict=True):
    bars = axes.bar(np.arange(len(counts)) + shift, speed, width=0.38, color=color, label=name)
    axes.bar_label(bars, fmt="%.0f", fontsize=8)
axes.set_xticks(range(len(counts)), counts)
axes.set(xlabel="requests at once", ylabel="tokens per second")
_ = axes.legend(loc="upper left")

# %%
for llm in engines.values():
    llm.close()
