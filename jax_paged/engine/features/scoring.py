"""Log-probabilities of given texts, computed by the programs that draw tokens."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from jax_paged.arguments.plain_values import plain
from jax_paged.engine.input_processor import CheckedRequest
from jax_paged.errors import check, check_int
from jax_paged.inputs import as_list
from jax_paged.outputs import CompletionOutput
from jax_paged.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jax_paged.engine.llm_engine import LLMEngine


def score(
    engine: "LLMEngine",
    token_lists: Sequence[Sequence[int]],
    num_prompt_tokens: int | Sequence[int],
    sampling_params: SamplingParams | None,
) -> list[list[float]]:
    """Scores texts; see LLMEngine.score."""
    if not engine.drain():
        raise RuntimeError("requests are running; score texts before or after them")
    given = plain(num_prompt_tokens)
    counts = [given] * len(token_lists) if isinstance(given, int) else given
    allowed = f"an integer or a list of {len(token_lists)} integers"
    check(
        hasattr(counts, "__len__") and len(counts) == len(token_lists),
        "num_prompt_tokens",
        num_prompt_tokens,
        allowed,
    )
    pairs = enumerate(zip(token_lists, counts, strict=True))
    requests = [_request(engine, i, list(as_list(text)), n, sampling_params) for i, (text, n) in pairs]
    ids = [f"score-{i}" for i in range(len(requests))]
    scores: dict[str, list[float]] = {}
    try:
        for request_id, request in zip(ids, requests, strict=True):
            engine.add_request(request_id, request)
        while engine.has_unfinished_requests():
            for state in engine.advance():
                if state.is_finished:
                    scores[state.group.request_id] = _logprobs(state.output().outputs[0])
    finally:
        engine.end_requests(ids)
    return [scores[request_id] for request_id in ids]


def _request(
    engine: "LLMEngine", i: int, text: list[int], num_prompt_tokens: int, given: SamplingParams | None
) -> CheckedRequest:
    """Returns a request that draws the tokens of a text behind its prompt, whatever it would draw."""
    max_len = engine.config.max_model_len
    check_int(f"token_lists[{i}]", len(text), 2, max_len, aspect="the length of")
    num_prompt_tokens = check_int("num_prompt_tokens", num_prompt_tokens, 1, len(text) - 1)
    params = SamplingParams(temperature=0) if given is None else given.clone()
    params.n, params.best_of, params.min_tokens, params.prompt_logprobs = 1, None, 0, None
    params.stop, params.stop_token_ids, params.ignore_eos, params.truncate_prompt_tokens = (
        None,
        None,
        True,
        None,
    )
    params.logprobs, params.detokenize = 0, False
    params.forced_token_ids = text[num_prompt_tokens:]
    params.max_tokens = len(params.forced_token_ids)
    try:
        return engine.check_request({"prompt_token_ids": text[:num_prompt_tokens]}, params)
    except ValueError as error:
        raise ValueError(f"token_lists[{i}]: {error}") from error


def _logprobs(output: CompletionOutput) -> list[float]:
    """Returns the log-probabilities of an output's tokens, of which there are as many as were forced."""
    if output.finish_reason != "length":
        raise ValueError(f"a text was not scored: {output.stop_reason}")
    assert output.logprobs is not None, "they were asked for"
    return [entry[t].logprob for t, entry in zip(output.token_ids, output.logprobs, strict=True)]
