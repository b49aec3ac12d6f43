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
# # Tree search
#
# A running request can be forked, rolled back, and given a draft. A tree search consists of these three
# operations. Branches share the blocks of their common beginning, a branch that is dropped has cost only its
# own blocks, and your own function decides which branches continue.

# %%
import random
import re

import matplotlib.pyplot as plt

from jax_paged import LLM, SamplingParams

llm = LLM(
    model="pagelet",
    dtype="float32",
    block_size=8,
    num_gpu_blocks_override=160,
    max_num_seqs=16,
    max_model_len=256,
    num_scheduler_steps=1,  # one token per step; no step is in flight while a table is drawn
    async_scheduling=False,
)
engine, tokenizer = llm.llm_engine, llm.get_tokenizer()


def prompt(question):
    messages = [{"role": "user", "content": question}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return {"prompt_token_ids": tokenizer.encode(text, add_special_tokens=False)}


def run(num_steps=None):
    """Runs some steps, or all requests to their end; returns the last output of each request."""
    outputs = {}
    while engine.has_unfinished_requests() and num_steps != 0:
        outputs |= {output.request_id: output for output in engine.step()}
        num_steps = None if num_steps is None else num_steps - 1
    return outputs


# %% [markdown]
# ## Fork
#
# A fork is a new request with the same text so far and a different seed. It shares all blocks until it
# writes. The page table of a request shows how many sequences use each block.

# %%
params = SamplingParams(temperature=1.0, seed=1, max_tokens=24)
engine.add_request("root", prompt("What is a block table?"), params)
run(6)
for seed in (2, 3):
    engine.fork("root", f"branch {seed}", seed=seed)
engine.page_table("root")

# %%
run(4)
engine.page_table("branch 2")

# %% [markdown]
# Four tokens later, the last block, which was not full, has been copied for two of the three branches.
#
# ## Rollback
#
# The last tokens of an output can be taken back. Random numbers depend on the seed and the position alone, so
# the same seed draws the same tokens again.

# %%
before = run(1)["branch 2"].outputs[0].text
engine.rollback("branch 2", 5)
after = run(5)["branch 2"].outputs[0].text
print(repr(before), "\n", repr(after), before == after)
_ = run()

# %% [markdown]
# ## Draft
#
# `verify` computes a draft in one step, and accepts draft tokens as long as they equal the tokens that the
# request generates itself. So the output does not change. It also returns the log-probability of each draft
# token.

# %%
greedy = SamplingParams(temperature=0, max_tokens=24)
engine.add_request("sum", prompt("What is 17 + 25?"), greedy)
run(1)
_, *guess = tokenizer.encode("17 + 25 = 43.", add_special_tokens=False)  # the first token is drawn already
found = engine.verify("sum", guess)
for token_id, logprob in zip(guess, found.logprobs, strict=True):
    print(f"{tokenizer.decode([token_id])!r:8} {logprob:8.3f}")
print(found.num_accepted, "accepted;", repr(run()["sum"].outputs[0].text))

# %% [markdown]
# ## A scorer
#
# pagelet adds two numbers below 100 without mistakes, if the question has a wording that it knows. It often
# misunderstands other wordings. An answer can be checked without knowing it: both numbers of the question
# have to be on the left side of the equation, and the equation has to hold.


# %%
def score(question, text):
    """Returns the points of an answer so far, at most 5.

    1 for each number of the question on the left side, 1 for a plus sign, -1 for a minus sign, and 2 if the
    right side is the sum.
    """
    left, equals, right = text.partition("=")
    numbers = re.findall(r"\d+", question)
    points = sum(number in re.findall(r"\d+", left) for number in numbers) + ("+" in left) - ("-" in left)
    if not equals or not (answer := re.search(r"\d+", right)):
        return points
    return points + 2 * (int(answer[0]) == sum(map(int, numbers)))


def is_right(question, text):
    return score(question, text) == 5


rng = random.Random(0)
pairs = [(rng.randrange(10, 100), rng.randrange(10, 100)) for _ in range(24)]
questions = [f"I need {a} + {b}, quickly." for a, b in pairs]
short = SamplingParams(temperature=0, max_tokens=12)
answers = llm.generate([prompt(question) for question in questions], short, use_tqdm=False)
texts = [answer.outputs[0].text for answer in answers]
right = {"greedy": sum(map(is_right, questions, texts))}
wrong = [
    (question, text) for question, text in zip(questions, texts, strict=True) if not is_right(question, text)
]
print(f"greedy: {right['greedy']} of {len(questions)} right")
for question, text in wrong[:4]:
    print(f"  {question}  ->  {text}")

# %% [markdown]
# ## Best of n
#
# Eight branches from one prompt, of which the scorer takes the best. The prompt is computed once.


# %%
bold = SamplingParams(temperature=1.3, seed=1, max_tokens=12)


def best_of(question, n=8):
    engine.add_request("0", prompt(question), bold)
    run(1)
    for seed in range(1, n):
        engine.fork("0", str(seed), seed=seed)
    texts = [output.outputs[0].text for output in run().values()]
    return max(texts, key=lambda text: score(question, text))


texts = [best_of(question) for question in questions]
right["best of 8"] = sum(map(is_right, questions, texts))
print(f"best of 8: {right['best of 8']} of {len(questions)} right")

# %% [markdown]
# ## A tree
#
# A tree spends its samples on good branches. It begins with nine branches. After every two tokens, the three
# branches with the highest scores continue, and each is forked into three. The others are aborted, and their
# blocks are freed.


# %%
def search(question, width=3, num_children=3, num_tokens=2):
    """Returns the best text, and the tree: a row for each branch at each level.

    A row has the level, the names of the branch and its parent, the text, its score, whether the branch
    continues, and the number of sequences that use each of its blocks.
    """
    engine.add_request("0", prompt(question), bold)
    names, parents, done, seen, level = ["0"], {"0": "0"}, [], [], 0
    while names:
        for name in list(names):
            for _ in range(num_children - 1 if level else width * num_children - 1):
                child = engine.fork(name, str(len(parents)), seed=len(parents))
                parents[child] = name
                names.append(child)
        outputs, level = run(num_tokens), level + 1
        texts = {name: outputs[name].outputs[0].text for name in names}
        ranked = sorted(names, key=lambda name: score(question, texts[name]), reverse=True)
        # Only one of several branches with the same text can be kept.
        distinct = list({texts[name]: name for name in reversed(ranked)}.values())[::-1]
        kept = sorted(distinct, key=lambda name: score(question, texts[name]), reverse=True)[:width]
        for name in names:
            counts = [] if outputs[name].finished else engine.page_table(name).entries["ref_count"].tolist()
            seen.append(
                (level, name, parents[name], texts[name], score(question, texts[name]), name in kept, counts)
            )
        done += [texts[name] for name in kept if outputs[name].finished]
        engine.abort_request([name for name in names if name not in kept])
        names = [name for name in kept if not outputs[name].finished]
        parents |= {name: name for name in names}  # a kept branch is its own parent at the next level
    return max(done, key=lambda text: score(question, text)), seen


found = [search(question) for question in questions]
right["tree"] = sum(is_right(question, text) for question, (text, _) in zip(questions, found, strict=True))
print(f"tree: {right['tree']} of {len(questions)} right")

# %%
figure, axes = plt.subplots(figsize=(6, 1.6))
bars = axes.barh(list(right), list(right.values()), color=["#999999", "#56B4E9", "#D55E00"])
axes.bar_label(bars, [f" {n} of {len(questions)}" for n in right.values()])
axes.set_xlim(0, len(questions) * 1.15)
axes.invert_yaxis()
axes.set_xlabel("sums that are right")
axes.spines[["top", "right"]].set_visible(False)
plt.show()

# %% [markdown]
# ## The tree of one question
#
# Each box is a branch at one level, with the end of its text and its score. The squares below it are its
# blocks; a block that another branch shares is filled. Thin dotted lines lead to branches that were dropped.

# %%
index = next(
    (i for i, asked in enumerate(questions) if (asked in dict(wrong)) and is_right(asked, found[i][0])), 0
)
question, (text, seen) = questions[index], found[index]
levels = max(row[0] for row in seen)
figure, axes = plt.subplots(figsize=(2.6 * levels, 4.6))
places = {(0, "0"): (0.0, 4.0)}
for level in range(1, levels + 1):
    rows = [row for row in seen if row[0] == level]
    for y, (_, name, parent, so_far, points, is_kept, counts) in enumerate(rows):
        x0, y0 = places[level - 1, parent]
        x, y = float(level), 8.0 - y * 8 / max(len(rows) - 1, 1)
        places[level, name] = (x, y)
        style = {"lw": 1.6, "color": "#0072B2"} if is_kept else {"lw": 0.8, "ls": ":", "color": "#888888"}
        axes.plot([x0 + 0.62 * (level > 1), x], [y0, y], **style, zorder=1)
        axes.text(
            x,
            y,
            f"{so_far[-16:]!r} {points}",
            fontsize=7,
            va="center",
            color="black",
            zorder=3,
            bbox={"facecolor": "#CCE5F6" if is_kept else "#EEEEEE", "edgecolor": style["color"], "pad": 2},
        )
        for i, count in enumerate(counts):
            axes.plot(
                x + 0.03 + 0.07 * i,
                y - 0.38,
                "s",
                ms=4,
                mec="#D55E00",
                mfc="#D55E00" if count > 1 else "none",
            )
axes.text(0, 4.3, "prompt", fontsize=8, ha="center")
axes.set_title(f"{question}  ->  {text}", fontsize=9)
axes.set_xlim(-0.2, levels + 1)
axes.axis("off")
plt.show()

# %%
llm.close()
