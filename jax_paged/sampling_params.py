"""Parameters of a request: sampling, beam search and stop conditions."""

import copy
import dataclasses
import enum
import hashlib
from collections.abc import Callable
from typing import Any, Literal, Self

from jax_paged.arguments.ignored import ANY, Ignored, ignores
from jax_paged.arguments.plain_values import make_plain
from jax_paged.errors import Problems, check, check_choice, check_int, check_number
from jax_paged.structured_outputs import StructuredOutputsParams

# Maximum number of logit_bias values other than -100 per request. The number of forbidden tokens is not
# limited.
MAX_BIAS_IDS = 512
# A bias of -100 multiplies a probability by e**-100. In a logit_bias with more than MAX_BIAS_IDS entries, it
# forbids the token instead.
_FORBIDDING_BIAS = -100
# Limits per request: the time and memory for matching stop strings grow with their number of characters.
MAX_STOP_STRINGS = 64
MAX_STOP_STRING_LENGTH = 256
MAX_STOP_CHARACTERS = 4096
# Maximum number of bad-word token sequences per request; the same limit as in vLLM.
MAX_BAD_WORDS = 128

# Arguments of vLLM's SamplingParams for unsupported features, with the values that turn the features off.
IGNORED: Ignored = {
    "early_stopping": (False,),
    "flat_logprobs": (False,),
    "guided_decoding": (None,),
    "length_penalty": (1.0, 1),
    "logprob_token_ids": (None,),
    "prompt_logprob_start": (None,),
    "prompt_logprob_token_ids": (None,),
    "repetition_detection": (None,),
    "skip_clone": ANY,  # the engine always uses a copy
    "spaces_between_special_tokens": ANY,  # the tokenizers library never adds them
    "stream_interval": (None, 1),
    "thinking_token_budget": (None, -1),
    "use_beam_search": (False,),
}


# (output_token_ids, logits) -> logits, or (prompt_token_ids, output_token_ids, logits) -> logits; see
# SamplingParams.logits_processors.
LogitsFunction = Callable[..., Any]


class RequestOutputKind(enum.Enum):
    """Content of each output of a running request."""

    CUMULATIVE = 0  # everything since the start
    DELTA = 1  # only the tokens and text since the previous output
    FINAL_ONLY = 2  # everything, in a single output at the end


