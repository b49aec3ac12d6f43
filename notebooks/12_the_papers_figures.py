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
# # The paper's figures
#
# The PagedAttention paper compares vLLM with Orca, a system that reserves one contiguous region of memory for
# each request. Here both run with this project's scheduler; only the memory manager differs. A model of an
# A100 provides the step times, so that minutes of traffic take seconds. `docs/paper.md` has all figures and
# assumptions.

# %%
import sys

import matplotlib.pyplot as plt
import numpy as np

sys.path.insert(0, "../benchmarks")
from paper import figures, points, published
from paper.buddy import BuddyManager
from paper.devices import OPT_13B
from paper.lengths import SHAREGPT, draw_trace
from paper.store import Store
from paper.systems import SYSTEMS, make_scheduler

from jax_paged.lab.simulator import simulate

stored = Store()
colors = {"token states": "#0072b2", "reserved": "#56b4e9", "internal": "#e69f00", "other": "#999999"}
hatches = {"token states": "", "reserved": "///", "internal": "xx", "other": ".."}

# %% [markdown]
# ## Contents of the memory
#
# OPT-13B receives two requests per second. Its GPU has 12 GB for keys and values, which is room for 15,700
# tokens. The picture shows this memory after two minutes, from its first slot to its last. Orca (Max)
# reserves memory for the maximum length of the model, Oracle for the true length, and Pow2 for an output
# length that is rounded up to a power of two. The size of each region is a power of two. vLLM allocates a
# block of 16 tokens when a request needs it.
#
# "Reserved" slots are for tokens that will be computed later. "Internal" slots are beyond the true length and
# stay empty, and "rounded up" are the slots that the power of two adds.

# %%
trace = draw_trace(SHAREGPT, 2.0, 130)
kinds = ["free", "token states", "reserved", "internal", "rounded up"]
shades = np.array([[255, 255, 255], [0, 114, 178], [86, 180, 233], [230, 159, 0], [150, 150, 150]]) / 255


