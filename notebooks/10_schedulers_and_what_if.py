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
# # Schedulers and what-if
#
# What would have happened with twice the memory, or with another scheduler? An engine can record its requests
# and decisions. The recorded requests can then be served again with other settings or with your own
# scheduler: they arrive at the same times, but no device is needed, and it takes less time.
#
# In the replay, a request generates its recorded tokens, however it is scheduled. An engine would generate
# the same tokens, because an output does not depend (except for rounding) on the steps that compute it.

# %%
import matplotlib.pyplot as plt
import numpy as np

from jax_paged import LLM, SamplingParams
from jax_paged.lab.latency import latencies
from jax_paged.lab.recording import replay
from jax_paged.lab.timeline import Timeline, timeline_of

settings = {"max_num_seqs": 16, "max_num_batched_tokens": 64, "max_model_len": 256}
llm = LLM("pagelet", num_gpu_blocks_override=48, num_scheduler_steps=1, dtype="float32", **settings)
engine = llm.llm_engine
engine.executor.wait_until_compiled()

# %% [markdown]
# ## A recording
#
# Eighty requests, most of them short and some long, come faster than the engine serves them. The pool is
# small: 48 blocks of 16 tokens, one of which (the null block) holds no tokens.

# %%
rng = np.random.default_rng(0)
prompt_lens = np.clip(rng.lognormal(3.2, 1.0, 80), 4, 180).astype(int)
output_lens = np.clip(rng.lognormal(3.0, 0.8, 80), 4, 70).astype(int)

lines = []
engine.record(lines.append)  # or a file's write
for i, (prompt_len, output_len) in enumerate(zip(prompt_lens, output_lens, strict=True)):
    params = SamplingParams(max_tokens=int(output_len), ignore_eos=True)
    engine.add_request(f"r{i}", rng.integers(10, 500, prompt_len).tolist(), params)
    for _ in range(rng.integers(1, 4)):
        engine.step()
while engine.has_unfinished_requests():
    engine.step()
engine.record(None)  # that was all

recorded = replay(lines)  # also checks that a fresh scheduler decides the same, to the last block
print(f"{len(lines)} lines, {sum(map(len, lines)) / 2**20:.1f} MiB")
print(f"{recorded.num_steps} steps, {recorded.summary()['preemptions']} preemptions")

# %% [markdown]
# The timeline of a recording has a column per step: how many tokens it computed, how many requests waited,
# and where one was preempted. Below it, single requests have lanes: all preempted requests, and the earliest
# others if there is room. A lane is broad where the request computes its prompt (after a preemption, all of
# its tokens), and narrow where it decodes.

# %%
timeline_of(lines)

# %% [markdown]
# ## More memory, or less
#
# `replay` takes the arguments of the scheduler and of its block manager. It estimates the duration of each
# step as a time per step plus a time per token, both fitted to the recorded steps. Because the estimates
# differ from the recorded times, some decisions differ even with the recorded 48 blocks.


# %%
def table(replays):
    columns = ("steps", "tokens_per_step", "preemptions", "to_first_token_s", "to_end_s")
    print(f"{'':24}" + "".join(f"{name:>18}" for name in columns))
    for name, result in replays.items():
        print(f"{name:24}" + "".join(f"{result.summary()[column]:18.4g}" for column in columns))


pools = {f"{n} blocks": replay(lines, num_blocks=n) for n in (24, 32, 48, 96)}
table({"recorded, 48 blocks": recorded} | pools)

# %%
figure, axes = plt.subplots(figsize=(9, 3), layout="constrained")
for (name, result), style in zip(pools.items(), ("-", "--", "-.", ":"), strict=True):
    steps = result.steps
    seconds = steps["time_s"] - steps["time_s"][0]
    axes.plot(seconds, steps["num_waiting"] + steps["num_swapped"], style, label=name)
axes.set_xlabel("seconds")
axes.set_ylabel("requests that wait")
_ = axes.legend()

# %% [markdown]
# ## How many tokens per step
#
# Long prompts are computed in chunks of at most `max_num_batched_tokens`. A larger budget gives first tokens
# sooner, but makes each step longer for the requests that decode.

# %%
budgets = {f"{n} tokens per step": replay(lines, max_num_batched_tokens=n) for n in (16, 32, 64, 128, 256)}
table(budgets)

# %% [markdown]
# ## A scheduler of your own
#
# A scheduler is a subclass of `Scheduler`, or just a function that returns the sort key of a request.
# `LLM(scheduler=...)` serves with it, and `replay` shows its effect on recorded requests. The scheduler below
# serves short prompts first.


# %%
def prompt_length(group):
    return len(group.sequences[0].prompt_token_ids)


shortest = replay(lines, prompt_length)
table({"first come first served": pools["48 blocks"], "shortest prompt first": shortest})

# %% [markdown]
# Most requests get their first token sooner, at the cost of the long ones, which wait longer and are
# preempted more often. Every request has the same tokens as before.

# %%
latencies({"first come first served": pools["48 blocks"], "shortest prompt first": shortest})

# %% [markdown]
# The timeline shows the requests with long prompts: they wait, and continue when the short ones have ended.

# %%
Timeline(shortest.steps, shortest.outputs)


# %%
def tokens(result):
    return [[seq.output_token_ids for seq in group.sequences] for group in result.requests]


assert tokens(shortest) == tokens(recorded)

# %% [markdown]
# ## Computed again
#
# `engine.replay` computes a recording once more on the device, step by step, and checks the tokens. Where the
# same programs run, the log-probabilities are the same to the last bit.

# %%
again = engine.replay(lines)
print(f"{again.num_steps} steps; log-probabilities differ by at most {again.max_logprob_difference}")
llm.close()
