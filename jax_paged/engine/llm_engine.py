"""LLMEngine: adds, aborts and steps requests, and opens the engine's features."""

import os
import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from types import TracebackType
from typing import TYPE_CHECKING, Self

from jax_paged.checks import check
from jax_paged.config.engine_args import EngineArgs, EngineConfig
from jax_paged.core.scheduler import Scheduler
from jax_paged.core.scheduler_output import SchedulerOutput
from jax_paged.engine import composition
from jax_paged.engine.executors import MakeExecutor, check_alone, make_executor
from jax_paged.engine.input_processor import CheckedRequest, RequestParams
from jax_paged.engine.new_request import check_arrival_time
from jax_paged.engine.output_processor import RequestState
from jax_paged.engine.serialized import Serialized, any_thread
from jax_paged.inputs import Prompt
from jax_paged.lora_request import LoRARequest
from jax_paged.outputs import RequestOutput
from jax_paged.sampling_params import SamplingParams

if TYPE_CHECKING:
    import random

    import numpy as np
    from transformers import PreTrainedTokenizerBase

    from jax_paged.engine.features.interactive.kv_access import Inspection
    from jax_paged.engine.features.interactive.request_edits import Verification
    from jax_paged.engine.features.interactive.step_plan import StepPlan
    from jax_paged.engine.features.snapshot import EngineState
    from jax_paged.engine.features.weights.sleeping import Mode
    from jax_paged.engine.features.weights.weight_updates import Running
    from jax_paged.lab.page_table import PageTable
    from jax_paged.lab.pool_map import PoolMap
    from jax_paged.lab.what_if import Replay
    from jax_paged.models.loading.new_weights import NewWeights
    from jax_paged.worker.compilation.compiler import CompileRecord
    from jax_paged.worker.executor import Executor


