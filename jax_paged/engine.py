"""The engine: checks requests, and runs them step by step from prompt to RequestOutput."""

import contextlib
import dataclasses
import itertools
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self, TypedDict

from jax_paged.batch import MAX_BIAS_IDS
from jax_paged.block_manager import BlockManager
from jax_paged.config import EngineArgs, check, check_int
from jax_paged.model_runner import ModelRunner
from jax_paged.models.weights import LoadedModel, resolve_model_dir
from jax_paged.outputs import RequestOutput
from jax_paged.request_state import RequestState
from jax_paged.sampling_params import SamplingParams
from jax_paged.scheduler import Scheduler
from jax_paged.sequence import RequestMetrics, Sequence, SequenceGroup, SequenceStatus
from jax_paged.tokenizer import Tokenizer

NON_FINITE = "non-finite logits"


class TokensPrompt(TypedDict):
    """A prompt as token ids."""

    prompt_token_ids: list[int]


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str


Prompt = str | list[int] | TokensPrompt | TextPrompt


@dataclasses.dataclass(frozen=True)
class CheckedRequest:
    """A prompt and parameters that the engine can run.

    Args:
        prompt: The text; None if it came as token ids.
        prompt_token_ids: Its tokens.
        params: With max_tokens filled in.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams


class LLMEngine:
    """Runs requests together: each `step` computes one batch and returns the outputs that grew.

    One thread at a time may use an engine; `check_request` alone may be called from any.

    Args:
        args: Model and limits.
        loaded: A model in memory to serve in place of args.model's weights, such as one in training. They
            stay the caller's.

    Raises:
        ValueError: If the model, its tokenizer or a setting can't be used.
    """

    def __init__(self, args: EngineArgs, loaded: LoadedModel | None = None) -> None:
        self.args = args
        self.tokenizer: Tokenizer | None = None
        if not args.skip_tokenizer_init:
            self.tokenizer = Tokenizer(_tokenizer_name(args))
        self.runner = ModelRunner(args, loaded)
        config = self.runner.config
        try:
            self._default_params = SamplingParams(**config.sampling_defaults)
        except (TypeError, ValueError) as error:
            self.runner.close()
            raise ValueError(f"generation_config.json of {args.model!r}: {error}") from error
        self.scheduler = Scheduler(
            block_manager=BlockManager(config.num_blocks, config.block_size, args.enable_prefix_caching),
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=config.max_model_len,
            eos_token_ids=config.eos_token_ids,
        )
        self._requests: dict[str, RequestState] = {}
        self._seq_ids = itertools.count()
        self._seeds = random.Random(args.seed)
        self._closed = False
        self._failure: BaseException | None = None  # what has ended a step half-way

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:
        """Makes an engine; the name that vLLM's scripts use."""
        return cls(engine_args)

    def check_request(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> CheckedRequest:
        """Tokenizes a prompt and checks it and its parameters; changes nothing.

        Args:
            prompt: Text, token ids, {"prompt": text} or {"prompt_token_ids": ids}.
            sampling_params: None takes the model's defaults (its generation_config.json); max_tokens None
                takes the rest of max_model_len.

        Raises:
            ValueError: If the engine can't run it; the message names the argument, its value and what is
                allowed.
        """
        self._check_open()
        params = self._default_params if sampling_params is None else sampling_params
        ok = isinstance(params, SamplingParams)
        check(ok, "sampling_params", params, "a SamplingParams")
        text, token_ids = self._tokenize(prompt)
        self._check_length(token_ids, params)
        self._check_params(params)
        if params.max_tokens is None:
            rest = self.runner.config.max_model_len - len(token_ids)
            params = dataclasses.replace(params, max_tokens=rest)
        return CheckedRequest(text, token_ids, params)

    def add_request(
        self,
        request_id: str,
        prompt: Prompt | CheckedRequest,
        sampling_params: SamplingParams | None = None,
        *,
        arrival_time: float | None = None,
        cache_salt: str = "",
    ) -> None:
        """Puts a request in the queue.

        Args:
            request_id: No unfinished request may have the same.
            prompt: As `check_request` takes it, or what that has returned.
            sampling_params: None takes the defaults. Without a seed it gets one that depends on the
                engine's seed and how many requests came before.
            arrival_time: In seconds of time.monotonic(); None takes now.
            cache_salt: Only requests of equal salt share cached prefixes.

        Raises:
            ValueError: If the engine can't run it; nothing has changed then.
        """
        self._check_open()
        check(isinstance(request_id, str), "request_id", request_id, "a string")
        check(request_id not in self._requests, "request_id", request_id, "an id that no running request has")
        check(isinstance(cache_salt, str), "cache_salt", cache_salt, "a string")
        is_number = isinstance(arrival_time, int | float) and not isinstance(arrival_time, bool)
        ok = arrival_time is None or (is_number and abs(arrival_time) <= sys.float_info.max)
        check(ok, "arrival_time", arrival_time, "a finite number or None")
        if not isinstance(prompt, CheckedRequest):
            prompt = self.check_request(prompt, sampling_params)
        params = prompt.params
        if params.seed is None:
            params = dataclasses.replace(params, seed=self._seeds.getrandbits(63))
        group = SequenceGroup(
            request_id,
            [Sequence(next(self._seq_ids), prompt.prompt_token_ids)],
            params,
            RequestMetrics(time.monotonic() if arrival_time is None else arrival_time),
            cache_salt,
        )
        self._requests[request_id] = RequestState(group, prompt.prompt, self.tokenizer)
        self.scheduler.add(group)

    def abort_request(self, request_id: str) -> RequestState | None:
        """Ends a request now and frees its blocks; returns its state, None if it runs no more."""
        self._check_not_closed()
        state = self._requests.pop(request_id, None)
        if state is None:
            return None
        self.scheduler.abort(request_id)
        state.group.metrics.finished_time = time.monotonic()
        state.finish()
        return state

    def has_unfinished_requests(self) -> bool:
        """Whether a step has anything to do."""
        return self.scheduler.has_unfinished

    def step(self) -> list[RequestOutput]:
        """Runs one step; returns the requests that got a token or ended, each with all it has so far."""
        return [state.output() for state in self.advance()]

    def advance(self) -> list[RequestState]:
        """Runs one step as `step` does; returns the states of the requests, of which outputs can be made."""
        self._check_open()
        with deferred_interrupt():
            output = self.scheduler.schedule(time.monotonic())
            changed = [self._end(group) for group in output.ignored]
            if not output.scheduled:
                return changed
            try:
                result = self.runner.execute(output)
            except BaseException as error:
                self._failure = error  # the pool, updated in place, may be gone
                raise
            now = time.monotonic()
            for row, is_finite in zip(output.scheduled, result.is_finite, strict=True):
                if not is_finite:
                    self.scheduler.finish(row.seq, SequenceStatus.FINISHED_ABORTED, now, NON_FINITE)
                    changed.append(self._end(row.group))
            self.scheduler.update(output, result.token_ids, now)
            rows = zip(
                output.scheduled, result.token_ids, result.logprobs, result.prompt_logprobs, strict=True
            )
            for row, token_id, logprob, prompt_logprobs in rows:
                state = self._requests.get(row.group.request_id)
                if state is None:
                    continue
                if prompt_logprobs:
                    state.add_prompt_logprobs(row.start, prompt_logprobs)
                if token_id is None:
                    continue
                is_stop_token = row.seq.status is SequenceStatus.FINISHED_STOPPED
                stop = state.add_token(token_id, logprob, is_stop_token=is_stop_token)
                if stop is not None:
                    self.scheduler.finish(row.seq, SequenceStatus.FINISHED_STOPPED, now, stop)
                if row.seq.status.is_finished:
                    self._end(row.group)
                changed.append(state)
            return changed

    def compile_plan(self) -> str:
        """Returns a table of the buckets: shapes, seconds and bytes of what is compiled."""
        self._check_not_closed()
        return self.runner.compile_plan()

    def close(self) -> None:
        """Frees weights and pool and forgets all requests; a second call does nothing."""
        if not self._closed:
            self._closed = True
            self._requests.clear()
            self.runner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        c = self.runner.config
        if self._closed:
            return f"<{c.model_name}, closed>"
        if self._failure is not None:
            return f"<{c.model_name}, failed: {self._failure!r}>"
        pool = f"{c.num_blocks} blocks of {c.block_size} tokens, {_size(c.kv_cache_bytes)}"
        return (
            f"<{c.model_name} ({c.architecture}, {_size(c.weight_bytes)}), {c.dtype}, backend {c.backend}, "
            f"pool {pool}, buckets {_grouped(self.runner.buckets)}>"
        )

    def _end(self, group: SequenceGroup) -> RequestState:
        state = self._requests.pop(group.request_id)
        state.finish()
        return state

    def _check_open(self) -> None:
        self._check_not_closed()
        if self._failure is not None:
            message = f"the engine has failed: {self._failure!r}; make a new one"
            raise RuntimeError(message) from self._failure

    def _check_not_closed(self) -> None:
        if self._closed:
            raise RuntimeError("this engine is closed; make a new one")

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
            if self.tokenizer is None:
                raise ValueError("prompt is text, and the engine has no tokenizer; allowed: token ids")
            check(bool(prompt), "prompt", prompt, "text that is not empty")
            token_ids = self.tokenizer.encode(prompt)
            check(bool(token_ids), "prompt", prompt, "text of at least one token")
            highest, allowed = max(token_ids), self.runner.config.vocab_size - 1
            if highest > allowed:
                raise ValueError(
                    f"prompt has the token id {highest}; allowed: the model's vocabulary, [0, {allowed}]. "
                    f"The tokenizer {self.tokenizer.name!r} does not fit the model"
                )
            return prompt, token_ids
        ok = isinstance(prompt, list | tuple)
        check(ok, "prompt", prompt, "text, a list of token ids, or a dict with one of these")
        check(bool(prompt), "prompt_token_ids", prompt, "at least one token id")
        vocab_size = self.runner.config.vocab_size
        for i, token_id in enumerate(prompt):
            if type(token_id) is not int or not 0 <= token_id < vocab_size:
                check_int(f"prompt_token_ids[{i}]", token_id, 0, vocab_size - 1)
        return None, list(prompt)

    def _check_length(self, token_ids: list[int], params: SamplingParams) -> None:
        config, n = self.runner.config, len(token_ids)
        total = n + (1 if params.max_tokens is None else params.max_tokens)
        if total > config.max_model_len:
            raise ValueError(
                f"the prompt has {n} tokens and max_tokens is {params.max_tokens}: {total} tokens in all; "
                f"allowed: max_model_len, {config.max_model_len}"
            )
        manager = self.scheduler.block_manager
        needed = manager.num_blocks_of(n)
        if needed > manager.num_usable_blocks:
            raise ValueError(
                f"the prompt has {n} tokens and needs {needed} blocks of {manager.block_size}; allowed: the "
                f"{manager.num_usable_blocks} blocks of the pool"
            )

    def _check_params(self, params: SamplingParams) -> None:
        config = self.runner.config
        params.validate_for_vocab(config.vocab_size)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(params, name) is not None:
                check_int(name, getattr(params, name), 0, config.max_logprobs)
        num_bias = len(params.logit_bias or ()) + len(config.eos_token_ids)
        num_stop = len(params.stop_token_ids or ())
        if params.min_tokens:
            check_int("the length of stop_token_ids", num_stop, 0, MAX_BIAS_IDS - num_bias)
        if params.stop_strings and self.tokenizer is None:
            raise ValueError(f"stop is {params.stop!r}; allowed: None, as the engine has no tokenizer")


@contextlib.contextmanager
def deferred_interrupt() -> Iterator[threading.Event]:
    """Holds back Ctrl-C until the block ends, so that it can't stop the engine between two states.

    Does nothing outside of the main thread, which alone gets signals, or where Ctrl-C has no Python handler.

    Yields:
        An event that is set once Ctrl-C was pressed.
    """
    pressed = threading.Event()
    previous = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(previous):
        yield pressed
        return
    frames: list[FrameType | None] = []

    def note(_: int, frame: FrameType | None) -> None:
        frames.append(frame)
        pressed.set()

    signal.signal(signal.SIGINT, note)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, previous)
        if pressed.is_set():
            previous(signal.SIGINT, frames[0])


