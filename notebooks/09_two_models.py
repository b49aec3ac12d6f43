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
# # Two models
#
# Two engines can live in one process, and some ways to generate text need two models. Contrastive decoding
# asks a good model, the expert, and a worse one, the amateur, and prefers tokens that only the expert finds
# likely. Speculative decoding lets a drafter guess several tokens, which the expert checks in one step.
#
# The expert is pagelet. The amateur is pagelet with noise on its weights, so both have the same tokens.

# %%
import random
import re

import jax
import matplotlib.pyplot as plt
import numpy as np
from flax import nnx

from jax_paged import LLM, SamplingParams
from jax_paged.models.checkpoint import resolve_model_dir
from jax_paged.models.weights import load_model

settings = {
    "block_size": 8,
    "num_gpu_blocks_override": 160,
    "max_num_seqs": 16,
    "max_model_len": 256,
    "num_scheduler_steps": 1,
    "async_scheduling": False,
    "batch_invariant": True,  # the same sums for one token and for a draft
}
expert = LLM("pagelet", dtype="float32", **settings)
tokenizer = expert.get_tokenizer()


def disturbed(noise):
    """Returns pagelet with noise on each weight, in standard deviations of that weight."""
    model = load_model(resolve_model_dir("pagelet"), "float32").model
    rng = np.random.default_rng(0)

    def disturb(weight):
        return weight + noise * np.std(weight) * rng.standard_normal(weight.shape).astype(np.float32)

    nnx.update(model, jax.tree.map(disturb, nnx.state(model, nnx.Param)))
    return model


amateur = LLM.from_module(disturbed(0.2), "pagelet", **settings)


def prompt(question):
    messages = [{"role": "user", "content": question}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tokenizer.encode(text, add_special_tokens=False)


def greedy(llm, tokens, max_tokens):
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    return llm.generate([{"prompt_token_ids": tokens}], params, use_tqdm=False)[0].outputs[0]


for name, llm in (("expert", expert), ("amateur", amateur)):
    print(f"{name:8}", greedy(llm, prompt("What is paged attention?"), 40).text)

# %% [markdown]
# ## The next token of each model
#
# `inspect` returns the logits of the next token of a request that has at least one output token. So the
# prompt is the text without its last token, which is then forced as the first output token. Each text is a
# new request, but the prefix cache holds the blocks of the previous text, and only new tokens are computed.


# %%
def next_logprobs(llm, tokens):
    """Returns the log-probabilities of all tokens that may follow a text."""
    *before, last = tokens
    engine = llm.llm_engine
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, forced_token_ids=[last])
    engine.add_request("text", {"prompt_token_ids": before}, params)
    while not engine.step():
        pass
    logits = engine.inspect("text").logits
    engine.abort_request("text")
    logits = logits - logits.max()
    return logits - np.log(np.exp(logits).sum())


question = "I need 15 + 43, quickly."
good, bad = (next_logprobs(llm, prompt(question)) for llm in (expert, amateur))
best = np.argsort(good)[::-1][:8]
names = [repr(tokenizer.decode([int(i)])) for i in best]
figure, axes = plt.subplots(figsize=(8, 3))
places = np.arange(len(best))
axes.bar(places - 0.2, np.exp(good[best]), 0.4, color="#0072B2", label="expert")
axes.bar(places + 0.2, np.exp(bad[best]), 0.4, color="#E69F00", label="amateur")
axes.set_xticks(places, names)
axes.set_ylabel("probability")
axes.set_title(f"the first token of the answer to: {question}", fontsize=9)
axes.legend(frameon=False)
axes.spines[["top", "right"]].set_visible(False)
plt.show()

# %% [markdown]
# ## Contrastive decoding
#
# The next token is the one with the highest log-probability of the expert, plus `beta` times the difference
# between expert and amateur. A token is only considered if the expert finds it at least a tenth as likely as
# its best one. Otherwise, a token that both find absurd could win. The chosen token goes into both texts.


# %%
def contrastive(tokens, beta, max_tokens=12, alpha=0.1):
    chosen = []
    while len(chosen) < max_tokens:
        good, bad = (next_logprobs(llm, tokens + chosen) for llm in (expert, amateur))
        plausible = good >= good.max() + np.log(alpha)
        token = int(np.where(plausible, good + beta * (good - bad), -np.inf).argmax())
        if token == tokenizer.eos_token_id:
            break
        chosen.append(token)
    return tokenizer.decode(chosen)


def is_right(question, text):
    a, b = map(int, re.findall(r"\d+", question))
    return text.startswith(f"{a} + {b} = {a + b}")


rng = random.Random(0)
pairs = [(rng.randrange(10, 100), rng.randrange(10, 100)) for _ in range(12)]
questions = [f"I need {a} + {b}, quickly." for a, b in pairs]
betas = (0, 0.5, 1)
answers = {beta: [contrastive(prompt(text), beta) for text in questions] for beta in betas}
alone = [greedy(amateur, prompt(text), 12).text for text in questions]

