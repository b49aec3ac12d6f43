"""Prompts and parameters as users pass them -> requests that the engine can run."""

import dataclasses
from typing import Any

from jax_paged.checks import check, check_int
from jax_paged.engine.tokenizer import Tokenizer
from jax_paged.inputs import Prompt
from jax_paged.sampling_params import BeamSearchParams, SamplingParams
from jax_paged.worker.batch import MAX_BIAS_IDS
from jax_paged.worker.model_runner import RunnerConfig


@dataclasses.dataclass(frozen=True)
class CheckedRequest:
    """A prompt and parameters that the engine can run.

    Args:
        prompt: The text; None if it came as token ids.
        prompt_token_ids: Its tokens; of an encoder-decoder model, those of the decoder.
        encoder_token_ids: Tokens for the encoder; empty for a decoder.
        params: With max_tokens filled in.
        beam_params: What is searched, if it is a beam search.
        cache_salt: Only requests of equal salt share cached prefixes.
        priority: Lower is served earlier.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    encoder_token_ids: list[int]
    params: SamplingParams
    beam_params: BeamSearchParams | None = None
    cache_salt: str = ""
    priority: int = 0


class RequestChecker:
    """Tokenizes and checks; changes nothing, and may be called from any thread.

    Args:
        config: Limits of the model and of the pool.
        tokenizer: None if prompts come as token ids only.
        default_params: For requests that bring none.
        scheduling_policy: Under "fcfs" no request may bring a priority.
    """

    def __init__(
        self,
        config: RunnerConfig,
        tokenizer: Tokenizer | None,
        default_params: SamplingParams,
        scheduling_policy: str,
    ) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._default_params = default_params
        self._scheduling_policy = scheduling_policy
        self._most_seqs = min(config.max_num_seqs, config.max_num_batched_tokens)

    def check(
        self,
        prompt: Prompt,
        params: SamplingParams | BeamSearchParams | None,
        cache_salt: str = "",
        priority: int = 0,
    ) -> CheckedRequest:
        """See LLMEngine.check_request."""
        check(isinstance(cache_salt, str), "cache_salt", cache_salt, "a string")
        check_int("priority", priority, -(2**63), 2**63 - 1)
        if priority and self._scheduling_policy != "priority":
            raise ValueError(f"priority is {priority}; allowed with scheduling_policy 'fcfs': 0")
        params = self._default_params if params is None else params
        beam_params = params if isinstance(params, BeamSearchParams) else None
        if isinstance(params, BeamSearchParams):
            params = self._params_of_beams(params)
        ok = isinstance(params, SamplingParams)
        check(ok, "sampling_params", params, "SamplingParams or BeamSearchParams")
        text, encoder_ids, token_ids = self._split(prompt)
        num_seqs = beam_params.beam_width if beam_params else params.best_of or params.n
        self._check_params(params)
        self._check_length(encoder_ids, token_ids, params, num_seqs)
        if params.max_tokens is None:
            rest = self._config.max_model_len - len(token_ids)
            params = dataclasses.replace(params, max_tokens=rest)
        return CheckedRequest(text, token_ids, encoder_ids, params, beam_params, cache_salt, priority)

    def _split(self, prompt: Any) -> tuple[str | None, list[int], list[int]]:
        """Returns a prompt's text, the tokens for the encoder, and those for the decoder."""
        start = self._config.decoder_start_token_id
        names = {"encoder_prompt", "decoder_prompt"}
        if isinstance(prompt, dict) and prompt.keys() & names:
            check(prompt.keys() == names, "prompt", prompt, f"a dict with both of {sorted(names)}")
            if start is None:
                raise ValueError(f"prompt is {prompt!r}; allowed: a prompt without an encoder's part")
            text, encoder_ids = self._tokenize(prompt["encoder_prompt"])
            return text, encoder_ids, self._tokenize(prompt["decoder_prompt"])[1]
        text, token_ids = self._tokenize(prompt)
        return (text, [], token_ids) if start is None else (text, token_ids, [start])

    def _tokenize(self, prompt: Any) -> tuple[str | None, list[int]]:
        """Returns text (None if there is none) and checked token ids of a prompt in any form."""
        if isinstance(prompt, dict):
            check(
                prompt.keys() in ({"prompt"}, {"prompt_token_ids"}),
                "prompt",
                prompt,
                'a dict with just one of the keys "prompt" and "prompt_token_ids"',
            )
            name, prompt = next(iter(prompt.items()))
            kind = str if name == "prompt" else list | tuple
            check(isinstance(prompt, kind), name, prompt, "text" if kind is str else "a list of token ids")
        if isinstance(prompt, str):
            if self._tokenizer is None:
                raise ValueError("prompt is text, and the engine has no tokenizer; allowed: token ids")
            check(bool(prompt), "prompt", prompt, "text that is not empty")
            token_ids = self._tokenizer.encode(prompt)
            check(bool(token_ids), "prompt", prompt, "text of at least one token")
            highest, allowed = max(token_ids), self._config.vocab_size - 1
            if highest > allowed:
                raise ValueError(
                    f"prompt has the token id {highest}; allowed: the model's vocabulary, [0, {allowed}]. "
                    f"The tokenizer {self._tokenizer.name!r} does not fit the model"
                )
            return prompt, token_ids
        ok = isinstance(prompt, list | tuple)
        check(ok, "prompt", prompt, "text, a list of token ids, or a dict with one of these")
        check(bool(prompt), "prompt_token_ids", prompt, "at least one token id")
        vocab_size = self._config.vocab_size
        for i, token_id in enumerate(prompt):
            if type(token_id) is not int or not 0 <= token_id < vocab_size:
                check_int(f"prompt_token_ids[{i}]", token_id, 0, vocab_size - 1)
        return None, list(prompt)

    def _check_length(
        self, encoder_ids: list[int], token_ids: list[int], params: SamplingParams, num_seqs: int
    ) -> None:
        config, n = self._config, len(token_ids)
        total = n + (1 if params.max_tokens is None else params.max_tokens)
        if total > config.max_model_len:
            raise ValueError(
                f"the prompt has {n} tokens and max_tokens is {params.max_tokens}: {total} tokens in all; "
                f"allowed: max_model_len, {config.max_model_len}"
            )
        if len(encoder_ids) > config.max_model_len:
            raise ValueError(
                f"the prompt has {len(encoder_ids)} tokens for the encoder; allowed: max_model_len, "
                f"{config.max_model_len}"
            )
        needed, usable, size = 0, config.num_blocks - 1, config.block_size
        for group in config.layout.groups:
            if group.is_cross:
                needed += -(-len(encoder_ids) // size)
                continue
            first = 0 if group.window is None else max(0, n - group.window) // size
            # Several sequences share full blocks, and each writes all but its last token to its own.
            is_shared = num_seqs == 1 or params.max_tokens == 1
            needed += (-(-n // size) if is_shared else n // size + num_seqs) - first
        if needed > usable:
            several = f" for {num_seqs} sequences" if num_seqs > 1 else ""
            raise ValueError(
                f"the prompt has {n} tokens and needs {needed} blocks of {size}{several}; allowed: the "
                f"{usable} blocks of the pool"
            )

    def _params_of_beams(self, params: BeamSearchParams) -> SamplingParams:
        """Returns the sampling parameters under which a beam search runs."""
        most = min(self._config.max_logprobs // 2, self._most_seqs)
        check_int("beam_width", params.beam_width, 1, most)
        num_top = 2 * params.beam_width
        return SamplingParams(
            temperature=0,
            max_tokens=params.max_tokens,
            ignore_eos=params.ignore_eos,
            logprobs=num_top,
            seed=0,
        )

    def _check_params(self, params: SamplingParams) -> None:
        config = self._config
        params.validate_for_vocab(config.vocab_size)
        num_samples, most = params.best_of or params.n, self._most_seqs
        check_int(f"the larger of n and best_of (max_num_seqs is {most})", num_samples, 1, most)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(params, name) is not None:
                check_int(name, getattr(params, name), 0, config.max_logprobs)
        num_bias = len(params.logit_bias or ()) + len(config.eos_token_ids)
        num_stop = len(params.stop_token_ids or ())
        if params.min_tokens:
            check_int("the length of stop_token_ids", num_stop, 0, MAX_BIAS_IDS - num_bias)
        if params.stop_strings and self._tokenizer is None:
            raise ValueError(f"stop is {params.stop!r}; allowed: None, as the engine has no tokenizer")
