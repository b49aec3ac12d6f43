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
# # Quickstart
#
# A model, its engine and its answers in a few cells. `pagelet` is built in: a tiny model that knows a little
# about paged attention and Python. It needs no network, and no GPU.

# %%
import math

from jax_paged import LLM, SamplingParams

llm = LLM(model="pagelet")
print(llm)

# %% [markdown]
# The output shows the model, its number format, the attention backend, the pool of KV blocks that all
# requests share, and the shapes ("buckets") that steps are padded to, each compiled once.
#
# ## Ask
#
# `chat` puts messages through the model's chat template. `temperature=0` takes the most likely token each
# time; without `use_tqdm=False` a progress bar shows up.

# %%
greedy = SamplingParams(temperature=0, max_tokens=80)
question = {"role": "user", "content": "What is a block table?"}
(answer,) = llm.chat([question], greedy, use_tqdm=False)
print(answer.outputs[0].text)

# %% [markdown]
# Several conversations are computed together, step by step; the outputs come back in order.

# %%
questions = ["What is prefix caching?", "What is copy-on-write?", "When is a request preempted?"]
conversations = [[{"role": "user", "content": question}] for question in questions]
for text, output in zip(questions, llm.chat(conversations, greedy, use_tqdm=False), strict=True):
    print(f"{text}\n    {output.outputs[0].text}")

# %% [markdown]
# ## Complete
#
# `generate` continues a text, or token ids.

# %%
params = SamplingParams(temperature=0, max_tokens=12)
outputs = llm.generate(["def __init__(self", "for i in range("], params, use_tqdm=False)
for output in outputs:
    print(repr(output.prompt), "->", repr(output.outputs[0].text))
outputs[0]

# %% [markdown]
# ## Sample
#
# A seed makes random choices repeatable: the same seed gives the same text. Other running requests can only
# change the rounding of probabilities, which rarely changes a token; see
# [batch invariance](11_batch_invariance.ipynb).

# %%
for seed in (1, 2, 1):
    params = SamplingParams(temperature=0.9, top_p=0.95, seed=seed, max_tokens=16, stop="\n")
    (output,) = llm.generate("# This function ", params, use_tqdm=False)
    print(seed, repr(output.outputs[0].text))

# %% [markdown]
# An invalid value raises an error that names the allowed values.

# %%
try:
    SamplingParams(top_p=1.5)
except ValueError as error:
    print(error)

# %% [markdown]
# ## Look at probabilities
#
# `logprobs=3` reports the log-probabilities of each generated token and of the three most likely tokens.

# %%
params = SamplingParams(temperature=0, max_tokens=6, logprobs=3)
(output,) = llm.chat([question], params, use_tqdm=False)
for token_id, entry in zip(output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True):
    best = sorted(entry.values(), key=lambda x: -x.logprob)[:3]
    table = "   ".join(f"{x.decoded_token!r:>12} {math.exp(x.logprob):6.1%}" for x in best)
    print(f"{entry[token_id].decoded_token!r:>12}  |{table}")

# %% [markdown]
# ## Watch the text grow
#
# `LLM` uses an `LLMEngine`. Its method `step` runs one batch on the device and returns an output for each
# request that got tokens. Requests may be added and aborted between any two steps.

# %%
engine = llm.llm_engine
engine.add_request("stream", engine.tokenizer.encode_chat([question]), greedy)
num_shown = 0
while engine.has_unfinished_requests():
    for output in engine.step():
        text = output.outputs[0].text
        print(text[num_shown:], end="", flush=True)
        num_shown = len(text)

# %% [markdown]
# ## What the engine did
#
# Every output has its times. Full blocks that a prompt shares with an earlier prompt are not computed again:
# they are found by their hash. `compile_plan` lists the programs of the engine.

# %%
long_prompt = "Paged attention keeps the keys and values of each request in blocks. " * 8
for _ in range(2):
    (output,) = llm.generate(long_prompt, SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
    times = output.metrics
    print(
        f"{len(output.prompt_token_ids)} prompt tokens, {output.num_cached_tokens} of them cached; "
        f"first token after {1000 * (times.first_token_time - times.arrival_time):.0f} ms"
    )

# %%
print(engine.compile_plan())

# %% [markdown]
# ## Give the memory back
#
# `close` frees weights and pool. `with LLM(...) as llm:` does it at the end of the block.

# %%
llm.close()
print(llm)
