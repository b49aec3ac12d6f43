"""LLMEngine: adds, aborts and steps requests."""

import random
import time
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Self

from jax_paged.config.engine_args import EngineArgs
from jax_paged.config.engine_config import EngineConfig
from jax_paged.core.scheduler import Scheduler
from jax_paged.core.scheduler_output import SchedulerOutput
from jax_paged.engine import composition
from jax_paged.engine.executors import MakeExecutor, check_single_engine, make_executor
from jax_paged.engine.input_processor import CheckedRequest, RequestParams
from jax_paged.engine.new_request import check_arrival_time
from jax_paged.engine.output_processor import RequestState, step_outputs
from jax_paged.engine.synchronized import unsynchronized
from jax_paged.errors import ArgumentError, check
from jax_paged.inputs import Prompt
from jax_paged.lora_request import LoRARequest
from jax_paged.outputs import RequestOutput

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from jax_paged.worker.compilation.compiler import CompileRecord
    from jax_paged.worker.executor import Executor


class LLMEngine(composition.EngineFeatures):
    """Engine that runs requests together. Each `step` computes one batch and returns the changed outputs.

    This class contains the methods that run requests. Features add the other methods; engine/composition.py
    lists them.

    Any thread may call any method. A call waits until calls of other threads have returned. Methods that are
    safe during a step, such as `check_request` and `add_lora`, do not wait.

    Args:
        args: Model and limits.
        executor: The executor that runs the steps, or a function that makes it from `args`. None makes the
            executor that `args` specify. The engine closes the executor, even if the engine can't be made.
        scheduler: A subclass of Scheduler that is used in its place, or a function that returns the sort key
            of a new request (a SequenceGroup). Requests with lower keys are served first and may preempt
            others.

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
            check_single_engine(args, "1 for LLMEngine (LLM and the server run several engines)")
            executor = make_executor
        if not callable(executor):
            self._begin(args, executor)
        elif args.batch_invariant:
            composition.start_with_passing_backends(args, executor, self._begin)
        else:
            self._begin(args, executor(args))

    def _begin(self, args: EngineArgs, executor: "Executor") -> None:
        """Makes everything that depends on the executor. Closes the executor if that fails.

        May be called again with another executor after an error.

        Raises:
            NotInvariantError: If batch_invariant is set, and the check finds outputs that depend on the
                batch.
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
        """The executor, which computes the steps."""
        return self._core.executor

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler, which decides what each step computes and owns the KV cache blocks."""
        return self._core.scheduler

    @property
    def observers(self) -> list[Callable[[Scheduler, SchedulerOutput], None]]:
        """Functions that are called after each step with the scheduler and the step.

        Callers may append their own functions.
        """
        return self._core.observers

    @property
    def seeds(self) -> random.Random:
        """The generator of seeds for requests without a seed."""
        return self._core.seeds

    @property
    def num_generated_tokens(self) -> int:
        """The number of output tokens of all requests so far."""
        return self._core.num_generated_tokens

    @property
    def num_saved_reads(self) -> int:
        """The number of KV cache reads (tokens) that cascade attention has saved so far.

        A token that a step reads once for n sequences counts n - 1 times.
        """
        return self._core.num_saved_reads

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:
        """Makes an engine. vLLM's scripts use this name."""
        return cls(engine_args)

    @unsynchronized
    def get_tokenizer(self) -> "PreTrainedTokenizerBase":
        """Returns the tokenizer as transformers loads it.

        Raises:
            ValueError: If the engine has no tokenizer.
        """
        if self.tokenizer is None:
            raise ArgumentError("skip_tokenizer_init", True, "False to get a tokenizer")
        return self.tokenizer.hf

    @unsynchronized
    def check_request(
        self,
        prompt: Prompt,
        sampling_params: RequestParams = None,
        *,
        cache_salt: str = "",
        priority: int = 0,
        lora_request: LoRARequest | None = None,
    ) -> CheckedRequest:
        """Tokenizes a prompt and checks the request, without adding it.

        Args:
            prompt: A prompt in one of the forms of jax_paged/inputs.py, for example text, token ids,
                {"prompt": text} or {"prompt_token_ids": ids}. For an encoder-decoder model this is the
                encoder prompt, or {"encoder_prompt": ..., "decoder_prompt": ...} specifies both.
            sampling_params: None uses the model's defaults (its generation_config.json). If max_tokens is
                None, the output may fill the rest of max_model_len. BeamSearchParams request a beam search,
                and PoolingParams a pooling request (engine/features/pooling.py reads its output).
            cache_salt: Only requests with equal salts share cached prefixes.
            priority: Requests with lower values are served first. Must be 0 unless scheduling_policy is
                "priority".
            lora_request: The LoRA adapter of the request; None for the base model. The adapter is read from
                its folder if it is not in host memory.

        Raises:
            ValueError: If the engine can't run the request. The message names the argument, its value and the
                allowed values.
        """
        self._core.check_can_run()
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
        """Adds a request to the waiting queue.

        Args:
            request_id: The id of the request. Must differ from the ids of all unfinished requests.
            prompt: A prompt, or the result of `check_request`. In the second case, params, cache_salt,
                priority and lora_request are ignored, because the result already contains them.
            params: The parameters of the request. If they have no seed, the request gets one that depends on
                the engine's seed and the number of earlier requests without a seed.
            arrival_time: Time of arrival, by the clock of time.monotonic() (seconds). vLLM uses time.time()
                instead. Must not be in the future; None means now.
            lora_request: See `check_request`.
            cache_salt: See `check_request`.
            priority: See `check_request`.

        Raises:
            ValueError: If the engine can't run the request. The engine is unchanged then.
        """
        self._core.check_can_run()
        check(isinstance(request_id, str), "request_id", request_id, "a string")
        is_new = request_id not in self._core.requests
        check(is_new, "request_id", request_id, "an id that no unfinished request has")
        now = time.monotonic()
        arrival_time = now if arrival_time is None else check_arrival_time(arrival_time, now)
        if not isinstance(prompt, CheckedRequest):
            prompt = self.check_request(
                prompt, params, cache_salt=cache_salt, priority=priority, lora_request=lora_request
            )
        self._core.add(request_id, prompt, arrival_time)

    def abort_request(self, request_id: str | Iterable[str]) -> RequestState | None:
        """Aborts one or several requests and frees their blocks.

        Ids that no unfinished request has are ignored. If the engine has failed, a request ends with the text
        that it had at that time.

        Returns:
            The state of the request if `request_id` is one id of an unfinished request, else None.
        """
        self._core.check_not_closed()
        if not isinstance(request_id, str):
            for one in request_id:
                self.abort_request(one)
            return None
        return self._core.abort(request_id)

    def end_requests(self, request_ids: Iterable[str]) -> None:
        """Aborts the given requests that are unfinished, and waits for steps in flight if no others remain.

        Callers use it to clean up after success, an error or Ctrl-C, so that none of their requests is left
        in the queues or on the device. If the engine has failed, requests are removed without waiting. If it
        is closed, this does nothing.
        """
        self._core.end(request_ids)

    def has_unfinished_requests(self) -> bool:
        """Returns whether `step` has work to do: unfinished requests, steps in flight or new outputs."""
        return self._core.has_work

    def step(self) -> list[RequestOutput]:
        """Runs one step. Returns outputs of the requests that got tokens or ended.

        The output_kind of a request determines what its outputs contain, and whether there is one in each
        step.
        """
        return step_outputs(self.advance())

    def advance(self) -> list[RequestState]:
        """Runs one step like `step`, but returns the states of the requests instead of their outputs.

        After an error, the step is incomplete and the engine can only abort requests and be closed.
        """
        if self._core.pause_reason is not None and self._core.changed:
            return self._core.take_changed()  # results of earlier steps
        self._core.check_can_run()
        return self._core.advance()

    def take_changed(self) -> list[RequestState]:
        """Returns the requests that changed since `advance` last returned. Runs no step."""
        return self._core.take_changed()

    def wait_if_idle(self) -> bool:
        """Waits for all steps in flight if no request is unfinished; does not wait otherwise.

        Returns:
            True if the engine has nothing left to do.
        """
        return self._core.wait_if_idle()

    def wait_for_steps(self) -> None:
        """Waits for all steps in flight and processes their results. The next `step` returns new outputs."""
        self._core.wait_for_steps()

    @unsynchronized
    def close(self) -> None:
        """Frees the weights and the KV cache, and discards all requests. A second call does nothing.

        Waits until the current step of a call in another thread is done. A call that needs further steps,
        such as LLM.generate, then raises EngineDeadError, and so do calls that wait for their turn.
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
        """Returns a table of all programs with compile times (seconds) and temporary memory (MiB)."""
        self._core.check_not_closed()
        return self.executor.compile_plan()

    def compile_report(self) -> "list[CompileRecord]":
        """Returns a record of each program, including programs that are not compiled; see CompileRecord."""
        self._core.check_not_closed()
        return self.executor.compile_report()


def _described(config: EngineConfig, buckets: tuple[str, ...]) -> str:
    """Returns a one-line description of an engine.

    Args:
        config: The settings of the engine.
        buckets: The names of the executor's buckets.
    """
    pool = f"{config.num_blocks} blocks of {config.block_size} tokens, {_size(config.kv_cache_bytes)}"
    if config.num_state_slots:
        pool += f" and {config.num_state_slots - 1} state slots"
    if config.kv_cache_dtype != "auto":
        pool += f" in {config.kv_cache_dtype}"
    model = f"{config.model_name} ({config.architecture}, {_size(config.weight_bytes)}), {config.dtype}"
    why = f" ({config.backend_reason})" if config.backend_reason else ""
    backends = f"attention backend {config.attention_backend}{why}, matmul backend {config.matmul_backend}"
    return f"{model}, {backends}, KV cache {pool}, buckets {_grouped(buckets)}"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.0f} MiB" if num_bytes < 2**30 else f"{num_bytes / 2**30:.1f} GiB"


def _grouped(names: tuple[str, ...]) -> str:
    """Returns the names of buckets grouped by type: "decode 1", "decode 2" become "decode 1 2"."""
    groups: dict[str, list[str]] = {}
    for name in names:
        kind, size = name.split(" ")
        groups.setdefault(kind, []).append(size)
    return ", ".join(" ".join([kind, *sizes]) for kind, sizes in groups.items())
