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
# # KV surgery
#
# You can inspect a running request: the tokens in each of its blocks, their keys and values, and the
# attention of its next token. You can also remove blocks from it, as StreamingLLM and H2O do to bound the
# memory of a long text.

# %%
import inspect
import textwrap

import matplotlib.pyplot as plt
import numpy as np

from jax_paged import LLM, SamplingParams

llm = LLM(
    model="pagelet",
    dtype="float32",
    block_size=16,
    num_gpu_blocks_override=200,
    max_num_seqs=64,
    max_model_len=1024,
    num_scheduler_steps=1,
    async_scheduling=False,
)
engine, tokenizer = llm.llm_engine, llm.get_tokenizer()

# %% [markdown]
# ## The page table
#
# A row per block: its number, how many requests share it, the position of its first token, and its tokens.
# Two requests that begin alike share their full blocks.

# %%
start = (
    "class Pool:\n    def __init__(self, size):\n        self.free = list(range(size))\n\n    def take(self):"
)
params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
engine.add_request("a", start, params)
engine.step()
engine.add_request("b", start + "\n        return self.", params)
for _ in range(6):
    engine.step()
engine.page_table("b")

# %% [markdown]
# ## Keys and values
#
# `kv` returns the keys and values of a request in one layer. The keys and values of the first token differ
# from all others, because heads attend to this token if no other one is relevant.

# %%
figure, axes = plt.subplots(2, 1, figsize=(9, 3.4), sharex=True)
for row, name in enumerate(("keys", "values")):
    norms = np.concatenate([np.linalg.norm(engine.kv("b", layer)[row], axis=-1).T for layer in range(4)])
    image = axes[row].imshow(norms, aspect="auto", cmap="viridis")
    axes[row].set_yticks(range(0, 8, 2), [f"layer {i}" for i in range(4)])
    axes[row].set_title(f"norms of {name}, two heads per layer", fontsize=9)
    figure.colorbar(image, ax=axes[row])
axes[1].set_xlabel("position")
plt.show()

# %% [markdown]
# ## Attention
#
# `inspect` computes the attention of a request from the keys in the pool, without running a step and without
# changing anything. You choose layers and heads, and the last token or all tokens. It also returns the logits
# from which the next token will be sampled.

# %%
seen = engine.inspect("b", layers=range(4), num_queries=None)
best = np.argsort(seen.logits)[::-1][:5]
print({tokenizer.decode([int(i)]): round(float(seen.logits[i]), 2) for i in best})
figure, axes = plt.subplots(4, 4, figsize=(8, 8), sharex=True, sharey=True)
for layer, attention in seen.attention.items():
    for head, probabilities in enumerate(attention):
        axes[layer, head].imshow(np.sqrt(probabilities), cmap="magma", vmin=0, vmax=1)
        axes[layer, head].set_title(f"layer {layer}, head {head}", fontsize=8)
for axis in axes[-1]:
    axis.set_xlabel("key", fontsize=8)
for axis in axes[:, 0]:
    axis.set_ylabel("query", fontsize=8)
plt.show()
engine.abort_request(["a", "b"])

# %% [markdown]
# The bright first columns are attention sinks: many heads attend to the first tokens if no other ones are
# relevant.
#
# ## Dropping blocks
#
# `drop_kv` keeps some blocks of a request and frees the others. The positions of the remaining tokens do not
# change. The log-probabilities of the tokens that follow show how much the model has lost; `verify` returns
# them for a draft in one step. The text here is the end of a class in Python's library, and its last 56
# tokens are the draft.

# %%
source = inspect.getsource(textwrap.TextWrapper)[-4000:]
text = tokenizer.encode(source, add_special_tokens=False)[-600:]
num_draft = 56
prompt, first, draft = text[: -num_draft - 1], text[-num_draft - 1], text[-num_draft:]


def logprobs_with(choose):
    """Returns the log-probabilities of the draft's tokens, and the page table.

    Before that, all blocks are dropped except the last one and those that choose(num_blocks) returns.
    """
    # The first output token is forced, because the draft begins after it.
    params = SamplingParams(temperature=0, max_tokens=100, allowed_token_ids=[first])
    engine.add_request("r", {"prompt_token_ids": prompt}, params)
    while not engine.step():
        pass  # a long prompt is computed in chunks
    num_blocks = len(engine.page_table("r").entries)
    kept = sorted({*choose(num_blocks), num_blocks - 1})
    engine.drop_kv("r", kept)
    found = engine.verify("r", draft)
    table = engine.page_table("r")
    engine.abort_request("r")
    return np.array(found.logprobs), table


