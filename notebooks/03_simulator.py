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
# # The simulator
#
# `simulate` runs the engine's own scheduler and block manager on a trace of requests. A model of step times
# takes the device's place, so minutes of traffic take seconds, and every run gives the same result. Here: a
# 13B-parameter model on a GPU with room for 15,700 tokens, and two requests per second.

# %%
import matplotlib.pyplot as plt
import numpy as np

from jax_paged.core.block_manager import BlockManager
from jax_paged.core.scheduler import Scheduler
from jax_paged.lab.latency import latencies
from jax_paged.lab.simulator import Request, StepTimeModel, simulate
from jax_paged.lab.timeline import Timeline

# The lengths are similar to those of ShareGPT's conversations, and the step times to those of an A100.
rng = np.random.default_rng(0)
arrivals = np.cumsum(rng.exponential(1 / 2, 200)).tolist()
prompt_lens = np.clip(rng.lognormal(4.4, 1.2, 200), 1, 1024).astype(int).tolist()
output_lens = np.clip(rng.lognormal(5.4, 0.9, 200), 1, 1024).astype(int).tolist()
trace = [Request(*row) for row in zip(arrivals, prompt_lens, output_lens, strict=True)]
step_time = StepTimeModel(
    base_s=0.017, s_per_prefill_token=1.7e-4, s_per_decode_seq=1.7e-4, s_per_context_token=5e-7
)


def make_scheduler(block_size=16, **settings):
    manager = BlockManager(15_700 // block_size + 1, block_size, enable_prefix_caching=False)
    limits = {"max_num_seqs": 256, "max_num_batched_tokens": 2048, "max_model_len": 2048}
    return Scheduler(block_manager=manager, eos_token_ids=frozenset(), **(limits | settings))


result = simulate(trace, make_scheduler(), step_time)
print(f"{len(result.steps)} steps; {result.mean('num_running'):.1f} requests at a time")
print(f"{result.share_of_slots_filled:.1%} of the slots of used blocks hold a token")

# %% [markdown]
# `steps` has one row per step, and `requests` one row per request: both are NumPy arrays with named fields.

# %%
print(result.steps.dtype.names)
print(result.requests.dtype.names)
figure, (above, below) = plt.subplots(2, sharex=True, figsize=(9, 4))
above.plot(result.steps["time_s"], result.steps["num_running"])
above.set_ylabel("running requests")
below.plot(result.steps["time_s"], result.steps["num_blocks_used"] / (15_700 // 16))
below.set_ylabel("share of blocks used")
_ = below.set_xlabel("seconds")

# %% [markdown]
# ## How long requests wait
#
# The same trace at lower and higher rates. `latencies` draws the distributions of the time in the queue, the
# time to the first token, and the time per further token.

# %%
rates = {}
for rate in (1, 2, 3):
    scaled = [Request(r.arrival_s * 2 / rate, r.prompt, r.output_len) for r in trace]
    rates[f"{rate} per second"] = simulate(scaled, make_scheduler(), step_time)
latencies(rates)

# %% [markdown]
# The timeline shows the steps at the highest of these rates.

# %%
Timeline(rates["3 per second"].steps)

# %% [markdown]
# ## Block sizes
#
# Only the last block of a sequence has empty slots, so small blocks waste less memory.

# %%
for block_size in (1, 16, 256):
    filled = simulate(trace, make_scheduler(block_size), step_time).share_of_slots_filled
    print(f"{block_size:4} tokens per block: {filled:.1%} of slots filled")

# %% [markdown]
# ## Sharing
#
# Samples share their prompt. Beams share more, because the best beams descend from few parents. Requests with
# several sequences need more time, so they arrive at a quarter of the rate here.

# %%
for name, extra in (("4 samples", {"n": 4}), ("beam search of width 4", {"beam_width": 4})):
    several = [Request(r.arrival_s * 4, r.prompt, r.output_len, **extra) for r in trace[:50]]
    result = simulate(several, make_scheduler(), step_time)
    print(f"{name}: sharing saves {result.share_of_blocks_saved:.1%} of the blocks")

# %% [markdown]
# ## Recordings
#
# An engine can record the calls and decisions of its scheduler. `replay` makes the same calls to a new
# scheduler and checks that all its decisions are equal. This shows what happened on another machine, or
# whether a change of the scheduler changes a decision.

# %%
from jax_paged import LLM, SamplingParams
from jax_paged.lab.recording import replay

llm = LLM(model="pagelet", num_gpu_blocks_override=32, max_num_seqs=8, max_model_len=256)
lines = []
llm.llm_engine.record(lines.append)  # or a file's write
llm.generate(
    ["What is a block table?", "def "], SamplingParams(n=3, max_tokens=40, ignore_eos=True), use_tqdm=False
)
print(lines[1][:160], "...")
print(f"{replay(lines).num_steps} steps, every decision the same")
