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
# # Hooks and steering
#
# A hook is a function of yours that runs after a module of the model. It can read or change the output of the
# module for each token of a step. Requests select the hook by name and pass it their own numbers. Other
# requests are computed as if it did not exist. Here one hook reads the activations of `pagelet` after half of
# its layers, and another one changes them.

# %%
import matplotlib.pyplot as plt
import numpy as np

from jax_paged import LLM, Hook, SamplingParams

PLACE = "layers.1"  # the second of four layers: what it returns is the residual stream
settings = {
    "dtype": "float32",
    "num_scheduler_steps": 1,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "max_model_len": 128,
    "num_gpu_blocks_override": 128,
}


def read(params, activation, args):
    """Leaves the activation as it is, and captures it. This hook has no parameters."""
    return activation, activation


reader = LLM("pagelet", hooks=[Hook(PLACE, read, num_args=0, name="read")], **settings)
tokenizer = reader.get_tokenizer()

# %% [markdown]
# ## Looking inside
#
# The finished output contains the captured activations: a row for each token of the prompt and of the answer
# that was computed. The last token of the answer has no row, because nothing was computed from it.

# %%
text = "A block table says which blocks belong to a request.\n\ndef read(self, name):\n    return self."
params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, hook_args={"read": []})
(output,) = reader.generate([text], params, use_tqdm=False)
seen = output.outputs[0].captured["read"]
tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids][: len(seen)]
labels = [repr(tokenizer.decode([token]))[1:-1] for token in tokens]
print(
    f"{len(output.prompt_token_ids)} tokens of the prompt, {len(output.outputs[0].token_ids)} of the answer"
)
print(f"captured: {seen.dtype} of shape {seen.shape}")

# %% [markdown]
# The picture shows 64 of the 256 numbers of each token, each less its mean over all tokens and divided by its
# standard deviation. To the left of the line is the prompt, which begins as English and goes on as Python.

# %%
centred = (seen - seen.mean(0)) / seen.std(0)
figure, axes = plt.subplots(figsize=(11, 4), layout="constrained")
image = axes.imshow(centred[:, :64].T, aspect="auto", cmap="RdBu_r", vmin=-3, vmax=3)
axes.axvline(len(output.prompt_token_ids) - 0.5, color="black")
axes.set_xticks(range(len(labels)), labels, rotation=90, fontsize=7)
axes.set(ylabel="number in the residual stream", title=f"what {PLACE} returned")
_ = figure.colorbar(image, label="standard deviations")

# %% [markdown]
# ## A direction from English to Python
#
# The direction is the mean activation of some beginnings of Python less that of some beginnings of English.
# The first token of each text is left out, because its activation is unlike all others. Nothing is trained.

# %%
PYTHON = (
    "import os\n\ndef",
    "def fibonacci(n):\n    ",
    "class Node:\n    def __init__(self",
    "for i in range(10):\n    ",
    "if x is None:\n        return",
    "    return self._items[",
    "import numpy as np\n\n",
    "def read_file(path):\n    with open(",
)
ENGLISH = (
    "A block table is",
    "The scheduler decides which",
    "Every request has a",
    "Keys and values of the tokens are",
    "When memory runs out, the",
    "A page of memory holds",
    "The model reads a prompt and",
    "It is the first part of the",
)


def mean_activation(texts):
    outputs = reader.generate(texts, SamplingParams(max_tokens=1, hook_args={"read": []}), use_tqdm=False)
    return np.mean([output.outputs[0].captured["read"][1:].mean(0) for output in outputs], axis=0)


python, english = mean_activation(PYTHON), mean_activation(ENGLISH)
direction = python - english
lengths = np.linalg.norm(direction), np.linalg.norm(english)
print("the direction has length {:.0f}, and the mean of English {:.0f}".format(*lengths))

# %% [markdown]
# Along this direction, 0 is the mean of the English texts and 1 that of the Python texts. So each token of
# the text above has a position along it.

# %%
position = (seen - english) @ direction / (direction @ direction)
figure, axes = plt.subplots(figsize=(11, 2.8), layout="constrained")
colors = ["#d55e00" if value > 0.5 else "#0072b2" for value in position]
axes.bar(range(len(position)), position, color=colors)
axes.axhline(0.5, color="#888888", lw=0.8)
axes.axvline(len(output.prompt_token_ids) - 0.5, color="black")
axes.set_xticks(range(len(labels)), labels, rotation=90, fontsize=7)
_ = axes.set_ylabel("0 is English, 1 is Python")

