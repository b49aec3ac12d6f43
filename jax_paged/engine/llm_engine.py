"""LLMEngine: adds, aborts and steps requests."""

import random
import time
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Self

from jax_paged.config.engine_args import EngineArgs, EngineConfig
from jax_paged.core.scheduler import Scheduler
from jax_paged.core.scheduler_output import SchedulerOutput
from jax_paged.engine import composition
from jax_paged.engine.executors import MakeExecutor, check_alone, make_executor
from jax_paged.engine.input_processor import CheckedRequest, RequestParams
from jax_paged.engine.new_request import check_arrival_time
from jax_paged.engine.output_processor import RequestState, outputs_of
from jax_paged.engine.serialized import any_thread
from jax_paged.errors import ArgumentError, check
from jax_paged.inputs import Prompt
from jax_paged.lora_request import LoRARequest
from jax_paged.outputs import RequestOutput

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from jax_paged.worker.compilation.compiler import CompileRecord
    from jax_paged.worker.executor import Executor


class LLMEngine(composition.EngineFeatures):
    """Runs requests together: each `step` computes one batch and returns the outputs that grew.

    The methods here run requests. All others come from the features, which engine/composition.py lists.

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
        scheduler: composition.CustomScheduler | None = None,
    ) -> None:
        self._custom_scheduler = scheduler
        self._is_freed = False
        try:
            self.tokenizer = composition.make_tokenizer(args)
        except BaseException:
            if executor is not None and not callable(executor):
                executor.close()
            raise
        if executor is None:
            check_alone(args, "1 for one engine (LLM, ReplicatedEngine and the server run several)")
            executor = make_executor
        if not callable(executor):
            self._begin(args, executor)
        elif args.batch_invariant:
            composition.begin_with_passing_backends(args, executor, self._begin)
        else:
            self._begin(args, executor(args))

    def _begin(self, args: EngineArgs, executor: "Executor") -> None:
        """Makes all that depends on the executor, and closes it on an error; may be called again then.

        Raises:
            NotInvariantError: If batch_invariant was asked for and does not hold.
        """
        self.args = args
        try:
            self._core = composition.make_core(args, self.tokenizer, executor, self._custom_scheduler)
            self.config = self._core.config
            self.input_processor = composition.make_input_processor(self.config, self.tokenizer)
            if self.config.batch_invariant:
                composition.check_invariance(self._core, self.input_processor)
        except BaseException:
            executor.close()
            raise

    @property
    def executor(self) -> "Executor":
        """Computes the steps."""
        return self._core.executor

    @property
    def scheduler(self) -> Scheduler:
        """Decides what each step computes, and owns the blocks."""
        return self._core.scheduler

    @property
    def observers(self) -> list[Callable[[Scheduler, SchedulerOutput], None]]:
        """Functions that are called after each step with the scheduler and the step; append yours."""
        return self._core.observers

    @property
    def seeds(self) -> random.Random:
        """Generator of the seeds of requests that bring none."""
        return self._core.seeds

    @property
    def num_shared_tokens(self) -> int:
        """Tokens that steps have read once for several sequences, each of these after the first counted."""
        return self._core.num_shared_tokens

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
        sampling_params: RequestParams = None,
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
        self._core.check_open()
        return self.input_processor.check(prompt, sampling_params, cache_salt, priority, lora_request)

    def add_request(
        self,
        request_id: str,
        prompt: Prompt | CheckedRequest,
        params: RequestParams = None,
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
        self._core.check_open()
        check(isinstance(request_id, str), "request_id", request_id, "a string")
        is_new = request_id not in self._core.requests
        check(is_new, "request_id", request_id, "an id that no running request has")
        now = time.monotonic()
        arrival_time = now if arrival_time is None else check_arrival_time(arrival_time, now)
        if not isinstance(prompt, CheckedRequest):
            prompt = self.check_request(
                prompt, params, cache_salt=cache_salt, priority=priority, lora_request=lora_request
            )
        self._core.add(request_id, prompt, arrival_time)

    def abort_request(self, request_id: str | Iterable[str]) -> RequestState | None:
        """Ends a request, or several, now and frees the blocks; does nothing if no request with the id runs.

        If the engine has failed, a request ends with the text that it had then.

        Returns:
            The state of a single request that ran, else None.
        """
        self._core.check_not_closed()
        if not isinstance(request_id, str):
            for one in request_id:
                self.abort_request(one)
            return None
        return self._core.abort(request_id)

    def end_requests(self, request_ids: Iterable[str]) -> None:
        """Aborts the requests of a call that have not ended, and waits for what the device computes for them.

        It is called however the call ends, so that nothing of its requests is left: neither in the queues nor
        on the device. An engine that has failed or was closed computes nothing more; its requests only end.
        """
        self._core.end(request_ids)

    def has_unfinished_requests(self) -> bool:
        """Whether a step has anything to do, if only to wait for what the device still works on."""
        return self._core.has_unfinished

    def step(self) -> list[RequestOutput]:
        """Runs one step; returns the requests that got a token or ended, as their output_kind says."""
        return outputs_of(self.advance())

    def advance(self) -> list[RequestState]:
        """Runs one step as `step` does; returns the states of the requests, of which outputs can be made.

        An error leaves the step half done and the engine unusable, but for aborting and closing.
        """
        if self._core.pause_reason is not None and self._core.changed:
            return self._core.take_changed()  # the results of the steps before
        self._core.check_open()
        return self._core.advance()

    def take_changed(self) -> list[RequestState]:
        """Returns the states that steps have changed and `advance` has not returned yet; runs nothing."""
        return self._core.take_changed()

    def drain(self) -> bool:
        """Waits for what the device still computes for requests that have ended; returns if no others run."""
        return self._core.drain()

    def settle(self) -> None:
        """Takes in the results of the steps in flight; what they change is returned with the next step."""
        self._core.settle()

    @any_thread
    def close(self) -> None:
        """Frees weights and pool and forgets all requests; a second call does nothing.

        A call that runs in another thread is waited for. It ends after its step, as calls that wait do, with
        EngineDeadError.
        """
        self._core.is_closed = True
        self._calls.call(self._free)

    def _free(self) -> None:
        if not self._is_freed:
            self._is_freed = True
            self._core.requests.clear()
            self.input_processor.close()
            self.executor.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        if self._core.is_closed:
            return f"<{self.config.model_name}, closed>"
        if self._core.failure is not None:
            return f"<{self.config.model_name}, failed: {self._core.failure!r}>"
        return f"<{_described(self.config, self.executor.buckets)}>"

    def compile_plan(self) -> str:
        """Returns a table of the buckets: shapes, seconds and bytes of what is compiled."""
        self._core.check_not_closed()
        return self.executor.compile_plan()

    def compile_report(self) -> "list[CompileRecord]":
        """Returns what is compiled, as records: shapes, seconds, bytes."""
        self._core.check_not_closed()
        return self.executor.compile_report()


def _described(config: EngineConfig, buckets: tuple[str, ...]) -> str:
    """Returns what an engine is made of, in one line.

    Args:
        config: Its settings.
        buckets: The names of its buckets, as its executor has them.
    """
    pool = f"{config.num_blocks} blocks of {config.block_size} tokens, {_size(config.kv_cache_bytes)}"
    if config.state_slots[0]:
        pool += f" and {config.state_slots[0] - 1} states"
    if config.kv_cache_dtype != "auto":
        pool += f" in {config.kv_cache_dtype}"
    model = f"{config.model_name} ({config.architecture}, {_size(config.weight_bytes)}), {config.dtype}"
    why = f" ({config.backend_reason})" if config.backend_reason else ""
    backends = f"backend {config.backend}{why}, products {config.matmul_backend}"
    return f"{model}, {backends}, pool {pool}, buckets {_grouped(buckets)}"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.0f} MiB" if num_bytes < 2**30 else f"{num_bytes / 2**30:.1f} GiB"


def _grouped(names: tuple[str, ...]) -> str:
    """Returns "decode 1", "decode 2", "mixed 64x8" as "decode 1 2, mixed 64x8"."""
    groups: dict[str, list[str]] = {}
    for name in names:
        kind, size = name.split(" ")
        groups.setdefault(kind, []).append(size)
    return ", ".join(" ".join([kind, *sizes]) for kind, sizes in groups.items())
