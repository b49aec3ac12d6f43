"""Scoring of given texts: their log-probabilities, computed by the same programs as generation."""

from collections.abc import Sequence

from jax_paged.arguments.plain_values import as_list, plain
from jax_paged.engine.feature import EngineFeature
from jax_paged.engine.input_processor import CheckedRequest
from jax_paged.errors import check, check_int
from jax_paged.outputs import CompletionOutput
from jax_paged.sampling_params import SamplingParams


class Scoring(EngineFeature):
    """Method of LLMEngine that computes the log-probabilities of given texts."""

    def score(
        self,
        token_lists: Sequence[Sequence[int]],
        num_prompt_tokens: int | Sequence[int] = 1,
        sampling_params: SamplingParams | None = None,
    ) -> list[list[float]]:
        """Returns the log-probabilities of the tokens of given texts, computed as if they had been generated.

        Each token is computed by a decode step, as in generation. With `batch_invariant=True` the result is
        therefore bitwise equal to the log-probabilities that were returned when the tokens were generated.

        Args:
            token_lists: Token ids of the texts.
            num_prompt_tokens: Number of leading tokens that form the prompt, for all texts or for each text.
                They are prefilled and not scored.
            sampling_params: The sampling parameters that the texts were generated with. They affect the
                result if log-probabilities are taken after processing, or if hooks are on. None for default
                parameters.

        Returns:
            For each text, one log-probability per token after its prompt.

        Raises:
            ValueError: If an argument is wrong (nothing has been computed then), or a text could not be
                scored.
            RuntimeError: If requests are running.
        """
        self._core.check_can_run()
        if not self._core.wait_if_idle():
            raise RuntimeError("requests are running; score texts before or after them")
        number = plain(num_prompt_tokens)
        counts = [number] * len(token_lists) if isinstance(number, int) else number
        allowed = f"an integer or a list of {len(token_lists)} integers"
        ok = hasattr(counts, "__len__") and len(counts) == len(token_lists)
        check(ok, "num_prompt_tokens", num_prompt_tokens, allowed)
        requests = {
            f"score-{i}": self._scored_request(i, list(as_list(text)), count, sampling_params)
            for i, (text, count) in enumerate(zip(token_lists, counts, strict=True))
        }
        return [_logprobs(state.output().outputs[0]) for state in self._core.run_to_end(requests)]

    def _scored_request(
        self, i: int, text: list[int], num_prompt_tokens: int, sampling_params: SamplingParams | None
    ) -> CheckedRequest:
        """Returns a request that is forced to generate the tokens of a text after its prompt."""
        max_len = self._core.config.max_model_len
        check_int(f"token_lists[{i}]", len(text), 2, max_len, aspect="the length of")
        num_prompt_tokens = check_int("num_prompt_tokens", num_prompt_tokens, 1, len(text) - 1)
        params = SamplingParams(temperature=0) if sampling_params is None else sampling_params.clone()
        params.n, params.best_of, params.min_tokens, params.prompt_logprobs = 1, None, 0, None
        params.stop, params.stop_token_ids = None, None
        params.ignore_eos, params.truncate_prompt_tokens = True, None
        params.logprobs, params.detokenize = 0, False
        params.forced_token_ids = text[num_prompt_tokens:]
        params.max_tokens = len(params.forced_token_ids)
        try:
            return self.input_processor.check({"prompt_token_ids": text[:num_prompt_tokens]}, params)
        except ValueError as error:
            raise ValueError(f"token_lists[{i}]: {error}") from error


def _logprobs(output: CompletionOutput) -> list[float]:
    """Returns the log-probabilities of an output's tokens.

    Raises:
        ValueError: If the request ended before all tokens were generated.
    """
    if output.finish_reason != "length":
        raise ValueError(f"scoring failed: {output.stop_reason}")
    assert output.logprobs is not None, "the output has no log-probabilities"
    return [entry[t].logprob for t, entry in zip(output.token_ids, output.logprobs, strict=True)]
