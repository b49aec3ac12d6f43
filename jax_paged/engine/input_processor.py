"""Conversion of prompts and parameters into checked requests that the engine can run. Needs no JAX."""

import dataclasses
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeGuard

from jax_paged.arguments.plain_values import as_list, plain
from jax_paged.arguments.shown_values import Text
from jax_paged.arguments.suggestions import suggestion
from jax_paged.config.engine_config import EngineConfig
from jax_paged.core.kv_cache.cache_group import max_blocks_held
from jax_paged.core.request import Request, RequestFeatures
from jax_paged.engine.prompt_reader import PromptReader, TokenizedPrompt, cache_salt_of, with_soft_prompt
from jax_paged.engine.replicas.prior_outputs import PriorOutput
from jax_paged.engine.text.stop_strings import StopStrings
from jax_paged.engine.text.tokenizer import Tokenizer
from jax_paged.errors import ArgumentError, Problems, TooLongError, check, check_int, check_number
from jax_paged.inputs import Prompt
from jax_paged.lora_request import LoRARequest
from jax_paged.pooling_params import PoolingParams
from jax_paged.sampling_params import MAX_BAD_WORDS, BeamSearchParams, SamplingParams

if TYPE_CHECKING:
    from jax_paged.engine.features.lora.adapters import Adapters
    from jax_paged.engine.features.pooling import PoolingRequests
    from jax_paged.engine.features.structured_output.grammars import Grammar, Grammars
    from jax_paged.models.features.lora.adapter_files import Adapter

# Parameters of a request; None means the model's default sampling parameters.
RequestParams = SamplingParams | BeamSearchParams | PoolingParams | None
FLOAT32_MAX = (2 - 2**-23) * 2.0**127


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckedRequest:
    """A request that has been checked: prompt, parameters and everything that was prepared for the engine.

    Args:
        request: The request, without an id. Its sampling parameters are complete: max_tokens is set,
            the vocabulary size replaces -1 as a number of log-probabilities, and bad_words_token_ids contains
            the tokens of bad_words.
        prompt: Text of the prompt; None if the prompt was passed as token ids.
        stop: Automaton of the stop strings; None without stop strings.
        encoder_prompt: Text of the encoder prompt; None if there is none.
        grammar: Compiled grammar of the structured output; None without one.
        adapter: The LoRA adapter; None without one.
        prior_outputs: Outputs of a request that another engine has begun, at least one of them with tokens;
            empty for a new request.
    """

    request: Request
    prompt: str | None
    stop: StopStrings | None = dataclasses.field(default=None, compare=False)
    encoder_prompt: str | None = None
    grammar: "Grammar | None" = dataclasses.field(default=None, compare=False)
    adapter: "Adapter | None" = None
    prior_outputs: tuple[PriorOutput, ...] = ()

    @property
    def params(self) -> SamplingParams:
        """The sampling parameters. This is the engine's own copy."""
        return self.request.sampling_params

    @property
    def prompt_token_ids(self) -> list[int]:
        """The token ids of the prompt; for an encoder-decoder model, the token ids of the decoder prompt."""
        return self.request.prompt_token_ids

    def with_params(self, params: SamplingParams) -> "CheckedRequest":
        """Returns the request with other sampling parameters."""
        request = dataclasses.replace(self.request, sampling_params=params)
        return dataclasses.replace(self, request=request)


@dataclasses.dataclass(frozen=True)
class _Inputs:
    """The parts of a request before they are combined.

    Args:
        params: The parameters that were passed.
        encoder: The encoder prompt; None without an encoder.
        decoder: The decoder prompt, without the vectors of a soft prompt.
        adapter: The LoRA adapter; None without one.
    """

    params: RequestParams
    encoder: TokenizedPrompt | None
    decoder: TokenizedPrompt
    adapter: "Adapter | None"


# Texts after which a word may have other tokens than at the start of a text. Each is used only if the
# tokenizer encodes it separately from the word.
_WORD_CONTEXTS = (" ", "\n", "(")


