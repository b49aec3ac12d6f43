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
# What a block table buys: samples, beams and requests that begin alike share the blocks of what they have in
# common. `pool_map()` draws who holds which block; the cells below draw it while requests run.
#
# The pool is small here, so that all of it fits on the screen: 63 blocks of 8 tokens.

# %%
from jax_paged import LLM, BeamSearchParams, SamplingParams

llm = LLM(
    model="pagelet",
    block_size=8,
    num_gpu_blocks_override=64,
    max_num_seqs=16,
    max_model_len=256,
    num_scheduler_steps=1,  # one token per step, and no step ahead of the pictures
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
# `n=4` computes the prompt once. Its blocks are shared by four samples, and the number in a block says so; a
# block is coloured as high as it is full. Hover over one to see its owners.

# %%
prompt = "class Cache:\n    def __init__(self, size):\n        self.size = size\n\n    def "
params = SamplingParams(n=4, temperature=0.9, seed=3, max_tokens=40, ignore_eos=True)
engine.add_request("samples", prompt, params)
run(1)
llm.pool_map()

# %% [markdown]
# Each sample then writes its own tokens. The full blocks of the prompt stay shared. The last one was not
# full: it was copied for each sample that wrote to it, and the last of them keeps the original.

# %%
run(12)
llm.pool_map()

# %%
while engine.has_unfinished_requests():
    outputs = engine.step()
for sample in outputs[0].outputs:
    print(sample.index, repr(sample.text[:70]))

# %% [markdown]
# Done. Nobody holds a block any more, but the full ones stay cached until their memory is needed: a prompt
# that begins as one of them did starts with what is there.
#
# ## Beam search
#
# Beams share more than their prompt: at each step the best continuations live on, so most of them have a
# common past, and a beam that is dropped gives back only what was its own.

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
# Prefixes are found by themselves as long as they are cached. A pinned one (a thick line) stays, whatever
# else needs memory. Requests that begin with it skip its blocks.

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
# Three requests of four samples each want more than there is. The last one is swapped out: its blocks move to
# host memory, still shared as they were, and it goes on when there is room.

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
