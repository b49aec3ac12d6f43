"""How one request's tokens are chosen, and when it stops: by sampling, or by beam search."""

import dataclasses
import hashlib

from jax_paged.checks import check, check_choice, check_int, check_number

MAX_LOGPROBS = 20
MAX_LOGIT_BIAS_ENTRIES = 300
# Maximum token ids of a sequence that logit_bias, min_tokens and bad words can touch at a time.
MAX_BIAS_IDS = 512


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """Sampling and stopping of one request; the names and defaults are vLLM's.

    Logits are changed in this order: logit_bias, repetition, frequency and presence penalty,
    temperature, min_p, top_k, top_p.

    Args:
        n: Outputs of one prompt.
        best_of: Outputs drawn, of which the n with the highest cumulative log-probability are returned; at
            least n, None is n.
        temperature: Divides the logits, in [0, 1e6]; below 1e-5 the most likely token is taken (greedy).
        top_p: Keeps the fewest most likely tokens whose probabilities sum to at least this, in (0, 1];
            1 keeps all. Tokens as likely as the last one kept are kept too.
        top_k: Keeps this many most likely tokens, and those as likely as the last of them; 0 or -1
            keeps all.
        min_p: Keeps tokens at least this times as likely as the most likely one, in [0, 1]; 0 keeps all.
        presence_penalty: Subtracted from the logit of each token of the output so far, in [-2, 2].
        frequency_penalty: The same, once for each time the token is in the output so far, in [-2, 2].
        repetition_penalty: Divides the logit of each token of prompt and output if it is positive,
            multiplies it if negative, in [1e-6, 1e6]; 1 changes nothing.
        seed: Makes the random choices repeatable, in [0, 2**63 - 1]; None takes a seed of the engine's.
        stop: Strings that end the output; the text returned ends before them.
        stop_token_ids: Tokens that end the output, beside the model's end tokens.
        ignore_eos: Whether to go on after the model's end token.
        max_tokens: Most tokens of the output; None goes on to the engine's max_model_len.
        min_tokens: Tokens of the output before an end token or one of stop_token_ids can be chosen.
        logprobs: How many most likely tokens to report at each output token, in [0, 20], beside the
            chosen one; None reports nothing.
        prompt_logprobs: The same at each prompt token.
        logit_bias: Added to the logits, by token id, each in [-100, 100]; at most 300 entries.
        skip_special_tokens: Whether to leave special tokens out of the text.
        allowed_token_ids: The only tokens that can be chosen; None allows all.
        bad_words_token_ids: Sequences of tokens whose last token can't be chosen where the others stand right
            before it.

    Raises:
        ValueError: If a value is out of range; the message names the argument, the value and the range.
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
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: dict[int, float] | None = None
    skip_special_tokens: bool = True
    allowed_token_ids: list[int] | None = None
    bad_words_token_ids: list[list[int]] | None = None

    def __post_init__(self) -> None:
        check_int("n", self.n, 1)
        if self.best_of is not None:
            check_int(f"best_of (n is {self.n})", self.best_of, self.n)
        check_number("temperature", self.temperature, 0, 1e6)
        check_number("top_p", self.top_p, 0, 1, low_open=True)
        check_int("top_k", self.top_k, -1, 2**31 - 1)
        check_number("min_p", self.min_p, 0, 1)
        check_number("presence_penalty", self.presence_penalty, -2, 2)
        check_number("frequency_penalty", self.frequency_penalty, -2, 2)
        check_number("repetition_penalty", self.repetition_penalty, 1e-6, 1e6)
        if self.seed is not None:
            check_int("seed", self.seed, 0, 2**63 - 1)
        ok = self.stop is None or isinstance(self.stop, str | list | tuple)
        ok = ok and all(isinstance(s, str) and s for s in self.stop_strings)
        check(ok, "stop", self.stop, "None, a non-empty string or a list of them")
        ok = self.stop_token_ids is None or isinstance(self.stop_token_ids, list | tuple)
        check(ok, "stop_token_ids", self.stop_token_ids, "None or a list of token ids")
        for token_id in self.stop_token_ids or ():
            check_int("a token id of stop_token_ids", token_id, 0)
        check_choice("ignore_eos", self.ignore_eos, (True, False))
        if self.max_tokens is not None:
            check_int("max_tokens", self.max_tokens, 1)
        check_int("min_tokens", self.min_tokens, 0, self.max_tokens)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), 0, MAX_LOGPROBS)
        ok = self.logit_bias is None or isinstance(self.logit_bias, dict)
        check(ok, "logit_bias", self.logit_bias, "None or a dict of token id to number")
        bias = self.logit_bias or {}
        limit = f"at most {MAX_LOGIT_BIAS_ENTRIES} entries"
        check(len(bias) <= MAX_LOGIT_BIAS_ENTRIES, "the length of logit_bias", len(bias), limit)
        for token_id, value in bias.items():
            check_int("a token id of logit_bias", token_id, 0)
            check_number(f"logit_bias[{token_id}]", value, -100, 100)
        check_choice("skip_special_tokens", self.skip_special_tokens, (True, False))

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple, empty if there is none."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def seed_of(self, index: int) -> int:
        """Returns the seed of one of the request's samples: a request of its own with it draws the same.

        Sample 0 takes the seed as it is, the others a number in [0, 2**63 - 1] made of it and the index.
        """
        assert self.seed is not None, "the engine gives every request a seed"
        if index == 0:
            return self.seed
        digest = hashlib.sha256(f"{self.seed} {index}".encode()).digest()
        return int.from_bytes(digest[:8], "little") >> 1

    def validate_for_vocab(self, vocab_size: int) -> None:
        """Checks the token ids against a model's vocabulary.

        Raises:
            ValueError: If an id of stop_token_ids or logit_bias is not in [0, vocab_size - 1].
        """
        for name in ("stop_token_ids", "logit_bias"):
            for token_id in getattr(self, name) or ():
                check_int(f"a token id of {name}", token_id, 0, vocab_size - 1)


@dataclasses.dataclass(frozen=True)
class BeamSearchParams:
    """A beam search; the names are vLLM's.

    Args:
        beam_width: Sequences kept at each step, and returned.
        max_tokens: Most tokens of an output.
        ignore_eos: Whether to go on after the model's end token.
        length_penalty: A hypothesis scores its log-probability / length ** length_penalty, the prompt
            counted and an end token not; in [-10, 10].
        temperature: Divides the logits before the log-probabilities are taken; 0 leaves them as they are.

    Raises:
        ValueError: If a value is out of range; the message names the argument, the value and the range.
    """

    beam_width: int
    max_tokens: int = 16
    ignore_eos: bool = False
    length_penalty: float = 1.0
    temperature: float = 0.0

    def __post_init__(self) -> None:
        check_int("beam_width", self.beam_width, 1)
        check_int("max_tokens", self.max_tokens, 1)
        check_choice("ignore_eos", self.ignore_eos, (True, False))
        check_number("length_penalty", self.length_penalty, -10, 10)
        check_number("temperature", self.temperature, 0, 1e6)