class InputProcessor:
    """Validation and tokenization of requests, before the engine adds them.

    The methods do not change the state of the engine and may be called from any thread.

    Args:
        config: Settings of the engine, with the limits of the model and the KV cache.
        tokenizer: The tokenizer; None if all prompts are token ids.
        prompts: Reads and tokenizes prompts.
        adapters: The LoRA adapters of the engine.
        grammars: Compiles structured outputs; None without a tokenizer.
        pooling: Checks pooling requests.

    Raises:
        ValueError: If the model's sampling defaults (its generation_config.json) are not valid.
    """

    def __init__(
        self,
        config: EngineConfig,
        tokenizer: Tokenizer | None,
        prompts: PromptReader,
        *,
        adapters: "Adapters",
        grammars: "Grammars | None",
        pooling: "PoolingRequests",
    ) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._prompts = prompts
        self.adapters = adapters
        self.pooling = pooling
        self._grammars = grammars
        try:
            self._default_params = SamplingParams(**config.sampling_defaults)
        except (TypeError, ValueError) as error:
            raise ValueError(f"generation_config.json of {config.model_name!r}: {error}") from error
        self._max_seqs = min(config.max_num_seqs, config.max_num_batched_tokens)
        self._generates = config.pooling is None or config.pooling.generates

    def close(self) -> None:
        """Cancels running compilations of grammars."""
        if self._grammars is not None:
            self._grammars.close()

    @property
    def default_params(self) -> SamplingParams:
        """A copy of the default sampling parameters, which requests without parameters use."""
        return self._default_params.clone()

    def check(
        self,
        prompt: Prompt,
        params: RequestParams,
        cache_salt: str = "",
        priority: int = 0,
        lora_request: LoRARequest | None = None,
    ) -> CheckedRequest:
        """Tokenizes a prompt and checks the request; LLMEngine.check_request describes the arguments.

        Raises:
            ValueError: If the engine can't run the request. One message reports the problems of the prompt,
                the parameters and the other arguments. Their combinations are checked only if there are no
                such problems.
        """
        cache_salt, priority = plain(cache_salt), plain(priority)
        problems = Problems()
        problems.note(check, isinstance(cache_salt, str), "cache_salt", cache_salt, "a string")
        problems.note(self._check_priority, priority)
        checked_params = problems.note(self._checked_params, params)
        prompts = problems.note(self._read, prompt, params)
        adapter = None if lora_request is None else problems.note(self.adapters.get, lora_request)
        problems.raise_if_any()
        assert checked_params is not None, "parameters are None although no check has failed"
        assert prompts is not None, "prompts are None although no check has failed"
        inputs = _Inputs(params, *prompts, adapter)
        encoder, decoder = prompts
        is_plain = adapter is None and encoder is None and decoder.is_plain and _is_sampling(params)
        if not is_plain:
            decoder = self._check_combination(checked_params, inputs)
        num_tokens = checked_params.truncate_prompt_tokens
        if num_tokens is not None:
            self._truncate(num_tokens, checked_params, (encoder or decoder).token_ids)
        self._fit_max_tokens(len(decoder.token_ids), checked_params)
        salt = cache_salt_of(cache_salt, encoder, decoder)
        checked = CheckedRequest(
            request=Request("", decoder.token_ids, checked_params, salt, priority),
            prompt=decoder.text,
            # The stop strings are prepared here so that the engine's thread does not spend time on it.
            stop=StopStrings(checked_params.stop_strings) if checked_params.stop_strings else None,
        )
        if not is_plain or checked_params.structured_outputs is not None:
            checked = self._with_features(checked, inputs, decoder)
        self._check_length(checked.request)
        return checked

    def _truncate(self, num_tokens: int, params: SamplingParams, token_ids: list[int]) -> None:
        """Truncates a prompt in place to its last `num_tokens` tokens.

        -1 keeps as many tokens as leave room for one output token. Does nothing for pooling requests, whose
        prompts are already truncated.
        """
        if params.pooling is None:
            del token_ids[: -(self._config.max_model_len - 1 if num_tokens == -1 else num_tokens)]

    def _with_features(
        self, checked: CheckedRequest, inputs: _Inputs, decoder: TokenizedPrompt
    ) -> CheckedRequest:
        """Returns the request with data of features: beams, encoder, adapter, vectors, images, grammar."""
        beams, encoder, adapter, max_tokens = None, inputs.encoder, inputs.adapter, checked.params.max_tokens
        if isinstance(inputs.params, BeamSearchParams):
            assert max_tokens is not None, "max_tokens of the beam search is not set"
            beams = dataclasses.replace(inputs.params, max_tokens=max_tokens)
        features = RequestFeatures(
            beam_params=beams,
            encoder_token_ids=encoder.token_ids if encoder else [],
            # An adapter that is only a soft prompt needs no adapter slot: its vectors belong to the prompt.
            adapter=adapter.key if adapter and adapter.pairs else "",
            prompt_embeds=decoder.embeds,
            placeholder_data=decoder.placeholder_data,
        )
        used = None if features == RequestFeatures() else features
        return dataclasses.replace(
            checked,
            request=dataclasses.replace(checked.request, features=used),
            encoder_prompt=encoder.text if encoder else None,
            grammar=self.grammar_of(checked.params),
            adapter=adapter,
        )

    def grammar_of(self, params: SamplingParams) -> "Grammar | None":
        """Returns the compiled grammar of a request's structured output; None without structured output.

        Raises:
            ValueError: If the grammar can't be compiled, or there is no tokenizer.
        """
        structured_outputs = params.structured_outputs
        if structured_outputs is not None and self._grammars is None:
            raise ArgumentError(
                "structured_outputs", structured_outputs, "None because the engine has no tokenizer"
            )
        return structured_outputs and self._grammars and self._grammars.compile(structured_outputs)

    def _check_priority(self, priority: int) -> None:
        check_int("priority", priority, -(2**63), 2**63 - 1)
        if priority and self._config.scheduling_policy != "priority":
            raise ArgumentError("priority", priority, "0 with scheduling_policy='fcfs'")

    # Prompts.

    def _read(self, prompt: Prompt, params: RequestParams) -> tuple[TokenizedPrompt | None, TokenizedPrompt]:
        """Returns the encoder prompt (None without an encoder) and the decoder prompt."""
        if _is_sampling(params):
            is_truncated = (params or self._default_params).truncate_prompt_tokens is not None
        else:
            prompt, is_truncated = self._with_default_prompt(prompt, params)
        return self._prompts.read(prompt, is_truncated=is_truncated)

    def _with_default_prompt(self, prompt: Prompt, params: RequestParams) -> tuple[Prompt, bool]:
        """Returns the prompt of a pooling request with the model's default prompt in front of its text.

        The prompt of any other request, such as a beam search, is returned unchanged. Also returns whether
        the prompt is truncated.
        """
        is_pooled = isinstance(params, PoolingParams)
        return self.pooling.prepare(prompt, params) if is_pooled else (prompt, False)

    # Parameters.

    def _checked_params(self, params: RequestParams) -> SamplingParams:
        """Returns the sampling parameters that a request runs with: a copy that is complete and checked."""
        if not (_is_sampling(params) and self._generates):
            return self._non_sampling_params(params)
        params = (self._default_params if params is None else params).clone()
        params.validate()
        self._resolve(params)
        self._check_limits(params)
        return params

    def _non_sampling_params(self, params: RequestParams) -> SamplingParams:
        """Returns the sampling parameters that a pooling request or a beam search runs with."""
        if isinstance(params, PoolingParams):
            return self.pooling.sampling_params(params)
        if not self._generates:
            allowed = f"PoolingParams because {self._config.architecture} generates no tokens"
            raise ArgumentError("sampling_params", params, allowed)
        ok = isinstance(params, BeamSearchParams)
        check(ok, "sampling_params", params, "SamplingParams or BeamSearchParams")
        assert isinstance(params, BeamSearchParams), f"unexpected parameters {type(params)}"
        return self._params_of_beams(params)

    def _params_of_beams(self, beams: BeamSearchParams) -> SamplingParams:
        """Returns the sampling parameters that a beam search runs with.

        The request is greedy and reports the 2 * beam_width most likely tokens at each position.
        """
        beams = dataclasses.replace(beams)
        beams.validate()
        high = min(self._config.max_logprobs // 2, self._max_seqs)
        check_int("beam_width", beams.beam_width, 1, high)
        return SamplingParams(
            temperature=0,
            max_tokens=beams.max_tokens,
            ignore_eos=beams.ignore_eos,
            logprobs=2 * beams.beam_width,
            seed=0,
        )

    def _resolve(self, params: SamplingParams) -> None:
        """Fills in derived parameters: prefix cache use, arguments of hooks and logits processors, bad words.

        `_resolve_logprobs` later checks the numbers of log-probabilities and replaces -1.
        """
        if params.uses_features:
            self._resolve_user_functions(params)
        else:
            params.skip_reading_prefix_cache = not params.reads_prefix_cache
        if params.bad_words:
            if self._tokenizer is None:
                allowed = "None because the engine has no tokenizer"
                raise ArgumentError("bad_words", params.bad_words, allowed)
            num_words = len(params.bad_words) + len(params.bad_words_token_ids or ())
            check_int("bad_words", num_words, 0, MAX_BAD_WORDS, aspect="the number of")
            words = [ids for word in params.bad_words for ids in bad_word_token_ids(word, self._tokenizer)]
            params.bad_words_token_ids = [*(params.bad_words_token_ids or ()), *words]

    def _resolve_user_functions(self, params: SamplingParams) -> None:
        """Checks hooks and logits processors, and converts their arguments to lists of floats.

        A request whose hooks capture activations does not read the prefix cache, because cached tokens are
        not computed.
        """
        config = self._config
        for field, known in (("hook_args", config.hooks), ("extra_args", config.logits_processors)):
            setattr(params, field, _resolved_args(field, getattr(params, field), known))
        captures = not config.capturing_hooks.isdisjoint(params.hook_args or ())
        params.skip_reading_prefix_cache = captures or not params.reads_prefix_cache
        if params.logits_processors:
            backend = config.distributed_executor_backend
            allowed = f"None with distributed_executor_backend={backend!r} because they run in this process"
            check(backend == "uni", "logits_processors", params.logits_processors, allowed)
            message = "logits_processors run on the host for each token, which is slow; see LogitsProcessor"
            warnings.warn(message, UserWarning, stacklevel=2)

    def _resolve_logprobs(self, params: SamplingParams, name: str) -> None:
        """Checks logprobs or prompt_logprobs, and replaces -1 by the vocabulary size.

        Args:
            params: The parameters.
            name: "logprobs" or "prompt_logprobs".
        """
        value, vocab_size, high = getattr(params, name), self._config.vocab_size, self._config.max_logprobs
        if value == -1:
            if vocab_size > high:
                remedy = f", which means all {vocab_size} tokens of the vocabulary"
                raise ArgumentError(name, value, f"at most {high} (max_logprobs)", remedy=remedy)
            setattr(params, name, vocab_size)
        elif value is not None:
            check_int(name, value, 0, high)

    def _check_feature_params(self, params: SamplingParams) -> None:
        """Checks parameters that only some models support."""
        ok = params.pooling is None or self._config.pooling is not None
        check(ok, "pooling", params.pooling, "None because the model does not support pooling")

    def _check_limits(self, params: SamplingParams) -> None:
        """Checks the limits that depend on the model and the engine."""
        config, problems = self._config, Problems()
        problems.note(params.validate_for_vocab, config.vocab_size)
        num_samples, high = params.best_of or params.n, self._max_seqs
        name = "n" if params.best_of is None else "best_of"
        condition = "(the smaller of max_num_seqs and max_num_batched_tokens)"
        problems.note(check_int, name, num_samples, 1, high, condition=condition)
        for name in ("logprobs", "prompt_logprobs"):
            problems.note(self._resolve_logprobs, params, name)
        if not params.bad_words:
            num_words = len(params.bad_words_token_ids or ())
            aspect = "the number of"
            problems.note(check_int, "bad_words_token_ids", num_words, 0, MAX_BAD_WORDS, aspect=aspect)
        if params.uses_features:
            problems.note(self._check_feature_params, params)
        ok = self._tokenizer is not None or not params.stop_strings
        problems.note(check, ok, "stop", params.stop, "None because the engine has no tokenizer")
        problems.raise_if_any()

    # Prompts and parameters together.

    def _check_combination(self, params: SamplingParams, inputs: _Inputs) -> TokenizedPrompt:
        """Returns the complete decoder prompt, including the vectors of a soft prompt.

        Also truncates the prompt of a pooling request, in place.

        Raises:
            ValueError: If features are combined that exclude each other, such as images and truncation.
        """
        encoder, decoder, adapter = inputs.encoder, inputs.decoder, inputs.adapter
        if adapter is not None and params.pooling is not None:
            raise ArgumentError("lora_request", Text("an adapter"), "None for pooling requests")
        if decoder.placeholder_data:
            allowed = "None with images"
            for name in ("truncate_prompt_tokens", "pooling"):
                check(getattr(params, name) is None, name, getattr(params, name), allowed)
        if params.pooling is not None:
            self.pooling.truncate((encoder or decoder).token_ids, params.truncate_prompt_tokens)
        soft_prompt = None if adapter is None else adapter.prompt
        is_soft = soft_prompt is not None
        if is_soft and decoder.embeds is not None:
            raise ArgumentError("prompt_embeds", Text("embeddings"), "None with an adapter's soft prompt")
        if is_soft and decoder.placeholder_data:
            raise ArgumentError("lora_request", Text("a soft prompt"), "a LoRA adapter or None with images")
        if not is_soft and decoder.embeds is None:
            return decoder
        problems, what = Problems(), "a soft prompt" if is_soft else "prompt_embeds"
        allowed = f"SamplingParams for a prompt with {what} because beam search returns token ids of prompts"
        beams = inputs.params if isinstance(inputs.params, BeamSearchParams) else None
        problems.note(check, beams is None, "sampling_params", beams, allowed)
        for name, neutral in (
            ("prompt_logprobs", None),
            ("repetition_penalty", 1.0),
            ("truncate_prompt_tokens", None),
            ("bad_words", None),
            ("bad_words_token_ids", None),
            ("logits_processors", None),
            ("pooling", None),
        ):
            value, ok = getattr(params, name), getattr(params, name) in (neutral, [])
            problems.note(check, ok, name, value, f"{neutral} with {what}, whose vectors have no token ids")
        problems.raise_if_any()
        return decoder if soft_prompt is None else with_soft_prompt(decoder, soft_prompt)

    def _fit_max_tokens(self, num_tokens: int, params: SamplingParams) -> None:
        """Reduces max_tokens and min_tokens to the room that the prompt leaves within max_model_len.

        Raises:
            TooLongError: If there is no room for an output token.
        """
        # The token that a pooling request draws is not used, so it needs no room.
        pools = params.pooling is not None
        room = self._config.max_model_len - num_tokens + pools
        if room < 1:
            raise TooLongError(num_tokens, self._config.max_model_len, num_reserved=int(not pools))
        params.max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        params.min_tokens = min(params.min_tokens, params.max_tokens)

    def _check_length(self, request: Request) -> None:
        """Raises ValueError if the prompt needs more KV cache blocks than there are."""
        config, n, num_seqs = self._config, len(request.prompt_token_ids), request.max_num_seqs
        encoder_len = 0 if request.features is None else self._checked_encoder_len(request.features)
        needed, usable, size = 0, config.num_blocks - 1, config.block_size
        for group in config.cache_groups:
            needed += max_blocks_held(group, encoder_len if group.is_cross else n, size)
            if num_seqs > 1 and request.sampling_params.max_tokens != 1 and not group.is_cross:
                # The sequences share the full blocks of the prompt. If its last block is partly filled, one
                # sequence keeps this block. Each other sequence needs a new block for its tokens.
                needed += num_seqs - (n % size > 0)
        if needed > usable:
            several = f" by {num_seqs} sequences" if num_seqs > 1 else ""
            num_engines = config.pipeline_parallel_size
            num_bytes = -(-config.kv_cache_bytes * (needed + 1) // config.num_blocks) * num_engines
            remedy = (
                f". Increase the KV cache to kv_cache_memory_bytes={num_bytes} or "
                f"num_gpu_blocks_override={(needed + 1) * num_engines}"
            )
            allowed, aspect = f"at most {usable} (usable blocks)", f"the KV blocks needed{several} for"
            raise ArgumentError("prompt", needed, allowed, aspect=aspect, remedy=remedy)

    def _checked_encoder_len(self, features: RequestFeatures) -> int:
        """Returns the number of encoder tokens, or raises TooLongError if it exceeds max_model_len."""
        num_tokens, most = len(features.encoder_token_ids), self._config.max_model_len
        if num_tokens > most:
            raise TooLongError(num_tokens, most, aspect="the number of encoder tokens of")
        return num_tokens


def _is_sampling(params: RequestParams) -> TypeGuard[SamplingParams | None]:
    return params is None or isinstance(params, SamplingParams)


def _resolved_args(
    field: str, given: dict[str, Any] | None, known: Mapping[str, int]
) -> dict[str, list[float]] | None:
    """Returns hook_args or extra_args as lists of floats by name; None if there are none.

    Args:
        field: "hook_args" or "extra_args".
        given: The arguments that were passed, by the name of the hook or logits processor.
        known: The number of arguments that each hook or logits processor of the engine expects.
    """
    resolved: dict[str, list[float]] = {}
    for name, value in (given or {}).items():
        kind = {"hook_args": "hooks", "extra_args": "logits processors"}[field]
        allowed = f"one of the {kind} of this engine, {list(known)}"
        remedy = suggestion(name, known)
        check(name in known, field, name, allowed, aspect="each name in", remedy=remedy)
        numbers = as_list(value)
        numbers = list(numbers) if isinstance(numbers, list | tuple) else [numbers]
        check(len(numbers) == known[name], f"{field}[{name!r}]", value, f"a list of {known[name]} numbers")
        for number in numbers:
            check_number(f"{field}[{name!r}]", number, -FLOAT32_MAX, FLOAT32_MAX)
        resolved[name] = [float(number) for number in numbers]
    return resolved or None


def bad_word_token_ids(word: str, tokenizer: Tokenizer) -> list[list[int]]:
    """Returns the token sequences that a tokenizer may produce for a word, depending on the text before it.

    A tokenizer may encode a word differently at the start of a text, after a space, at the start of a line
    and after punctuation. A sequence that ends with a shorter one from the list is left out: if the shorter
    sequence can't be generated, the longer one can't either.

    Args:
        word: The word; spaces in front of it are ignored.
        tokenizer: The tokenizer of the model.

    Raises:
        ValueError: If the word has no tokens.
    """
    text = word.lstrip()
    encodings = [tokenizer.encode(text, add_special_tokens=False)]
    check(bool(encodings[0]), "bad_words", word, "words of at least one token")
    encodings.append(tokenizer.encode(" " + text, add_special_tokens=False))
    for context in _WORD_CONTEXTS:
        before = tokenizer.encode(context, add_special_tokens=False)
        whole = tokenizer.encode(context + text, add_special_tokens=False)
        if before and whole[: len(before)] == before:
            encodings.append(whole[len(before) :])
    unique = [ids for i, ids in enumerate(encodings) if ids and ids not in encodings[:i]]
    return [ids for ids in unique if not any(len(x) < len(ids) and ids[-len(x) :] == x for x in unique)]