def picture_of(system):
    """Returns the index in `kinds` of each slot, and the number of running requests."""
    scheduler = make_scheduler(system, OPT_13B.num_slots, trace)
    simulate(trace, scheduler, OPT_13B.step_time(), stop_s=120)
    manager, slots = scheduler.block_manager, np.zeros(OPT_13B.num_slots // 16 * 16, int)
    for seq, (table,) in manager.block_tables.items():
        held = np.concatenate([np.arange(block * 16 - 16, block * 16) for block in table])
        request = trace[-1 - seq.prompt_token_ids[0]]  # all prompt tokens of request i have the id -1 - i
        ends = [seq.num_computed_tokens, request.prompt_len + request.output_len]
        if isinstance(manager, BuddyManager):
            ends.append(manager.num_reserved_tokens(request.prompt_len, request.output_len))
        for kind, start, stop in zip((1, 2, 3, 4), [0, *ends], [*ends, None], strict=False):
            slots[held[start:stop]] = kind
    return slots, len(manager.block_tables)


figure, axes = plt.subplots(4, 1, figsize=(9, 5), sharex=True, layout="constrained")
for axis, system in zip(axes, SYSTEMS, strict=True):
    slots, count = picture_of(system)
    axis.imshow(shades[slots][None], aspect="auto", interpolation="nearest", extent=(0, len(slots), 0, 1))
    axis.set_yticks([])
    axis.set_title(
        f"{system}: {count} requests, {np.mean(slots == 1):.0%} of the slots hold tokens", loc="left"
    )
axes[-1].set_xlabel("slot")
handles = [plt.Rectangle((0, 0), 1, 1, facecolor=shade, edgecolor="black") for shade in shades]
_ = figure.legend(handles, kinds, loc="outside lower center", ncols=5)

# %% [markdown]
# ## Figure 2: where the memory goes
#
# The bars are averages over five minutes and over an hour of traffic, and the paper's values. No number was
# fitted to them, but the spreads of the lengths were chosen when the first results were known. "Other" slots
# of Orca are free or added by the rounding to powers of two. Those of vLLM are the empty slots of blocks in
# use.

# %%
short = {system: points.batch(system, "ShareGPT", 2.0, 300) for system in SYSTEMS}
hour = figures.rows(2, stored)
figure, axis = plt.subplots(figsize=(9, 4), layout="constrained")
for x, system in enumerate(SYSTEMS):
    bars = {
        "5 minutes": short[system]["memory"],
        "an hour": [row.ours for row in hour if row.panel == system],
        "paper": list(published.MEMORY[system].values()),
    }
    for i, (name, shares) in enumerate(bars.items()):
        bottom, place = 0.0, x * 4 + i
        for kind, share in zip(colors, shares, strict=True):
            axis.bar(place, share, 0.9, bottom, color=colors[kind], hatch=hatches[kind], edgecolor="black")
            if share > 8:
                box = {"facecolor": "white", "edgecolor": "none", "pad": 1}
                axis.text(place, bottom + share / 2, f"{share:.0f}", ha="center", va="center", bbox=box)
            bottom += share
        axis.text(place, 102, name, ha="center", fontsize=8)
axis.set_xticks([x * 4 + 1 for x in range(4)], SYSTEMS)
axis.set_ylabel("% of the memory")
handles = [
    plt.Rectangle((0, 0), 1, 1, facecolor=colors[k], hatch=hatches[k], edgecolor="black") for k in colors
]
_ = figure.legend(handles, list(colors), loc="outside lower center", ncols=4)

# %% [markdown]
# ## Figure 13: how many requests are batched
#
# Better use of the memory allows larger batches. One number of the evaluation is fitted: the time that the
# host takes per step, so that the value of vLLM on Alpaca equals the paper's. The other seven values are
# predictions. The vertical lines show the range for length distributions with lower and higher spreads.

# %%
figure, axes = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
every = figures.rows(13, stored)
for axis, workload in zip(axes, published.BATCHES, strict=True):
    rows = [row for row in every if row.panel.startswith(workload)]
    for x, row in enumerate(rows):
        axis.bar(x - 0.2, row.ours, 0.4, color="#0072b2", label="simulated" if x == 0 else None)
        axis.vlines(x - 0.2, *row.band, color="black", label="range for other spreads" if x == 0 else None)
        paper = "the paper" if x == 0 else None
        axis.bar(x + 0.2, row.paper, 0.4, color="#e69f00", hatch="//", edgecolor="black", label=paper)
        axis.text(x - 0.2, row.band[1] + 0.5, f"{row.ours:.1f}", ha="center", va="bottom", fontsize=8)
        axis.text(x + 0.2, row.paper + 0.5, f"{row.paper:.1f}", ha="center", va="bottom", fontsize=8)
    axis.set_xticks(range(4), [row.label.replace(" ", "\n") for row in rows])
    axis.margins(y=0.1)
    axis.set_title(rows[0].panel, loc="left")
axes[0].set_ylabel("requests")
_ = axes[0].legend(fontsize=8)

# %%
for row in every:
    error = "fitted" if row.is_fitted else f"{row.error:+.0%}"
    print(f"{row.panel:15} {row.label:14} {row.ours:7.2f}   paper {row.paper:7.2f}   {error}")

# %% [markdown]
# ## Figure 15: what sharing saves
#
# Samples of one request share the blocks of its prompt. Beams share more, because the best beams descend from
# few parents. The column "here" is computed now with few requests; "stored" was computed with many.

# %%
lines = ["Alpaca            here  stored   paper"]
for row in figures.rows(15, stored)[:6]:
    several, kind = row.label.split()
    extra = {"n": int(several)} if kind == "samples" else {"beam_width": int(several)}
    here = points.sharing("Alpaca", 400 if kind == "samples" else 60, **extra)
    lines.append(f"{row.label:12} {here:8.1f}%{row.ours:7.1f}%{row.paper:7.1f}%")
print("\n".join(lines))
