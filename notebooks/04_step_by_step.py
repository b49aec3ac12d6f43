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
# # Step by step
#
# An engine schedules a step, runs it and processes the results, hundreds of times per request. Here you
# decide about each step: `schedule()` returns the next step as a plan, which can be inspected, changed and
# run. Requests that are left out of some steps still get the same tokens.

# %%
from jax_paged import LLM, SamplingParams

settings = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "max_model_len": 128,
    "num_gpu_blocks_override": 64,
    "enable_prefix_caching": False,
}
llm = LLM("pagelet", dtype="float32", num_scheduler_steps=1, **settings)
engine = llm.llm_engine

prompts = {
    "ana": "A block table says which blocks of the pool hold the tokens of a sequence, in their order.",
    "ben": "What is paged attention?",
    "cleo": "def fibonacci(n):",
}
params = SamplingParams(temperature=0.8, seed=1, max_tokens=12, ignore_eos=True)
undisturbed = {name: llm.generate(text, params, use_tqdm=False)[0] for name, text in prompts.items()}
for name, text in prompts.items():
    engine.add_request(name, text, params)

# %% [markdown]
# ## A plan
#
# A step computes at most 16 tokens here. So the first one has room for a part of the first prompt, and the
# second for the rest of it and more. Filled bars are what a step computes, and outlines are tokens whose keys
# and values are in the pool already.

# %%
plan = engine.schedule()
plan

# %%
engine.run(plan)
plan = engine.schedule()
plan

# %% [markdown]
# A plan is immutable. It contains the step (`plan.output`) and the ids of the requests that compute tokens.

# %%
print(plan)
print(plan.request_ids)
row = plan.output.scheduled[0]
print(f"sequence {row.seq_id} computes {row.num_tokens} tokens from position {row.start} on")

# %% [markdown]
# ## Leaving a request out
#
# `without` takes a request out of a plan. The request keeps its blocks and its batch slot, and computes the
# same tokens in a later step.

# %%
engine.run(plan)
plan = engine.schedule().without("ben")
plan

# %% [markdown]
# `only` does the opposite, and sets the order of the requests. A plan can run once. If another step has run
# since, or another plan was made, `run` raises an error.

# %%
engine.run(plan)
first = engine.schedule()
engine.run(first.only(reversed(first.request_ids)))
try:
    engine.run(first)
except ValueError as error:
    print(error)

# %% [markdown]
# ## A scheduler in two lines
#
# `shortest_alone` runs only the request with the fewest output tokens; the others wait. `finish` counts the
# tokens of each request. `step()` can be called at any time, too: it runs the current plan or, if there is
# none, a new one.

# %%
from jax_paged.lab.timeline import timeline_of


def finish(engine, edit=lambda plan: plan):
    """Runs all requests to their end; returns their last outputs. Updates `num_tokens` after each step."""
    outputs = {}
    while engine.has_unfinished_requests():
        outputs |= {output.request_id: output.outputs[0] for output in engine.run(edit(engine.schedule()))}
        for request_id, output in outputs.items():
            num_tokens[request_id] = len(output.token_ids)
    return outputs


def shortest_alone(plan):
    return plan.only([min(plan.request_ids, key=num_tokens.get)])


num_tokens = dict.fromkeys(prompts, 0)
outputs = finish(engine, shortest_alone)
for name in prompts:
    assert outputs[name].token_ids == undisturbed[name].outputs[0].token_ids
    print(f"{name:4} got the same tokens as alone: {outputs[name].text!r}")

# %% [markdown]
# `record` records the steps, and `timeline_of` draws them. The first picture shows the engine's scheduler,
# which puts as many requests into each step as the 16 tokens allow. The second shows `shortest_alone`, which
# runs one request per step: first the three prompts one after another, then the three requests in turn.

# %%
pictures = []
for edit in (lambda plan: plan, shortest_alone):
    lines, num_tokens = [], dict.fromkeys(prompts, 0)
    engine.record(lines.append)
    for name, text in prompts.items():
        engine.add_request(name, text, params)
    finish(engine, edit)
    engine.record(None)
    pictures.append(timeline_of(lines))
pictures[0]

# %%
pictures[1]

# %% [markdown]
# ## Stopping in the middle
#
# `state()` returns everything that is needed to continue: requests and their texts, block tables, queues,
# seeds, and the contents of the blocks in use. `save` writes one JSON file and one safetensors file, without
# pickle. The weights are represented by a fingerprint, unless `state(weights=True)` includes them.

# %%
import tempfile
from pathlib import Path

for name, text in prompts.items():
    engine.add_request(name, text, params)
for _ in range(6):
    engine.step()
state = engine.state()
print(state)
print({name: array.shape for name, array in state.arrays.items() if array.size})

folder = Path(tempfile.mkdtemp())
state.save(folder)
for file in sorted(folder.iterdir()):
    print(f"{file.suffix:12} {file.stat().st_size / 1024:7.1f} KiB")

# %% [markdown]
# This engine finishes its requests. Then a second engine is restored from the folder, which could also happen
# later or in another process. It generates the same tokens with exactly the same log-probabilities.

# %%
here = finish(engine)
llm.close()
with LLM.restore(folder) as resumed:
    there = finish(resumed.llm_engine)
for name in prompts:
    print(f"{name:4} {here[name].cumulative_logprob:.9f}  {here[name].text!r}")
    print(f"{'':4} {there[name].cumulative_logprob:.9f}  {there[name].text!r}")
assert here == there