class LLMEngine(Serialized):
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
            check_alone(args, "1 for one engine; LLM, ReplicatedEngine and the server run several")
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
            self._features = composition.EngineFeatures(self._core, self.input_processor, args)
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
    def seeds(self) -> "random.Random":
        """Generator of the seeds of requests that bring none."""
        return self._core.seeds

    @property
    def observers(self) -> list[Callable[[Scheduler, SchedulerOutput], None]]:
        """Functions that are called after each step, with the scheduler and the step; append your own."""
        return self._core.observers

    @property
    def scheduler(self) -> Scheduler:
        """Decides what each step computes, and owns the blocks."""
        return self._core.scheduler

    @property
    def weight_version(self) -> str:
        """The name of the weights that draw tokens now: what update_weights was told, or how often it ran."""
        return self._core.weight_version

    @property
    def sleep_level(self) -> int:
        """How deep the engine sleeps: 1 or 2, and 0 while it is awake."""
        return self._core.sleep_level

    @any_thread
    def is_sleeping(self) -> bool:
        """Whether anything sleeps, so that no request runs; the name is vLLM's."""
        return bool(self._core.asleep)

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
            raise ValueError("there is no tokenizer: skip_tokenizer_init is True")
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
        outputs = (state.next_output() for state in self.advance())
        return [output for output in outputs if output is not None]

    def advance(self) -> list[RequestState]:
        """Runs one step as `step` does; returns the states of the requests, of which outputs can be made.

        An error leaves the step half done and the engine unusable, but for aborting and closing.
        """
        if self._core.asleep and self._core.changed:  # what was drawn before it slept
            return self._core.take_changed()
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

    # Features: each method opens one, which engine/composition.py names.

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
        self._core.check_open()
        return self.input_processor.adapters.add(lora_request)

    @any_thread
    def remove_lora(self, lora_id: int) -> bool:
        """Forgets an adapter, and what its id stands for; requests that have it go on with it.

        Returns:
            Whether there was one.
        """
        self._core.check_not_closed()
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
        self._core.check_open()
        return self._features.pinned_prefixes.pin(prompt, cache_salt)

    def unpin_prefix(self, name: str) -> None:
        """Lets go of a pinned prefix, by the name that pin_prefix returned.

        Raises:
            ValueError: If no prefix is pinned by this name.
        """
        self._features.pinned_prefixes.unpin(name)

    def update_weights(
        self,
        weights: "NewWeights",
        *,
        running: "Running" = "error",
        weight_version: str | None = None,
    ) -> None:
        """Serves other weights from now on; nothing is compiled, and no cached prefix of older ones is hit.

        Args:
            weights: A model, its nnx.State, tensors by the names of a checkpoint (a mapping or pairs), or a
                folder or hub id; names, shapes and types are those of the model that is served. Arrays on
                the device are shared: a program that they are donated to takes them away.
            running: What becomes of running requests. With "error" there must be none; "recompute" computes
                all their tokens again, those they have drawn included; "keep" goes on from the keys and
                values of the older weights, which no other request is given. While the engine sleeps it means
                nothing: requests that were kept are computed again when it wakes up.
            weight_version: A name for outputs to carry; None counts the updates.

        Pinned prefixes are computed again, under their names; while requests run they are an error.

        Raises:
            ValueError: If the weights do not fit, and nothing has changed then; or if pinned prefixes can't
                be computed again.
            RuntimeError: If requests run, or prefixes are pinned, that must not be; nothing has changed.
        """
        self._core.check_alive()
        self._features.weight_updates.update(weights, running, weight_version)

    def sleep(self, level: int = 1, mode: "Mode" = "wait") -> None:
        """Gives the memory of weights and pool to whatever else this process does, until `wake_up`.

        Arrays that a model in memory shares stay its own. While it sleeps the engine takes no requests
        (EngineAsleepError), and cached prefixes are forgotten; pinned ones are computed again at the end.

        Args:
            level: 1 keeps the weights in host memory. 2 drops them: update_weights may bring others before
                the engine is awake; else they are read again from the folder that they came from.
            mode: What becomes of running requests. "wait" runs them to their ends first (`step` returns what
                they bring); "abort" ends them with what they have; "keep" computes all their tokens again
                after waking.

        Raises:
            ValueError: If an argument is wrong, or the engine sleeps already; nothing has changed.
            RuntimeError: If requests are to be kept that can't be computed again; nothing has changed.
        """
        self._core.check_alive()
        self._features.sleeping.sleep(level, mode)

    def wake_up(self, tags: Iterable[str] | None = None) -> None:
        """Takes memory again; compiles nothing. When nothing sleeps any more, requests run.

        Args:
            tags: Of what wakes up: "weights", "kv_cache"; None for all that sleeps. Other weights can be
                brought in between, before the pool takes its memory.

        Raises:
            ValueError: If a tag is wrong or awake, or there are no weights to wake up with, and nothing has
                changed then; or if pinned prefixes can't be computed again.
            RuntimeError: If prefixes are pinned, and a model in memory has got other weights meanwhile;
                update_weights takes them.
        """
        self._core.check_alive()
        self._features.sleeping.wake_up(tags)

    def check_sleep(self, level: int, mode: str) -> None:
        """Raises what `sleep` would, and changes nothing."""
        self._features.sleeping.check(level, mode)

    def score(
        self,
        token_lists: Items[Items[int]],
        num_prompt_tokens: int | Items[int] = 1,
        sampling_params: SamplingParams | None = None,
    ) -> list[list[float]]:
        """Returns the log-probabilities of the tokens of given texts, computed as if they had been drawn.

        Each token is one step of the program that draws them, with the same sums: where an engine's sums are
        the same in every batch (batch_invariant=True), the result equals what generation returned of these
        tokens, to the bit.

        Args:
            token_lists: The texts.
            num_prompt_tokens: How many tokens of each, or of all, are a prompt: computed as one, and not
                scored.
            sampling_params: As the texts were drawn with. They count where log-probabilities are the
                processed ones, or hooks are on; None for none.

        Returns:
            For each text, one number per token behind its prompt.

        Raises:
            ValueError: If the engine can't run a text; then none has run.
            RuntimeError: If requests are running.
        """
        self._core.check_open()
        return self._features.scoring.score(token_lists, num_prompt_tokens, sampling_params)

    def schedule(self) -> "StepPlan":
        """Plans the next step and does not run it; `run` does, or `step`, which runs it as it stands.

        It is made with the results of all steps before it, and drops a plan that has not run.
        """
        self._core.check_open()
        return self._features.step_plans.schedule()

    def run(self, plan: "StepPlan") -> list[RequestOutput]:
        """Runs a plan, perhaps without some requests or in another order; returns what `step` does.

        Raises:
            ValueError: If it is not the last plan, has run, or was changed otherwise.
        """
        self._core.check_open()
        outputs = (state.next_output() for state in self._features.step_plans.run(plan))
        return [output for output in outputs if output is not None]

    def fork(self, request_id: str, new_id: str | None = None, seed: int | None = None) -> str:
        """Adds a request that goes on from where another is, and shares its blocks; returns its id.

        Its id and seed are new ones unless given. Like all methods that follow, it waits for the steps in
        flight first; `step` returns what these bring. Without a free seat the fork waits, and computes again
        what the prefix cache does not hold.

        Raises:
            ValueError: If this can't be done, and nothing has changed; so in all methods that follow.
        """
        self._core.check_open()
        return self._features.request_edits.fork(request_id, new_id, seed)

    def rollback(self, request_id: str, num_tokens: int) -> None:
        """Takes the last output tokens of a request with one sequence back, as if they had not been drawn.

        Of deltas that were handed out, nothing is taken back: the next begins behind what is left.
        """
        self._core.check_open()
        self._features.request_edits.roll_back(request_id, num_tokens)

    def verify(self, request_id: str, draft: Iterable[int]) -> "Verification":
        """Computes a draft in one step, in which no other request advances; accepts what is drawn so, too.

        The output stays what it would be without drafts. A draft has less than max_num_seqs tokens, and its
        request one sequence and no penalties.
        """
        self._core.check_open()
        return self._features.request_edits.verify(request_id, list(draft))

    def kv(self, request_id: str, layer: int, index: int = 0) -> "tuple[np.ndarray, np.ndarray]":
        """Returns a sequence's keys and values in the pool, each [computed tokens, kv heads, head_dim].

        They are in the model's dtype, which holds exactly what a quantised cache stands for.
        """
        self._core.check_open()
        return self._features.kv_access.kv(request_id, layer, index)

    def page_table(self, request_id: str, index: int = 0) -> "PageTable":
        """Returns which block holds which tokens of a request's sequence; a notebook draws it."""
        from jax_paged.lab.page_table import page_table

        self._core.check_open()
        group, seq = self._features.kv_access.sequence(request_id, index)
        token_text = self.tokenizer.token_text if self.tokenizer else str
        return page_table(self.scheduler.block_manager, group, seq, token_text)

    def inspect(
        self,
        request_id: str,
        layers: Iterable[int] = (),
        heads: Iterable[int] | None = None,
        num_queries: int | None = 1,
        index: int = 0,
    ) -> "Inspection":
        """Returns the logits that a request's next token is drawn from, and what the last tokens attend to.

        It is computed beside the steps, with the keys in the pool, and changes nothing. Of the layers of self
        attention and heads (None: all), the last num_queries tokens attend (None: all; 1 if blocks are gone).
        """
        self._core.check_open()
        return self._features.kv_access.inspect(request_id, layers, heads, num_queries, index)

    def drop_kv(self, request_id: str, keep: Iterable[int]) -> None:
        """Drops blocks of a request with one sequence: later tokens do not attend to them any more.

        Positions stay those of the text, and keys as they were rotated (StreamingLLM counts positions in the
        cache). The prefix cache gets none of the later blocks. The request can't be computed again, so it is
        swapped out where others are preempted, and ends, saying so, if host memory has no room.

        Args:
            request_id: A request whose prompt is computed, of a model all of whose layers see all tokens.
            keep: Ascending places in its page table of the blocks that stay; the last block is one.
        """
        self._core.check_open()
        self._features.kv_access.drop(request_id, keep)

    def record(self, sink: Callable[[str], object] | None) -> None:
        """Writes down every decision from now on as lines of JSON; `recording.replay` checks them.

        The engine starts again with an empty pool, without cached prefixes. `scheduler` is another one
        afterwards.

        Args:
            sink: Takes each line, such as an open file's `write` or a list's `append`; None ends a recording.

        Raises:
            RuntimeError: If requests are running or prefixes are pinned.
        """
        self._core.check_open()
        self._features.recordings.record(sink)

    def replay(self, lines: Iterable[str]) -> "Replay":
        """Computes a recording again, step by step on the device, and checks that it gets the same tokens.

        The engine starts again with an empty pool, without cached prefixes.

        Args:
            lines: What `record` wrote, such as an open file or a list; of an engine with no larger limits.

        Returns:
            The steps and requests. Its max_logprob_difference is 0.0 where the same programs ran.

        Raises:
            ValueError: If a decision or a token differs, or the recording does not fit this engine.
            RuntimeError: If requests are running, prefixes are pinned, or the engine is being recorded.
        """
        self._core.check_open()
        return self._features.recordings.replay(lines)

    def state(self, *, weights: bool = False) -> "EngineState":
        """Returns all that it takes to go on elsewhere, or later: `LLM.restore` and `load_state` do.

        Args:
            weights: Whether it holds the weights too. Without them, the engine that goes on has to serve the
                same ones, of which the state keeps a fingerprint.

        Raises:
            RuntimeError: If a plan has not run.
        """
        self._core.check_open()
        return self._features.snapshots.take(with_weights=weights)

    def load_state(self, state: "EngineState | str | os.PathLike[str]") -> None:
        """Goes on from a state, or from the folder of one that was saved: the same tokens come, bit for bit.

        With async_scheduling the steps in flight end before a state is taken, so that other requests may be
        preempted than without a stop: tokens stay the same, log-probabilities but for the last digits.

        Raises:
            ValueError: If it is of an engine with another model or pool, or of another version.
            RuntimeError: If requests are running, prefixes are pinned, or the engine is being recorded.
        """
        self._core.check_open()
        self._features.snapshots.load(composition.EngineState.of(state))

    def pool_map(self) -> "PoolMap":
        """Returns what each block of the pool holds, who holds it and how full it is; a notebook draws it."""
        from jax_paged.lab.pool_map import pool_map

        self._core.check_not_closed()
        return pool_map(self.scheduler.block_manager, (state.group for state in self._core.requests.values()))

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