full, table = logprobs_with(range)
print(table)
_, streaming = logprobs_with(lambda n: [0, *range(n - 4, n)])
print(streaming)

# %% [markdown]
# Three ways to choose the same number of blocks: the latest ones, the first one and the latest
# (StreamingLLM), and the latest with those that got most attention so far (H2O, here by blocks).


# %%
def heavy_hitters():
    """Returns the blocks of the prompt, those with most attention first."""
    engine.add_request("r", {"prompt_token_ids": prompt}, SamplingParams(temperature=0, max_tokens=9))
    while not engine.step():
        pass
    seen = engine.inspect("r", layers=range(4), num_queries=None)
    engine.abort_request("r")
    received = sum(attention.sum((0, 1)) for attention in seen.attention.values())
    # Early tokens are seen by more queries than late ones.
    received = received / np.arange(len(received), 0, -1)
    by_block = np.add.reduceat(received, range(0, len(received), 16))
    return np.argsort(by_block)[::-1].tolist()


ranked = heavy_hitters()
policies = {
    "latest": lambda n, k: range(n - k, n),
    "first and latest (StreamingLLM)": lambda n, k: [0, *range(n - k + 1, n)],
    "most attention and latest (H2O)": lambda n, k: [
        *[i for i in ranked if i < n - k // 2][: k - k // 2],
        *range(n - k // 2, n),
    ],
}
budgets = [2, 4, 8, 16, 24]
losses = {
    name: [-logprobs_with(lambda n, k=k, choose=choose: choose(n, k))[0].mean() for k in budgets]
    for name, choose in policies.items()
}

# %%
figure, axes = plt.subplots(figsize=(8, 3.6))
for (name, loss), color, marker in zip(losses.items(), ("#D55E00", "#0072B2", "#009E73"), "os^", strict=True):
    axes.plot(budgets, loss, marker=marker, color=color, label=name)
axes.axhline(-full.mean(), color="#777777", ls="--", label=f"all {len(table.entries)} blocks")
axes.set_xscale("log", base=2)
axes.set_xticks(budgets, budgets)
axes.set_xlabel("blocks of 16 tokens that are kept")
axes.set_ylabel("loss per token of the draft")
axes.legend(frameon=False)
axes.spines[["top", "right"]].set_visible(False)
plt.show()

# %% [markdown]
# pagelet gains nothing from distant tokens here: its loss is lower with few blocks, whichever they are.
# Another model or another text can be measured in the same way.
#
# The next picture shows the same with eight blocks, token by token. Where the log-probability falls, the
# dropped blocks were useful for the token; where it rises, they were misleading.

# %%
figure, axes = plt.subplots(3, 1, figsize=(10, 5), sharex=True, sharey=True)
for axis, (name, choose), color in zip(
    axes, policies.items(), ("#D55E00", "#0072B2", "#009E73"), strict=True
):
    found, _ = logprobs_with(lambda n, choose=choose: choose(n, 8))
    axis.bar(range(num_draft), found - full, color=color)
    axis.axhline(0, color="#777777", lw=0.8)
    axis.set_title(f"{name}: {(found - full).mean():+.2f} per token", fontsize=9, loc="left")
    axis.spines[["top", "right"]].set_visible(False)
axes[1].set_ylabel("change of the log-probability")
axes[-1].set_xticks(
    range(num_draft), [repr(tokenizer.decode([i]))[1:-1] for i in draft], rotation=90, fontsize=7
)
plt.show()

# %% [markdown]
# ## Dropping blocks again and again
#
# A request with dropped blocks continues like any other. This one drops blocks whenever a new block has four
# tokens, so its memory does not grow with its length.

# %%
engine.add_request("long", start, SamplingParams(temperature=0.7, seed=1, max_tokens=400, ignore_eos=True))
sizes = []
while engine.has_unfinished_requests():
    output = engine.step()[0]
    if output.finished:
        break
    num_blocks = len(engine.page_table("long").entries)
    if num_blocks > 6 and (len(output.prompt_token_ids) + len(output.outputs[0].token_ids)) % 16 == 4:
        engine.drop_kv("long", [0, *range(num_blocks - 4, num_blocks)])
    sizes.append(num_blocks)
print(f"{len(output.outputs[0].token_ids)} tokens, at most {max(sizes)} blocks of 16")
print(output.outputs[0].text[-300:])

# %%
llm.close()
