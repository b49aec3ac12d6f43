"""The engine: checks requests, and runs them step by step from prompt to RequestOutput.

Nothing here imports JAX: only the executor that LLMEngine makes, if it is given none, does.
"""

import contextlib
import functools
import random
import time
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Self

from jax_paged.config.engine_args import EngineArgs
from jax_paged.core.scheduler import Scheduler
from jax_paged.core.scheduler_output import SchedulerOutput
from jax_paged.engine.assembly import (
    MakeExecutor,
    OwnScheduler,
    check_alone,
    described,
    make_executor,
    make_scheduler,
    make_tokenizer,
    with_end_token,
)
from jax_paged.engine.engine_core import StepLoop
from jax_paged.engine.errors import EngineAsleepError, EngineDeadError
from jax_paged.engine.features import pinned_prefixes
from jax_paged.engine.features.batch_invariance.backend_choice import begin_with_passing_backends
from jax_paged.engine.features.batch_invariance.invariance import check_invariance
from jax_paged.engine.input_processor import CheckedRequest, InputProcessor
from jax_paged.engine.interrupt import deferred_interrupt
from jax_paged.engine.new_request import check_arrival_time, request_state
from jax_paged.engine.output_processor import RequestState
from jax_paged.engine.serialized import Serialized, any_thread
from jax_paged.errors import ArgumentError, check
from jax_paged.inputs import Prompt
from jax_paged.lora_request import LoRARequest
from jax_paged.outputs import RequestOutput
from jax_paged.pooling_params import PoolingParams
from jax_paged.sampling_params import BeamSearchParams, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from jax_paged.worker.executor import Executor