@ignores(IGNORED)
@dataclasses.dataclass
class SamplingParams:
    """Sampling parameters and stop conditions of a request; the names and defaults are vLLM's.

    Logits are changed in this order: allowed_token_ids, bad_words, logit_bias, repetition_penalty,
    frequency_penalty, presence_penalty, temperature, min_p, top_k, top_p.

    Attributes may be changed after construction; setting an unknown attribute raises AttributeError. The
    engine checks the parameters again when a request is added and then uses a copy, so later changes do not
    affect that request.

    Example:
        >>> greedy = SamplingParams(temperature=0, max_tokens=32, stop=["."])
        >>> samples = SamplingParams(n=4, temperature=0.8, top_p=0.95, seed=1, logprobs=5)
        >>> llm.generate(["A block table is", "import os"], [greedy, samples])

    Args:
        n: Number of outputs per prompt.
        best_of: Number of outputs to generate, at least n. The n outputs with the highest cumulative
            log-probability are returned. None means n.
        temperature: Divides the logits, in [0, 1e6]. Below 1e-5, the most likely token is chosen (greedy).
        top_p: Keeps the smallest set of most likely tokens whose probabilities sum to at least this value, in
            (0, 1]. Tokens with the same probability as the last token kept are also kept. 1 keeps all tokens.
        top_k: Keeps this number of most likely tokens, and tokens with the same probability as the last of
            them. 0 or -1 keeps all tokens.
        min_p: Keeps tokens whose probability is at least this fraction of the highest probability, in [0, 1].
            0 keeps all tokens.
        presence_penalty: Subtracted from the logit of each token that occurs in the output so far, in
            [-2, 2].
        frequency_penalty: Subtracted from the logit of each token, multiplied by the number of times that the
            token occurs in the output so far, in [-2, 2].
        repetition_penalty: For each token that occurs in the prompt or the output, a positive logit is
            divided by this value and a negative logit multiplied by it, in [1e-6, 1e6]. 1 has no effect.
        seed: Seed for reproducible sampling, in [0, 2**63 - 1]. None or -1 uses a seed derived from the
            engine's seed.
        stop: A string or list of strings that end the output: at most 64 strings, 256 characters per string,
            and 4096 characters in total.
        stop_token_ids: Tokens that end the output, in addition to the model's end-of-sequence tokens.
        bad_words: Words that are not generated. The last token of a word is forbidden at a position where it
            would complete the word. Needs a tokenizer.
        bad_words_token_ids: Token sequences that are not generated. In its copy of the parameters, the engine
            adds the token sequences of bad_words.
        include_stop_str_in_output: Whether the output text includes the stop string or stop token.
        ignore_eos: Whether to continue after the model's end-of-sequence token.
        max_tokens: Maximum number of output tokens, limited by the engine's max_model_len. None generates up
            to that limit.
        min_tokens: Number of output tokens before an end-of-sequence token or one of stop_token_ids can be
            generated.
        logprobs: Number of most likely tokens to report at each output token, in addition to the chosen
            token, up to the engine's max_logprobs. -1 reports the whole vocabulary, None reports nothing.
        prompt_logprobs: Number of most likely tokens to report at each prompt token, with the same values as
            logprobs.
        detokenize: Whether outputs include text; if False, the text is empty.
        logit_bias: Values in [-100, 100] to add to the logits, by token id, with at most 512 values other
            than -100. If there are more than 512 entries in total, a value of -100 forbids its token.
        allowed_token_ids: Tokens that can be generated; None allows all tokens.
        skip_special_tokens: Whether to omit special tokens from the text.
        output_kind: Content of the outputs of AsyncLLMEngine.generate and LLMEngine.step. LLM.generate always
            returns complete outputs.
        skip_reading_prefix_cache: Whether to compute the whole prompt instead of reading cached prefixes.
            None means True if prompt_logprobs is set, because cached tokens have no log-probabilities, and
            False otherwise. False can't be combined with prompt_logprobs.
        truncate_prompt_tokens: Number of tokens to keep from the end of a longer prompt. -1 keeps as many
            tokens as leave room for one output token. None keeps all tokens.
        forced_token_ids: Tokens that the output starts with, instead of sampled tokens; for example, to
            compute the log-probabilities of a text. The tokens after them are sampled. None forces no tokens.
        hook_args: The hooks of the engine to run, by name, with the numbers to pass to each hook. Requests
            share cached prefixes only if their hook_args are equal. A request whose hooks capture values
            reads no cached prefix.
        extra_args: The logits processors of the engine to run, by name, with the numbers to pass to each of
            them.
        logits_processors: Python functions that are called for each token with the arguments
            (output_token_ids, logits) or (prompt_token_ids, output_token_ids, logits) and return the changed
            logits, a NumPy array [vocab_size]. They are slow; see LogitsProcessor for a fast alternative.
            They can't be combined with penalties, extra_args or forced_token_ids.
        structured_outputs: A JSON schema, regular expression, grammar or other constraint that the output has
            to satisfy. Needs a tokenizer. The output ends when the constraint allows no further token. It may
            end earlier where the constraint is satisfied. max_tokens, a stop string or one of stop_token_ids
            can end it at any position. None sets no constraint.
        pooling: Set by the engine for a pooling request: which of the prompt's last hidden states to return.
            "LAST" or "CLS" returns the state of the last or first token, "MEAN" their mean, "ALL" all of
            them. None returns none.
        second_text: Set by the engine for a pooling request: index of the token at which the second text of a
            pair starts.

    Raises:
        ValueError: If a value is out of range. The message names the argument, the value and the allowed
            range, for every argument that is wrong.
    """

    n: int = 1
    best_of: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    bad_words_token_ids: list[list[int]] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    skip_special_tokens: bool = True
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    skip_reading_prefix_cache: bool | None = None
    truncate_prompt_tokens: int | None = None
    forced_token_ids: list[int] | None = None
    hook_args: dict[str, float | list[float]] | None = None
    extra_args: dict[str, float | list[float]] | None = None
    logits_processors: list[LogitsFunction] | None = None
    structured_outputs: StructuredOutputsParams | None = None
    pooling: Literal["LAST", "MEAN", "CLS", "ALL"] | None = None
    second_text: int | None = None

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        """Converts all values to plain Python values and checks them, as the constructor does.

        A seed of -1 becomes None.

        Raises:
            ValueError: If a value is out of range; the message lists every problem.
        """
        make_plain(self)
        if self.seed == -1:
            self.seed = None
        problems = Problems()
        self._note_numbers(problems)
        self._note_stops(problems)
        self._note_token_ids(problems)
        for name in ("include_stop_str_in_output", "ignore_eos", "detokenize", "skip_special_tokens"):
            problems.note(check_choice, name, getattr(self, name), (True, False))
        skip, has_none = self.skip_reading_prefix_cache, self.prompt_logprobs is None
        choices, condition = ((None, True, False), "") if has_none else ((None, True), "with prompt_logprobs")
        problems.note(check_choice, "skip_reading_prefix_cache", skip, choices, condition=condition)
        constraint, forced = self.structured_outputs, self.forced_token_ids
        if not isinstance(constraint, StructuredOutputsParams | None):
            problems.note(check, False, "structured_outputs", constraint, "None or a StructuredOutputsParams")
        if constraint is not None:
            problems.note(check, not forced, "forced_token_ids", forced, "None with structured_outputs")
        problems.note(self._check_functions)
        problems.note(check_choice, "output_kind", self.output_kind, tuple(RequestOutputKind))
        problems.note(check_choice, "pooling", self.pooling, (None, "LAST", "MEAN", "CLS", "ALL"))
        if self.second_text is not None:
            problems.note(check_int, "second_text", self.second_text, 0)
        problems.raise_if_any()

    def clone(self) -> Self:
        """Returns a deep copy; functions in logits_processors are shared with the original."""
        own = copy.copy(self)
        for name, value in vars(self).items():
            if name == "logits_processors":  # not copied because the functions may have state
                continue
            # Only containers are copied: calling deepcopy for every field would take most of the time.
            if isinstance(value, list | tuple | dict | StructuredOutputsParams):
                setattr(own, name, copy.deepcopy(value))
        return own

    def split_bias(self) -> tuple[dict[int, float], list[int]]:
        """Splits logit_bias into a bias to add and tokens to forbid.

        Returns:
            The bias to add to at most MAX_BIAS_IDS logits, by token id; and the token ids to forbid.
        """
        bias = self.logit_bias or {}
        if len(bias) <= MAX_BIAS_IDS:
            return bias, []
        added = {token_id: value for token_id, value in bias.items() if value != _FORBIDDING_BIAS}
        return added, [token_id for token_id in bias if token_id not in added]

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The stop strings as a tuple, empty if there are none."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def reads_prefix_cache(self) -> bool:
        """Whether cached blocks may be used for the prompt."""
        if self.skip_reading_prefix_cache is None:
            return self.prompt_logprobs is None
        return not self.skip_reading_prefix_cache

    @property
    def uses_features(self) -> bool:
        """Whether the parameters select an optional feature: hooks, logits processors or pooling."""
        args = self.hook_args, self.extra_args, self.pooling
        return bool(self.logits_processors) or any(value is not None for value in args)

    @property
    def has_token_rules(self) -> bool:
        """Whether the request biases tokens, or forbids tokens at some position."""
        is_restricted = self.allowed_token_ids is not None
        return bool(is_restricted or self.logit_bias or self.min_tokens or self.bad_words_token_ids)

    @property
    def needs_tokens_on_host(self) -> bool:
        """Whether the host has to know each token before the next token is sampled."""
        return bool(self.bad_words_token_ids or self.structured_outputs or self.logits_processors)

    def seed_of(self, index: int) -> int:
        """Returns the seed of one of the n samples.

        Sample 0 uses the request's seed. The other samples use a number in [0, 2**63 - 1] derived from the
        request's seed and the index. A request with n=1 and this seed therefore generates the same tokens as
        the sample.

        Args:
            index: Index of the sample.
        """
        assert self.seed is not None, "a request of an engine has no seed"
        if index == 0:
            return self.seed
        digest = hashlib.sha256(f"{self.seed} {index}".encode()).digest()
        return int.from_bytes(digest[:8], "little") >> 1

    def validate_for_vocab(self, vocab_size: int) -> None:
        """Checks the token ids against a model's vocabulary.

        Args:
            vocab_size: Number of tokens in the vocabulary.

        Raises:
            ValueError: If a token id is not in [0, vocab_size - 1]; the message lists every problem.
        """
        problems = Problems()
        for name in ("stop_token_ids", "logit_bias", "allowed_token_ids", "forced_token_ids"):
            problems.note(_check_token_ids, name, getattr(self, name) or (), vocab_size)
        for sequence in self.bad_words_token_ids or ():
            problems.note(_check_token_ids, "bad_words_token_ids", sequence, vocab_size)
        problems.raise_if_any()

    def _check_functions(self) -> None:
        name, functions = "logits_processors", self.logits_processors
        ok = functions is None or (isinstance(functions, list) and all(map(callable, functions)))
        check(ok, name, functions, "None or a list of functions")
        others = ("presence_penalty", "frequency_penalty", "extra_args", "forced_token_ids")
        given = [other for other in others if getattr(self, other)]
        given += ["repetition_penalty"] if self.repetition_penalty != 1 else []
        check(not (functions and given), name, functions, f"None with {', '.join(given)}")

    def _note_numbers(self, problems: Problems) -> None:
        note = problems.note
        note(check_int, "n", self.n, 1)
        if self.best_of is not None:
            note(check_int, "best_of", self.best_of, _int_or(self.n, 1), condition="(n)")
        note(check_number, "temperature", self.temperature, 0, 1e6)
        note(check_number, "top_p", self.top_p, 0, 1, low_open=True)
        note(check_int, "top_k", self.top_k, -1, 2**31 - 1)
        note(check_number, "min_p", self.min_p, 0, 1)
        note(check_number, "presence_penalty", self.presence_penalty, -2, 2)
        note(check_number, "frequency_penalty", self.frequency_penalty, -2, 2)
        note(check_number, "repetition_penalty", self.repetition_penalty, 1e-6, 1e6)
        if self.seed is not None:
            note(check_int, "seed", self.seed, 0, 2**63 - 1)
        if self.max_tokens is not None:
            note(check_int, "max_tokens", self.max_tokens, 1)
        note(check_int, "min_tokens", self.min_tokens, 0, _int_or(self.max_tokens, None))
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                note(check_int, name, getattr(self, name), -1)
        if self.truncate_prompt_tokens is not None:
            ok = self.truncate_prompt_tokens != 0
            note(check, ok, "truncate_prompt_tokens", 0, "-1 or an integer of at least 1")
            note(check_int, "truncate_prompt_tokens", self.truncate_prompt_tokens, -1)

    def _note_stops(self, problems: Problems) -> None:
        ok = self.stop is None or isinstance(self.stop, str) or _is_list_of_texts(self.stop)
        ok = ok and self.stop != ""
        problems.note(check, ok, "stop", self.stop, "None, a non-empty string or a list of non-empty strings")
        if ok:
            stops = self.stop_strings
            problems.note(
                check_int, "stop", len(stops), 0, MAX_STOP_STRINGS, aspect="the number of strings in"
            )
            lengths = [len(stop) for stop in stops]
            longest = max(lengths, default=0)
            aspect = "the length of each string in"
            problems.note(check_int, "stop", longest, 0, MAX_STOP_STRING_LENGTH, aspect=aspect)
            aspect = "the total length of the strings in"
            problems.note(check_int, "stop", sum(lengths), 0, MAX_STOP_CHARACTERS, aspect=aspect)
        if ok and self.stop and not self.detokenize:
            problems.note(check, False, "stop", self.stop, "None with detokenize=False")
        ok = self.bad_words is None or _is_list_of_texts(self.bad_words)
        problems.note(check, ok, "bad_words", self.bad_words, "None or a list of non-empty strings")

    def _note_token_ids(self, problems: Problems) -> None:
        note = problems.note
        for name in ("stop_token_ids", "allowed_token_ids", "forced_token_ids"):
            token_ids = getattr(self, name)
            ok = token_ids is None or isinstance(token_ids, list | tuple)
            note(check, ok, name, token_ids, "None or a list of token ids")
            if ok:
                note(_check_token_ids, name, token_ids or ())
        if self.allowed_token_ids is not None:
            ok = self.allowed_token_ids not in ([], ())
            note(
                check,
                ok,
                "allowed_token_ids",
                self.allowed_token_ids,
                "None or a non-empty list of token ids",
            )
        bad = self.bad_words_token_ids
        ok = bad is None or isinstance(bad, list | tuple)
        ok = ok and all(isinstance(ids, list | tuple) and len(ids) > 0 for ids in bad or ())
        note(check, ok, "bad_words_token_ids", bad, "None or a list of non-empty lists of token ids")
        for token_ids in bad or () if ok else ():
            note(_check_token_ids, "bad_words_token_ids", token_ids)
        for name in ("hook_args", "extra_args"):
            args = getattr(self, name)
            ok = args is None or isinstance(args, dict)
            note(check, ok, name, args, "None or a dict from names to numbers or lists of numbers")
        bias = self.logit_bias
        ok = bias is None or isinstance(bias, dict)
        note(check, ok, "logit_bias", bias, "None or a dict from token ids to numbers")
        if bias and ok:
            note(_check_token_ids, "logit_bias", bias)
            note(_check_bias, bias)


