"""Request traces: log-normal lengths with the means that the paper publishes, and Poisson arrivals."""

import dataclasses

import numpy as np

from jax_paged.lab.simulator import Request

MAX_MODEL_LEN = 2048
# The paper publishes only the mean lengths, and that the longest ShareGPT texts have about 2000 tokens. So
# the standard deviations of the logarithms are assumptions. For texts, the standard deviation of the length
# equals its mean, as in an exponential distribution (a text may end after any token). For sentences (Alpaca's
# instructions, WMT's lines), 0.5 is typical of prose. With these values, one in 190 ShareGPT outputs and one
# in 3400 prompts have more than 2000 tokens.
TEXT_SIGMA = 0.833
SENTENCE_SIGMA = 0.5


@dataclasses.dataclass(frozen=True)
class Workload:
    """Distribution of prompt and output lengths.

    Args:
        name: Name of the data set.
        prompt_mean: Mean length of prompts, without the prefix (tokens).
        output_mean: Mean length of outputs (tokens).
        prompt_sigma: Standard deviation of the logarithm of the prompt length, before requests that are too
            long are left out.
        output_sigma: The same for outputs.
        prefix_len: Length of the prefix that all prompts have in common (tokens).
        is_chat: Whether prompts are conversations. As in the paper, only the last 1024 tokens of a
            conversation are used, and outputs have at most 1024 tokens. Here every prompt has 1024 tokens.
        max_len: Maximum length of prefix, prompt and output together (tokens).
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
# The paper gives no lengths for WMT16. A sentence of news has about 25 words, in English and in German. The
# band of figure 16 extends to sentences of twice this length.
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
    """Returns the lengths of prompts (without the prefix) and of outputs, int [count] each.

    Requests with more than max_len tokens are left out. The remaining ones have the means of the workload.
    """
    rng = np.random.default_rng(seed)
    normal = rng.standard_normal((2, 2 * count + 100))
    means = np.array([1024.0 if workload.is_chat else workload.prompt_mean, workload.output_mean])
    limit = workload.max_len - workload.prefix_len
    mu, sigmas = np.log(means), np.array([[workload.prompt_sigma], [workload.output_sigma]])
    for _ in range(60):  # shifts the logarithms until the remaining requests have the wanted means
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
    """Returns Poisson arrivals of requests; equal arguments give equal requests.

    The last token of the prompt of request i has the id -1 - i, by which the Orca systems find the request.

    Args:
        workload: Distribution of the lengths.
        rate: Requests per second.
        duration_s: Time in which requests arrive (seconds).
        n: Number of samples per request.
        beam_width: Number of beams per request; None generates samples.
        seed: Seed of the random numbers.
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