class RequestEngine(Serialized):
    """Runs requests together: each `step` computes one batch and returns the outputs that grew.

    Any thread may call any method: a call waits until those of other threads have returned. Methods that are
    safe beside a step, such as `check_request` and `add_lora`, do not wait.

    Args:
        args: Model and limits.
        executor: Runs the steps, or a function that makes it from arguments. The engine closes it, also if
            the engine can't be made. None makes the one that the arguments ask for.
        scheduler: A subclass of Scheduler to take its place; or a function of a new request (a SequenceGroup)
            that returns its key: requests of lower keys go first, and take the blocks of others.

    Raises:
        ValueError: If the model, its tokenizer or a setting can't be used.
    """

    def __init__(
        self,
        args: EngineArgs,
        executor: "Executor | MakeExecutor | None" = None,
        *,
        scheduler: OwnScheduler | None = None,
    ) -> None:
        self._own_scheduler = scheduler
        self._closed = self._freed = False
        try:
            self.tokenizer = make_tokenizer(args)
        except BaseException:
            if executor is not None and not callable(executor):
                executor.close()
            raise
        if executor is None:
            allowed = "1 for one engine (LLM, ReplicatedEngine and the server run several)"
            check_alone(args, allowed)
            executor = make_executor
        if callable(executor):
            begin_with_passing_backends(args, executor, self._begin)
        else:
            self._begin(args, executor)

    def _begin(self, args: EngineArgs, executor: "Executor") -> None:
        """Makes all that depends on the executor, and closes it on an error; may be called again then.

        Raises:
            NotInvariantError: If batch_invariant was asked for and does not hold.
        """
        self.args = args
        self.num_names = 0  # of pinned prefixes and forks, given so far
        self.seeds = random.Random(args.seed)  # of requests that bring none
        try:
            self.config = with_end_token(executor.config, self.tokenizer)
            if self.tokenizer and self.config.pooling and self.config.pooling.text.lower_case:
                self.tokenizer.lower_texts()
            self.input_processor = InputProcessor(self.config, self.tokenizer)
            max_in_flight = 2 if self.config.async_scheduling else 1
            make = functools.partial(make_scheduler, self.config, self._own_scheduler)
            self._loop = StepLoop(make, executor, max_in_flight)
            if self.config.batch_invariant:
                check_invariance(self)
        except BaseException:
            executor.close()
            raise

    @property
    def executor(self) -> "Executor":
        """Computes the steps."""
        return self._loop.executor

    @property
    def observers(self) -> list[Callable[[Scheduler, SchedulerOutput], None]]:
        """Functions that are called after each step, with the scheduler and the step; append your own."""
        return self._loop.observers

    @property
    def scheduler(self) -> Scheduler:
        """Decides what each step computes, and owns the blocks."""
        return self._loop.scheduler

    @property
    def weight_version(self) -> str:
        """The name of the weights that draw tokens now: what update_weights was told, or how often it ran."""
        return self._loop.weight_version

    @property
    def sleep_level(self) -> int:
        """How deep the engine sleeps: 1 or 2, and 0 while it is awake."""
        return self._loop.sleep_level

    @any_thread
    def is_sleeping(self) -> bool:
        """Whether anything sleeps, so that no request runs; the name is vLLM's."""
        return bool(self._loop.asleep)

    @property
    def num_shared_tokens(self) -> int:
        """Tokens that steps have read once for several sequences, each of these after the first counted."""
        return self._loop.num_shared_tokens

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:
        """Makes an engine; the name that vLLM's scripts use."""
        return cls(engine_args)

    @any_thread
    def get_tokenizer(self) -> "PreTrainedTokenizerBase":
        """Returns the tokenizer as transformers loads it.

        Raises:
            ValueError: If the engine has none.
        """
        if self.tokenizer is None:
            raise ArgumentError("skip_tokenizer_init", True, "False for a tokenizer")
        return self.tokenizer.hf

    @any_thread
    def check_request(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | BeamSearchParams | PoolingParams | None = None,
        *,
        cache_salt: str = "",
        priority: int = 0,
        lora_request: LoRARequest | None = None,
    ) -> CheckedRequest:
        """Tokenizes a prompt and checks it and its parameters; changes no request.

        Args:
            prompt: Text, token ids, {"prompt": text} or {"prompt_token_ids": ids}. Of an encoder-decoder
                model this is what the encoder reads, and {"encoder_prompt": ..., "decoder_prompt": ...}
                says both.
            sampling_params: None takes the model's defaults (its generation_config.json); max_tokens None
                takes the rest of max_model_len. BeamSearchParams make it a beam search, and PoolingParams a
                pooling request (engine/features/pooling.py reads its output).
            cache_salt: Only requests of equal salt share cached prefixes.
            priority: Lower is served earlier; 0 unless scheduling_policy is "priority".
            lora_request: The adapter that it is computed with; read from its folder, if it is not there.

        Raises:
            ValueError: If the engine can't run it; the message names the argument, its value and what is
                allowed.
        """
        self._check_open()
        return self.input_processor.check(prompt, sampling_params, cache_salt, priority, lora_request)

    def add_request(
        self,
        request_id: str,
        prompt: Prompt | CheckedRequest,
        params: SamplingParams | BeamSearchParams | PoolingParams | None = None,
        arrival_time: float | None = None,
        lora_request: LoRARequest | None = None,
        *,
        cache_salt: str = "",
        priority: int = 0,
    ) -> None:
        """Puts a request in the queue.

        Args:
            request_id: No unfinished request may have the same.
            prompt: As `check_request` takes it, with params, cache_salt, priority and lora_request; or what
                that has returned, which holds all of them.
            params: Without a seed they get one that depends on the engine's seed and how many requests came
                before.
            arrival_time: In seconds of time.monotonic() (not of time.time(), as vLLM's) and not in the
                future; None takes now.
            lora_request: As `check_request` takes it.
            cache_salt: As `check_request` takes it.
            priority: As `check_request` takes it.

        Raises:
            ValueError: If the engine can't run it; nothing has changed then.
        """
        self._check_open()
        check(isinstance(request_id, str), "request_id", request_id, "a string")
        check(
            request_id not in self._loop.requests,
            "request_id",
            request_id,
            "an id that no running request has",
        )
        now = time.monotonic()
        if arrival_time is not None:
            arrival_time = check_arrival_time(arrival_time, now)
        if not isinstance(prompt, CheckedRequest):
            more = {"cache_salt": cache_salt, "priority": priority, "lora_request": lora_request}
            prompt = self.check_request(prompt, params, **more)
        arrival_time = now if arrival_time is None else arrival_time
        state = request_state(request_id, prompt, arrival_time, self._new_seed, self.tokenizer)
        if prompt.given:
            state.take_delta()  # whoever gives it has it
        self._loop.add(state)

    def abort_request(self, request_id: str | Iterable[str]) -> RequestState | None:
        """Ends a request, or several, now and frees the blocks; does nothing if no request with the id runs.

        If the engine has failed, a request ends with the text that it had then.

        Returns:
            The state of a single request that ran, else None.
        """
        self._check_not_closed()
        if not isinstance(request_id, str):
            for one in request_id:
                self.abort_request(one)
            return None
        return self._loop.abort(request_id)

    def end_requests(self, request_ids: Iterable[str]) -> None:
        """Aborts the requests of a call that have not ended, and waits for what the device computes for them.

        It is called however the call ends, so that nothing of its requests is left: neither in the queues nor
        on the device. An engine that has failed or was closed computes nothing more; its requests only end.
        """
        if self._closed:
            return
        with deferred_interrupt(), contextlib.ExitStack() as stack:
            stack.callback(lambda: self._loop.failure is not None or self._loop.drain())
            for request_id in request_ids:  # each of them, even if aborting another raises an error
                stack.callback(self._loop.abort, request_id)

    def has_unfinished_requests(self) -> bool:
        """Whether a step has anything to do, if only to wait for what the device still works on."""
        return self._loop.has_unfinished

    def step(self) -> list[RequestOutput]:
        """Runs one step; returns the requests that got a token or ended, as their output_kind says."""
        outputs = (state.next_output() for state in self.advance())
        return [output for output in outputs if output is not None]

    def advance(self) -> list[RequestState]:
        """Runs one step as `step` does; returns the states of the requests, of which outputs can be made.

        An error leaves the step half done and the engine unusable, but for aborting and closing.
        """
        if self._loop.asleep and self._loop.changed:  # what was drawn before it slept
            return self._loop.take_changed()
        self._check_open()
        return self._loop.advance()

    def take_changed(self) -> list[RequestState]:
        """Returns the states that steps have changed and `advance` has not returned yet; runs nothing."""
        return self._loop.take_changed()

    def drain(self) -> bool:
        """Waits for what the device still computes for requests that have ended; returns if no others run."""
        return self._loop.drain()

    @any_thread
    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Reads an adapter ahead of its requests, and keeps it in host memory until it is removed.

        Like the two that follow, it does not wait for calls of other threads.

        Returns:
            Whether it was not added before.

        Raises:
            ValueError: If it does not fit the model, if its id is another adapter's, or if max_cpu_loras
                adapters were added.
        """
        self._check_open()
        return self.input_processor.adapters.add(lora_request)

    @any_thread
    def remove_lora(self, lora_id: int) -> bool:
        """Forgets an adapter, and what its id stands for; requests that have it go on with it.

        Returns:
            Whether there was one.
        """
        self._check_not_closed()
        return self.input_processor.adapters.remove(lora_id)

    @any_thread
    def list_loras(self) -> set[int]:
        """Returns the ids of the adapters in host memory."""
        return self.input_processor.adapters.ids

    def pin_prefix(self, prompt: Prompt, *, cache_salt: str = "") -> str:
        """Computes a prefix and keeps its full blocks in the pool until it is unpinned.

        Args:
            prompt: As `check_request` takes it.
            cache_salt: That of the requests that will share it.

        Returns:
            The name to unpin it by.

        Raises:
            ValueError: If the prefix doesn't fit, or prefixes are not cached.
            RuntimeError: If requests are running.
        """
        self._check_open()
        return pinned_prefixes.pin(self, self._new_name("prefix"), prompt, cache_salt)

    def unpin_prefix(self, name: str) -> None:
        """Lets go of a pinned prefix, by the name that pin_prefix returned.

        Raises:
            ValueError: If no prefix is pinned by this name.
        """
        self.scheduler.block_manager.unpin(name)

    @any_thread
    def close(self) -> None:
        """Frees weights and pool and forgets all requests; a second call does nothing.

        A call that runs in another thread is waited for. It ends after its step, as calls that wait do, with
        EngineDeadError.
        """
        self._closed = True
        self._calls.call(self._free)

    def _free(self) -> None:
        if not self._freed:
            self._freed = True
            self._loop.requests.clear()
            self.input_processor.close()
            self.executor.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        if self._closed:
            return f"<{self.config.model_name}, closed>"
        if self._loop.failure is not None:
            return f"<{self.config.model_name}, failed: {self._loop.failure!r}>"
        return f"<{described(self.config, self.executor.buckets)}>"

    def _new_seed(self) -> int:
        return self.seeds.getrandbits(63)

    def _new_name(self, kind: str) -> str:
        self.num_names += 1
        return f"{kind}-{self.num_names - 1}"

    def _check_open(self, *, checks_weights: bool = True, may_sleep: bool = False) -> None:
        self._check_not_closed()
        if self._loop.failure is not None:
            message = f"the engine has failed: {self._loop.failure!r}; make a new one"
            raise EngineDeadError(message) from self._loop.failure
        if self._loop.asleep and not may_sleep:
            raise EngineAsleepError(f"the engine sleeps ({', '.join(self._loop.asleep)}); wake_up() wakes it")
        if checks_weights:
            self.executor.check_weights()

    def _check_not_closed(self) -> None:
        if self._closed:
            raise EngineDeadError("this engine is closed; make a new one")
