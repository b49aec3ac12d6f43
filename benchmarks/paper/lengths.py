"""Traces of requests: lengths of the means that the paper publishes, and Poisson arrivals."""

import dataclasses

import numpy as np

from jax_paged.lab.simulator import Request

MAX_MODEL_LEN = 2048
# Of the lengths only the means are published, and of ShareGPT's that the tails go to about 2000 tokens. The
# spreads are two conventions: a text has that of an exponential distribution, whose standard deviation is its
# mean, as if it could end after any token alike; a sentence (Alpaca's instructions, WMT's lines) half a unit
# of its logarithm, the spread that sentences of prose have. One of 190 of ShareGPT's outputs would then be
# longer than 2000 tokens, and one of 3400 of its prompts.
TEXT_SIGMA = 0.833
SENTENCE_SIGMA = 0.5
# Each figure has a band: all spreads 0.2 lower and 0.2 higher.
SIGMA_BAND = 0.2


@dataclasses.dataclass(frozen=True)
class Workload:
    """What requests are like.

    Args:
        name: Of the data set.
        prompt_mean: Tokens.
        output_mean: Tokens.
        prompt_sigma: Standard deviation of the length's logarithm, before requests that are too long are
            left out.
        output_sigma: The same of outputs.
        prefix_len: Tokens that all prompts begin with, in addition.
        is_chat: Whether a prompt is the end of a conversation, cut at 1024 tokens, as most of the paper's
            are; outputs then have at most 1024 tokens.
        max_len: Most tokens of a prompt, with its prefix, and its output.
    """

    name: str
    prompt_mean: float
    output_mean: float
    prompt_sigma: float
    output_sigma: float
    prefix_len: int = 0
    is_chat: bool = False
    max_len: int = MAX_MODEL_LEN


SHAREGPT = Workload("ShareGPT", 161.31, 337.99, TEXT_SIGMA, TEXT_SIGMA)
ALPACA = Workload("Alpaca", 19.31, 58.45, SENTENCE_SIGMA, TEXT_SIGMA)
CHAT = Workload("Chat", 1024, 337.99, 0.0, TEXT_SIGMA, is_chat=True)
# The paper gives no lengths for WMT16: a sentence of news has about 25 words, in German too.
# The figure's band goes up to twice that.
SENTENCE_LEN = 32.0
WORKLOADS = {
    workload.name: workload
    for workload in (
        SHAREGPT,
        ALPACA,
        CHAT,
        *(
            Workload(name + f"{n}", length, length, SENTENCE_SIGMA, SENTENCE_SIGMA, prefix_len=n)
            for name, length in (("Translation, ", SENTENCE_LEN), ("Long translation, ", 2 * SENTENCE_LEN))
            for n in (80, 341)
        ),
    )
}


def draw_lengths(workload: Workload, count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Returns the lengths of prompts (without a prefix) and of outputs, int [count] each.

    Requests of more than max_len tokens are left out, and the means are those of the others.
    """
    rng = np.random.default_rng(seed)
    normal = rng.standard_normal((2, 2 * count + 100))
    means = np.array([1024.0 if workload.is_chat else workload.prompt_mean, workload.output_mean])
    limit = workload.max_len - workload.prefix_len
    mu, sigmas = np.log(means), np.array([[workload.prompt_sigma], [workload.output_sigma]])
    for _ in range(60):
        lengths = np.maximum(np.rint(np.exp(mu[:, None] + sigmas * normal)), 1)
        if workload.is_chat:
            lengths[0], lengths[1] = 1024, np.minimum(lengths[1], 1024)
        lengths = lengths[:, lengths.sum(axis=0) <= limit][:, :count]
        mu += np.log(means / lengths.mean(axis=1))
    prompts, outputs = lengths.astype(int)
    assert len(prompts) == count, "too many are left out"
    return prompts, outputs


def draw_trace(
    workload: Workload,
    rate: float,
    duration_s: float,
    *,
    n: int = 1,
    beam_width: int | None = None,
    seed: int = 0,
) -> list[Request]:
    """Returns the same requests each time: `rate` per second for a time, with n samples or beams each.

    The last token of a prompt names its request: -1 - its index.
    """
    count = max(1, round(rate * duration_s))
    prompts, outputs = draw_lengths(workload, count, seed)
    arrivals = np.cumsum(np.random.default_rng(seed + 1).exponential(1 / rate, count))
    prefix = list(range(workload.prefix_len))
    return [
        Request(at, prefix + [-1 - i] * prompt if prefix else prompt, output, n, beam_width)
        for i, (at, prompt, output) in enumerate(
            zip(arrivals.tolist(), prompts.tolist(), outputs.tolist(), strict=True)
        )
    ]
