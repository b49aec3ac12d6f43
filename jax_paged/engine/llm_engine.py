"""The engine: checks requests, and runs them step by step from prompt to RequestOutput."""

import dataclasses
import hashlib
import itertools
import random
import sys
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from jax_paged.checks import check
from jax_paged.config import EngineArgs
from jax_paged.core.block_manager import BlockManager
from jax_paged.core.runner_output import TokenLogprobs
from jax_paged.core.scheduler import Scheduler
from jax_paged.core.sequence import RequestMetrics, Sequence, SequenceGroup, SequenceStatus
from jax_paged.engine.input_processor import CheckedRequest, RequestChecker
from jax_paged.engine.interrupt import deferred_interrupt
from jax_paged.engine.output_processor import RequestState
from jax_paged.engine.tokenizer import Tokenizer
from jax_paged.inputs import Prompt
from jax_paged.lab.pool_map import PoolMap, pool_map
from jax_paged.lab.recording import RecordedScheduler
from jax_paged.models.checkpoint import resolve_model_dir
from jax_paged.models.weights import LoadedModel
from jax_paged.outputs import RequestOutput
from jax_paged.sampling_params import BeamSearchParams, SamplingParams
from jax_paged.worker.model_runner import ModelRunner

NON_FINITE = "non-finite logits"


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
            default_params = SamplingParams(**config.sampling_defaults)
        except (TypeError, ValueError) as error:
            self.runner.close()
            raise ValueError(f"generation_config.json of {args.model!r}: {error}") from error
        self._checker = RequestChecker(config, self.tokenizer, default_params, args.scheduling_policy)
        manager = BlockManager(
            config.num_blocks,
            config.block_size,
            args.enable_prefix_caching,
            groups=config.layout.groups,
            num_swap_blocks=config.num_swap_blocks,
        )
        self.scheduler = Scheduler(
            block_manager=manager,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=config.max_model_len,
            eos_token_ids=config.eos_token_ids,
            policy=args.scheduling_policy,
            preemption_mode=args.preemption_mode,
            enable_chunked_prefill=args.enable_chunked_prefill,
            delay_factor=args.delay_factor,
        )
        self._requests: dict[str, RequestState] = {}
        self._pins = itertools.count()
        self._seeds = random.Random(args.seed)
        self._closed = False
        self._failure: BaseException | None = None  # what has ended a step half-way

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:
        """Makes an engine; the name that vLLM's scripts use."""
        return cls(engine_args)

    def check_request(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | BeamSearchParams | None = None,
        *,
        cache_salt: str = "",
        priority: int = 0,
    ) -> CheckedRequest:
        """Tokenizes a prompt and checks it and its parameters; changes nothing.

        Args:
            prompt: Text, token ids, {"prompt": text} or {"prompt_token_ids": ids}. Of an encoder-decoder
                model this is what the encoder reads, and {"encoder_prompt": ..., "decoder_prompt": ...}
                says both.
            sampling_params: None takes the model's defaults (its generation_config.json); max_tokens None
                takes the rest of max_model_len. BeamSearchParams make it a beam search.
            cache_salt: Only requests of equal salt share cached prefixes.
            priority: Lower is served earlier; 0 unless scheduling_policy is "priority".

        Raises:
            ValueError: If the engine can't run it; the message names the argument, its value and what is
                allowed.
        """
        self._check_open()
        return self._checker.check(prompt, sampling_params, cache_salt, priority)

    def add_request(
        self,
        request_id: str,
        prompt: Prompt | CheckedRequest,
        sampling_params: SamplingParams | BeamSearchParams | None = None,
        *,
        arrival_time: float | None = None,
        cache_salt: str = "",
        priority: int = 0,
    ) -> None:
        """Puts a request in the queue.

        Args:
            request_id: No unfinished request may have the same.
            prompt: As `check_request` takes it, with sampling_params, cache_salt and priority; or what that
                has returned, which holds all of them.
            sampling_params: Without a seed they get one that depends on the engine's seed and how many
                requests came before.
            arrival_time: In seconds of time.monotonic(); None takes now.
            cache_salt: As `check_request` takes it.
            priority: The same.

        Raises:
            ValueError: If the engine can't run it; nothing has changed then.
        """
        self._check_open()
        check(isinstance(request_id, str), "request_id", request_id, "a string")
        check(request_id not in self._requests, "request_id", request_id, "an id that no running request has")
        is_number = isinstance(arrival_time, int | float) and not isinstance(arrival_time, bool)
        ok = arrival_time is None or (is_number and abs(arrival_time) <= sys.float_info.max)
        check(ok, "arrival_time", arrival_time, "a finite number or None")
        if not isinstance(prompt, CheckedRequest):
            prompt = self.check_request(prompt, sampling_params, cache_salt=cache_salt, priority=priority)
        params, cache_salt = prompt.params, prompt.cache_salt
        if params.seed is None:
            params = dataclasses.replace(params, seed=self._seeds.getrandbits(63))
        assert params.seed is not None, "just set"
        if prompt.encoder_token_ids:
            # What the decoder has computed is of use only beside the same encoder output.
            cache_salt += hashlib.sha256(array("q", prompt.encoder_token_ids).tobytes()).hexdigest()
        group = SequenceGroup(
            request_id,
            [Sequence(prompt.prompt_token_ids, seed=params.seed)],
            params,
            RequestMetrics(time.monotonic() if arrival_time is None else arrival_time),
            cache_salt,
            prompt.priority,
            prompt.beam_params,
            prompt.encoder_token_ids,
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
            changed = {self._end(group): None for group in output.ended}
            try:
                result = self.runner.execute(output)
            except BaseException as error:
                self._failure = error  # the pool, updated in place, may be gone
                raise
            now = time.monotonic()
            samples = [(row.group, seq) for row in output.scheduled for seq in row.sampling]
            for row, is_finite in zip(output.scheduled, result.is_finite, strict=True):
                if not is_finite and not row.group.is_finished:
                    for seq in row.group.unfinished:
                        self.scheduler.finish(
                            row.group, seq, SequenceStatus.FINISHED_ABORTED, now, NON_FINITE
                        )
                    changed[self._end(row.group)] = None
            self.scheduler.update(output, result.token_ids, now, result.logprobs)
            for row, prompt_logprobs in zip(output.scheduled, result.prompt_logprobs, strict=True):
                state = self._requests.get(row.group.request_id)
                if prompt_logprobs and state is not None:
                    state.add_prompt_logprobs(row.start, prompt_logprobs)
            for (group, seq), token_id, logprob in zip(
                samples, result.token_ids, result.logprobs, strict=True
            ):
                state = self._requests.get(group.request_id)
                if state is None:
                    continue
                changed[state] = None
                if group.beam_params is None:
                    self._add_token(state, seq, token_id, logprob, now)
            for state in changed:
                if state.group.is_finished and not state.is_finished:
                    self._end(state.group)
            return list(changed)

    def pin_prefix(self, prompt: Prompt, *, cache_salt: str = "") -> str:
        """Computes a prefix and keeps its full blocks in the pool until it is unpinned.

        Args:
            prompt: As `check_request` takes it.
            cache_salt: Of the requests that will share it.

        Returns:
            The name to unpin it by.

        Raises:
            ValueError: If the prefix doesn't fit, or prefixes are not cached.
            RuntimeError: If requests are running.
        """
        self._check_open()
        if self.has_unfinished_requests():
            raise RuntimeError("requests are running; pin prefixes before them")
        manager = self.scheduler.block_manager
        if not manager.enable_prefix_caching:
            raise ValueError("enable_prefix_caching is False; allowed for pinned prefixes: True")
        if self.runner.config.decoder_start_token_id is not None:
            raise ValueError(
                "an encoder-decoder model has no prefixes to pin: each encoder output is one request's"
            )
        params = SamplingParams(temperature=0, max_tokens=1)
        request = self.check_request(prompt, params, cache_salt=cache_salt)
        if len(request.prompt_token_ids) < manager.block_size:
            raise ValueError(
                f"the prefix has {len(request.prompt_token_ids)} tokens; allowed: at least a block of "
                f"{manager.block_size}, as only full blocks are shared"
            )
        name = f"prefix-{next(self._pins)}"
        self.add_request(name, request)
        state = self._requests[name]
        try:
            while self.has_unfinished_requests():
                self.advance()
        finally:
            self.abort_request(name)
        seq = state.group.sequences[0]
        if not seq.output_token_ids or seq.status is SequenceStatus.FINISHED_ABORTED:
            num_free, num_usable = manager.num_free_blocks, manager.num_usable_blocks
            raise ValueError(
                f"the prefix was not computed: {seq.stop_reason or 'it was aborted'}; allowed: one of finite "
                f"logits, for which the {num_free} free blocks of {num_usable} are enough"
            )
        manager.pin(name, request.prompt_token_ids, cache_salt)
        return name

    def unpin_prefix(self, name: str) -> None:
        """Lets go of a pinned prefix, by the name that pin_prefix returned.

        Raises:
            ValueError: If no prefix is pinned by this name.
        """
        self.scheduler.block_manager.unpin(name)

    def record(self, sink: Callable[[str], object]) -> None:
        """Writes down every decision from now on as lines of JSON; `recording.replay` checks them.

        The engine starts again with an empty pool, without cached prefixes.

        Args:
            sink: Takes each line, such as an open file's `write` or a list's `append`.

        Raises:
            RuntimeError: If requests are running or prefixes are pinned.
        """
        self._check_open()
        if self.has_unfinished_requests() or self.scheduler.block_manager.pinned:
            raise RuntimeError("requests are running or prefixes pinned; record before them")
        self.scheduler = RecordedScheduler(self.scheduler, sink)

    def pool_map(self) -> PoolMap:
        """Returns what each block of the pool holds, who holds it and how full it is; a notebook draws it."""
        self._check_not_closed()
        return pool_map(self.scheduler.block_manager, (state.group for state in self._requests.values()))

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

    def _add_token(
        self, state: RequestState, seq: Sequence, token_id: int, logprob: TokenLogprobs, now: float
    ) -> None:
        is_stop_token = seq.status is SequenceStatus.FINISHED_STOPPED
        stop = state.add_token(seq, token_id, logprob, is_stop_token=is_stop_token)
        if stop is not None:
            self.scheduler.finish(state.group, seq, SequenceStatus.FINISHED_STOPPED, now, stop)
        if seq.status.is_finished:
            state.finish_sample(seq)

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