print(f"the amateur alone: {sum(map(is_right, questions, alone))} of {len(questions)} sums are right")
for beta, texts in answers.items():
    print(f"beta = {beta:3}: {sum(map(is_right, questions, texts))} of {len(questions)} sums are right")
changed = [row for row in zip(questions, answers[0], answers[1], strict=True) if row[1] != row[2]]
for text, without, contrasted in changed[:4]:
    print(f"{text}\n    beta = 0: {without}\n    beta = 1: {contrasted}")

# %% [markdown]
# With `beta = 0` this is greedy decoding of the expert. The benefit of a contrast depends on the amateur: it
# has to make the same mistakes as the expert, only more of them, like a smaller model of the same family.
# Noise causes other mistakes, so this contrast says little about the mistakes of the expert. Measure before
# you use it.
#
# ## Drafts
#
# The same amateur is a fine drafter, as most tokens are easy. It proposes four tokens, and `verify` computes
# all of them in one step of the expert: those that the expert would have chosen are accepted, and one more
# token of the expert's own comes with them.
#
# The other drafter is not a model. Prompt lookup searches the text for an earlier occurrence of its last
# tokens, and proposes the tokens that followed there.


# %%
def by_amateur(tokens, count):
    return list(greedy(amateur, tokens, count).token_ids)


def by_lookup(tokens, count):
    for n in (3, 2):
        for i in range(len(tokens) - n - 1, -1, -1):
            if tokens[i : i + n] == tokens[-n:]:
                return tokens[i + n : i + n + count]
    return []


def speculate(tokens, draft, max_tokens=40, num_draft=4):
    """Returns the tokens of the output, and how many were proposed and accepted in each step."""
    engine = expert.llm_engine
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    engine.add_request("text", {"prompt_token_ids": tokens}, params)
    output, steps = [], []
    while len(output) < max_tokens and tokenizer.eos_token_id not in output[-1:]:
        room = min(num_draft, max_tokens - len(output) - 1)  # a token of the expert's own comes with a draft
        proposed = draft(tokens + output, room) if output and room else []
        if proposed:
            found = engine.verify("text", proposed)
            output += found.token_ids
            steps.append((len(proposed), found.num_accepted))
        else:  # an ordinary step
            for result in engine.step():
                output = list(result.outputs[0].token_ids)
            steps.append((0, 0))
    while engine.has_unfinished_requests():
        engine.step()  # ends the request
    return output, steps


code = """class Config:
    def __init__(self, width, height, depth):
        self.width = width
        self.height = height
        self.depth ="""
texts = {
    "a question": prompt("What is a block table?"),
    "code": tokenizer.encode(code, add_special_tokens=False),
}
drafters = {"the amateur": by_amateur, "prompt lookup": by_lookup}
steps_of = {}
for text, tokens in texts.items():
    plain = list(greedy(expert, tokens, 40).token_ids)
    for name, draft in drafters.items():
        output, steps = speculate(tokens, draft)
        assert output == plain
        steps_of[text, name] = steps
        print(f"{text}, {name}: the same {len(plain)} tokens in {len(steps)} steps")
    print(repr(tokenizer.decode(plain)))

# %% [markdown]
# The assertion in the cell above always holds: for any draft, the output equals plain greedy decoding, token
# for token. A bad draft costs only time.
#
# In the picture, a bar is a step of the expert. Proposed tokens are outlined, accepted ones blue. Orange is
# the expert's own token, which each step adds in any case.

# %%
figure, axes = plt.subplots(2, 2, figsize=(9, 4), sharex=True, sharey=True, layout="constrained")
for axis, ((text, name), steps) in zip(axes.flat, steps_of.items(), strict=True):
    proposed, accepted = np.array(steps).T
    places = np.arange(len(steps))
    axis.bar(places, 1, color="#E69F00", label="the expert's own")
    axis.bar(places, accepted, bottom=1, color="#0072B2", label="accepted")
    axis.bar(places, proposed, bottom=1, fill=False, edgecolor="#777777", lw=0.8, label="proposed")
    axis.set_title(f"{text}, {name}: {len(steps)} steps", fontsize=9, loc="left")
    axis.spines[["top", "right"]].set_visible(False)
for axis in axes[-1]:
    axis.set_xlabel("step of the expert")
for axis in axes[:, 0]:
    axis.set_ylabel("tokens")
axes[0, 1].legend(frameon=False, fontsize=8, loc="upper right")
plt.show()

# %% [markdown]
# ## A drafter between good and bad
#
# The more noise, the fewer tokens of a draft are accepted. `update_weights` gives the amateur other weights
# and compiles nothing again, so a better drafter, such as one that has learnt from the expert, can be
# exchanged while both serve.

# %%
for noise in (0.1, 0.4):
    amateur.update_weights(disturbed(noise))
    for text, tokens in texts.items():
        output, steps = speculate(tokens, by_amateur)
        proposed, accepted = np.array(steps).sum(0)
        print(f"noise {noise}, {text}: {accepted} of {proposed} tokens accepted in {len(steps)} steps")

# %%
amateur.close()
expert.close()