@ignores({"include_stop_str_in_output": (False,)})
@dataclasses.dataclass
class BeamSearchParams:
    """Parameters of a beam search; the names are vLLM's.

    Attributes may be changed after construction, as in SamplingParams.

    Example:
        >>> llm.beam_search("A block table is", BeamSearchParams(beam_width=4, max_tokens=12))

    Args:
        beam_width: Number of sequences to keep at each step, and to return.
        max_tokens: Maximum number of output tokens, limited by the engine's max_model_len.
        ignore_eos: Whether to continue after the model's end-of-sequence token.
        temperature: Divides the logits before the log-probabilities are computed. 0 has the same effect as 1.
        length_penalty: Exponent of the length in the score of a sequence, log-probability / length **
            length_penalty, in [-10, 10]. The length includes the prompt but not an end-of-sequence token.

    Raises:
        ValueError: If a value is out of range. The message names the argument, the value and the allowed
            range, for every argument that is wrong.
    """

    beam_width: int
    max_tokens: int = 16
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        """Converts all values to plain Python values and checks them, as the constructor does.

        Raises:
            ValueError: If a value is out of range; the message lists every problem.
        """
        make_plain(self)
        problems = Problems()
        problems.note(check_int, "beam_width", self.beam_width, 1)
        problems.note(check_int, "max_tokens", self.max_tokens, 1)
        problems.note(check_choice, "ignore_eos", self.ignore_eos, (True, False))
        problems.note(check_number, "temperature", self.temperature, 0, 1e6)
        problems.note(check_number, "length_penalty", self.length_penalty, -10, 10)
        problems.raise_if_any()


def _int_or[T](value: Any, default: T) -> int | T:
    """Returns `value` if it is an integer of at least 1, else the default; other checks report bad values."""
    is_int = isinstance(value, int) and not isinstance(value, bool)
    return value if is_int and value >= 1 else default


def _is_list_of_texts(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(text, str) and text for text in value)


def _check_token_ids(name: str, token_ids: Any, vocab_size: int | None = None) -> None:
    last = None if vocab_size is None else vocab_size - 1
    for token_id in token_ids:
        # A list of allowed tokens may have a hundred thousand ids. Calling check_int for each would be slow.
        if type(token_id) is not int or token_id < 0 or (last is not None and token_id > last):
            check_int(name, token_id, 0, last, aspect="each token id in")


def _check_bias(bias: dict[int, float]) -> None:
    for token_id, value in bias.items():
        check_number(f"logit_bias[{token_id}]", value, -100, 100)
    num_others = sum(value != _FORBIDDING_BIAS for value in bias.values())
    aspect = f"the number of values other than {_FORBIDDING_BIAS} in"
    check(num_others <= MAX_BIAS_IDS, "logit_bias", num_others, f"at most {MAX_BIAS_IDS}", aspect=aspect)