# %% [markdown]
# ## Steering
#
# The second hook adds the direction, times a strength that each request passes, to the output of the layer.
# So requests with different strengths run in one batch.


# %%
def add(direction, activation, args):
    """Adds to each row (token) the direction times the strength of its request: args [rows, 1]."""
    return activation + args * direction


llm = LLM("pagelet", hooks=[Hook(PLACE, add, direction.astype(np.float32), name="steer")], **settings)
llm.llm_engine.executor.wait_until_compiled()
num_traces = llm.llm_engine.executor.runner.compiled.num_traces


def steered(strength, **kwargs):
    return SamplingParams(**{"temperature": 0, "hook_args": {"steer": strength}} | kwargs)


strengths = (-1.5, -0.75, 0, 0.75, 1.5)
for beginning in ("The", "Each", "In"):
    all_params = [steered(strength, max_tokens=20) for strength in strengths]
    outputs = llm.generate([beginning] * len(all_params), all_params, use_tqdm=False)
    for strength, output in zip(strengths, outputs, strict=True):
        print(f"{strength:5}  {beginning + output.outputs[0].text!r}")
    print()

# %% [markdown]
# `pagelet` is a very small model, and its texts mean little. But the type of text changes with the strength:
# words about caches and requests at one end, and calls and brackets at the other.
#
# For the next picture, eight texts are sampled with each strength. It shows the share of their characters
# that are signs of code, such as brackets and underscores. The dots are single texts and the line is their
# mean.

# %%
SIGNS = set("()[]{}_=:'\"%*+<>#@\\")
BEGINNINGS = ("The", "Each", "In", "It", "A", "If", "This", "When")


def share_of_signs(text):
    """Returns the share of characters, without white space, that are signs of code."""
    characters = [character for character in text if not character.isspace()]
    return sum(character in SIGNS for character in characters) / max(1, len(characters))


many = np.linspace(-1.5, 1.5, 13).tolist()
all_params = [
    steered(strength, temperature=0.7, seed=i, max_tokens=40)
    for strength in many
    for i in range(len(BEGINNINGS))
]
outputs = llm.generate(list(BEGINNINGS) * len(many), all_params, use_tqdm=False)
shares = np.reshape([share_of_signs(output.outputs[0].text) for output in outputs], (len(many), -1))

figure, axes = plt.subplots(figsize=(9, 3.2), layout="constrained")
axes.plot(many, 100 * shares, "o", ms=4, color="#d55e00", alpha=0.4)
axes.plot(many, 100 * shares.mean(1), lw=2, color="#0072b2")
axes.axvline(0, color="#888888", lw=0.8)
axes.set(xlabel="strength of the direction", ylabel="signs of code, percent")
axes.grid(alpha=0.3)
for strength in (many[0], 0.0, many[-1]):
    share = shares[many.index(strength)].mean()
    print(f"strength {strength:4}: {share:.0%} of the characters are signs of code")

# %% [markdown]
# ## Nothing is compiled again
#
# Strengths are arguments of the programs and not constants in them. All those requests ran with the programs
# that were there at the start.

# %%
records = llm.llm_engine.compile_report()
print(f"{len(records)} programs: {', '.join(record.program for record in records)}")
print(f"{llm.llm_engine.executor.runner.compiled.num_traces - num_traces} traces since the first request")

# %% [markdown]
# A request that does not select the hook gets the same tokens as from an engine without the hook, even in a
# batch with a strongly steered request.

# %%
plain = SamplingParams(temperature=0, max_tokens=20)
beside, _ = llm.generate(["The scheduler"] * 2, [plain, steered(1.5, max_tokens=20)], use_tqdm=False)
(without,) = reader.generate(["The scheduler"], plain, use_tqdm=False)
print(f"beside a steered request  {beside.outputs[0].text!r}")
print(f"in the other engine       {without.outputs[0].text!r}")
assert beside.outputs[0].token_ids == without.outputs[0].token_ids
llm.close()
reader.close()
