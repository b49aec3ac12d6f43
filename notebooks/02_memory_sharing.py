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
# # Memory sharing
#
# Block tables let samples, beams and requests that begin alike share the blocks of their common tokens.
# `pool_map()` draws which request holds which block. The cells below draw it while requests run.
#
# The pool is small here, so that all of it fits on the screen: 63 blocks of 8 tokens. Block 0, the null
# block, holds no tokens.

# %%
from jax_paged import LLM, BeamSearchParams, SamplingParams

llm = LLM(
    model="pagelet",
    block_size=8,
    num_gpu_blocks_override=64,
    max_num_seqs=16,
    max_model_len=256,
    num_scheduler_steps=1,  # one token per step; no step is in flight while a map is drawn
    async_scheduling=False,
)
engine = llm.llm_engine


def run(num_steps):
    """Runs some steps by hand; returns the outputs of the last one."""
    outputs = []
    for _ in range(num_steps):
        outputs = engine.step()
    return outputs


llm.pool_map()

# %% [markdown]
# ## Parallel samples
#
# `n=4` computes the prompt once. Its blocks are shared by four samples, as the number in each block shows.
# The colored part of a block shows how many of its slots are filled. Hover over a block to see its owners.

# %%
prompt = "class Cache:\n    def __init__(self, size):\n        self.size = size\n\n    def "
params = SamplingParams(n=4, temperature=0.9, seed=3, max_tokens=40, ignore_eos=True)
engine.add_request("samples", prompt, params)
run(1)
llm.pool_map()

# %% [markdown]
# Each sample then writes its own tokens. The full blocks of the prompt stay shared. Its last block was not
# full, so three samples got a copy of it before they wrote to it, and the fourth sample keeps the original.

# %%
run(12)
llm.pool_map()

# %%
while engine.has_unfinished_requests():
    outputs = engine.step()
for sample in outputs[0].outputs:
    print(sample.index, repr(sample.text[:70]))

# %% [markdown]
# All samples have ended, and no block is in use. The full blocks stay in the prefix cache until their memory
# is needed, and a prompt that begins with the same tokens uses them.
#
# ## Beam search
#
# Beams share more than their prompt. Each step keeps the best continuations, most of which have a common
# beginning. A beam that is dropped frees only the blocks that no other beam uses.

# %%
engine.add_request("beams", "def is_empty(self):\n    return ", BeamSearchParams(beam_width=4, max_tokens=40))
run(16)
llm.pool_map()

# %% [markdown]
# `beam_search` runs a search to its end.

# %%
engine.abort_request("beams")
(found,) = llm.beam_search(
    "def is_empty(self):\n    return ", BeamSearchParams(4, max_tokens=16), use_tqdm=False
)
for beam in found.sequences:
    print(f"{beam.cum_logprob:7.2f}  {beam.text!r}")

# %% [markdown]
# ## Pinned prefixes
#
# The prefix cache finds prefixes automatically, as long as their blocks are not evicted. A pinned prefix
# (with a thick border) is never evicted. Requests that begin with it do not compute its tokens.

# %%
prefix = (
    "# Methods of a pool of blocks. free is a list of block ids, and ref_counts has one number per block.\n"
)
name = llm.pin_prefix(prefix)
for i, start in enumerate(("def take(self):", "def share(self, block):", "def release(self, block):")):
    params = SamplingParams(temperature=0.7, seed=i, max_tokens=30, ignore_eos=True)
    engine.add_request(f"method {i}", prefix + start, params)
outputs = run(16)
print([f"{output.num_cached_tokens} of {len(output.prompt_token_ids)} prompt tokens" for output in outputs])
llm.pool_map()

# %%
while engine.has_unfinished_requests():
    engine.step()
llm.unpin_prefix(name)

# %% [markdown]
# ## When memory runs out
#
# Three requests with four samples each need more blocks than the pool has. The last request is swapped out:
# its blocks move to host memory, where they are still shared, and it continues when there are free blocks
# again.

# %%
for i in range(3):
    params = SamplingParams(n=4, temperature=0.9, seed=i, max_tokens=60, ignore_eos=True)
    engine.add_request(f"request {i}", prompt + "abc"[i], params)
while not len(llm.pool_map().host_blocks):
    engine.step()
llm.pool_map()

# %%
while engine.has_unfinished_requests():
    for output in engine.step():
        if output.finished:
            num_tokens = [len(sample.token_ids) for sample in output.outputs]
            print(
                f"{output.request_id}: {num_tokens} tokens, preempted {output.metrics.num_preemptions} times"
            )

# %% [markdown]
# ## The map as data
#
# A map holds structured arrays: one row per block, and one row per reference to a block.

# %%
engine.add_request("samples", prompt, SamplingParams(n=2, max_tokens=40, seed=1))
run(8)
pool = llm.pool_map()
print(pool)
for block in pool.blocks[pool.blocks["ref_count"] > 0]:
    print(block)
pool.owners[:6]

# %%
llm.close()