def _tokenizer_name(args: EngineArgs) -> str:
    """Returns the tokenizer's folder, or its own hub id, of which transformers loads no weights."""
    name = args.tokenizer
    if name is None or name == "pagelet" or Path(name).expanduser().is_dir():
        return str(resolve_model_dir(name or args.model))
    return name


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.0f} MiB" if num_bytes < 2**30 else f"{num_bytes / 2**30:.1f} GiB"


def _grouped(names: tuple[str, ...]) -> str:
    """Returns "decode 1", "decode 2", "mixed 64x8" as "decode 1 2, mixed 64x8"."""
    groups: dict[str, list[str]] = {}
    for name in names:
        kind, size = name.split(" ")
        groups.setdefault(kind, []).append(size)
    return ", ".join(" ".join([kind, *sizes]) for kind, sizes in groups.items())


def as_prompts(prompts: Any) -> list[Prompt]:
    """Returns a list of prompts of what users pass: one prompt in any form, or a list of them.

    A list of integers is one prompt.
    """
    if isinstance(prompts, list | tuple) and not (prompts and isinstance(prompts[0], int)):
        return list(prompts)
    is_one = isinstance(prompts, str | dict | list | tuple)
    check(is_one, "prompts", prompts, "a prompt or a list of prompts")
    one: Any = prompts
    return [one]
