"""Log-probabilities of given texts, computed by the programs that draw tokens."""

from collections.abc import Sequence

from jax_paged.arguments.plain_values import plain
from jax_paged.checks import check, check_int
from jax_paged.engine.engine_core import EngineCore
from jax_paged.engine.input_processor import CheckedRequest, InputProcessor
from jax_paged.inputs import as_list
from jax_paged.outputs import CompletionOutput
from jax_paged.sampling_params import SamplingParams


class Scoring:
    """Computes the log-probabilities of given texts.

    Args:
        core: Runs the texts.
        inputs: Checks the texts.
    """

    def __init__(self, core: EngineCore, inputs: InputProcessor) -> None:
        self._core = core
        self._inputs = inputs

    def score(
        self,
        token_lists: Sequence[Sequence[int]],
        num_prompt_tokens: int | Sequence[int],
        sampling_params: SamplingParams | None,
    ) -> list[list[float]]:
        """Scores texts; see LLMEngine.score."""
        if not self._core.drain():
            raise RuntimeError("requests are running; score texts before or after them")
        number = plain(num_prompt_tokens)
        counts = [number] * len(token_lists) if isinstance(number, int) else number
        allowed = f"an integer, or one for each of {len(token_lists)} texts"
        ok = hasattr(counts, "__len__") and len(counts) == len(token_lists)
        check(ok, "num_prompt_tokens", num_prompt_tokens, allowed)
        requests = {
            f"score-{i}": self._request(i, list(as_list(text)), count, sampling_params)
            for i, (text, count) in enumerate(zip(token_lists, counts, strict=True))
        }
        return [_logprobs(state.output().outputs[0]) for state in self._core.run_to_end(requests)]

    def _request(
        self, i: int, text: list[int], num_prompt_tokens: int, sampling_params: SamplingParams | None
    ) -> CheckedRequest:
        """Returns a request that draws the tokens of a text after its prompt, whatever it would draw."""
        max_len = self._core.config.max_model_len
        check_int(f"the number of tokens of token_lists[{i}]", len(text), 2, max_len)
        num_prompt_tokens = check_int("num_prompt_tokens", num_prompt_tokens, 1, len(text) - 1)
        params = SamplingParams(temperature=0) if sampling_params is None else sampling_params.clone()
        params.n, params.best_of, params.min_tokens, params.prompt_logprobs = 1, None, 0, None
        params.stop, params.stop_token_ids = None, None
        params.ignore_eos, params.truncate_prompt_tokens = True, None
        params.logprobs, params.detokenize = 0, False
        params.forced_token_ids = text[num_prompt_tokens:]
        params.max_tokens = len(params.forced_token_ids)
        try:
            return self._inputs.check({"prompt_token_ids": text[:num_prompt_tokens]}, params)
        except ValueError as error:
            raise ValueError(f"token_lists[{i}]: {error}") from error


def _logprobs(output: CompletionOutput) -> list[float]:
    """Returns the log-probabilities of an output's tokens, of which there are as many as were forced."""
    if output.finish_reason != "length":
        raise ValueError(f"a text was not scored: {output.stop_reason}")
    assert output.logprobs is not None, "they were asked for"
    return [entry[t].logprob for t, entry in zip(output.token_ids, output.logprobs, strict=True)]
