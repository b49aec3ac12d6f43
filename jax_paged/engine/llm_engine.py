"""The engine: checks requests, and runs them step by step from prompt to RequestOutput.

Nothing here imports JAX: only the executor that LLMEngine makes, if it is given none, does.
"""

import functools
import os
import random
import time
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Self

from jax_paged.checks import check
from jax_paged.config import EngineArgs
from jax_paged.core.scheduler import Scheduler
from jax_paged.core.scheduler_output import SchedulerOutput
from jax_paged.engine import kv_access, prefixes, recordings, request_edits, snapshot
from jax_paged.engine.assembly import (
    OwnScheduler,
    described,
    make_local_executor,
    make_scheduler,
    make_tokenizer,
    with_end_token,
)
from jax_paged.engine.errors import EngineDeadError
from jax_paged.engine.input_processor import (
    CheckedRequest,
    InputProcessor,
    check_arrival_time,
    sequence_group,
)
from jax_paged.engine.invariance import check_invariance
from jax_paged.engine.kv_access import Inspection
from jax_paged.engine.output_processor import RequestState
from jax_paged.engine.request_edits import Verification
from jax_paged.engine.snapshot import EngineState
from jax_paged.engine.step_loop import StepLoop
from jax_paged.engine.step_plan import StepPlan
from jax_paged.inputs import Prompt
from jax_paged.outputs import RequestOutput
from jax_paged.sampling_params import BeamSearchParams, SamplingParams

if TYPE_CHECKING:
    import numpy as np
    from transformers import PreTrainedTokenizerBase

    from jax_paged.lab.page_table import PageTable
    from jax_paged.lab.pool_map import PoolMap
    from jax_paged.lab.what_if import Replay
    from jax_paged.worker.executor import Executor


class LLMEngine:
    """Runs requests together: each `step` computes one batch and returns the outputs that grew.

    One thread at a time may use an engine; `check_request` alone may be called from any.

    Args:
        args: Model and limits.
        executor: Runs the steps. The engine closes it, also if it can't be made. None runs them in this
            process.
        scheduler: A subclass of Scheduler to take its place; or a function of a new request (a SequenceGroup)
            that returns its key: requests of lower keys go first, and take the blocks of others.

    Raises:
        ValueError: If the model, its tokenizer or a setting can't be used.
    """

    def __init__(
        self,
        args: EngineArgs,
        executor: "Executor | None" = None,
        *,
        scheduler: OwnScheduler | None = None,
    ) -> None:
        self.args = args
        self.num_names = 0  # of pinned prefixes and forks, given so far
        self.seeds = random.Random(args.seed)  # of requests that bring none
        self._closed = False
        try:
            self.tokenizer = make_tokenizer(args)
            if executor is None:
                executor = make_local_executor(args)
            self.config = with_end_token(executor.config, self.tokenizer)
            self.input_processor = InputProcessor(self.config, self.tokenizer)
            max_in_flight = 2 if self.config.async_scheduling else 1
            make = functools.partial(make_scheduler, self.config, scheduler)
            self._loop = StepLoop(make, executor, max_in_flight)
            if self.config.batch_invariant:
                check_invariance(self)
        except BaseException:
            if executor is not None:
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

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:
        """Makes an engine; the name that vLLM's scripts use."""
        return cls(engine_args)

    def get_tokenizer(self) -> "PreTrainedTokenizerBase":
        """Returns the tokenizer as transformers loads it.

        Raises:
            ValueError: If the engine has none.
        """
        if self.tokenizer is None:
            raise ValueError("there is no tokenizer: skip_tokenizer_init is True")
        return self.tokenizer.hf

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
        return self.input_processor.check(prompt, sampling_params, cache_salt, priority)

    def add_request(
        self,
        request_id: str,
        prompt: Prompt | CheckedRequest,
        params: SamplingParams | BeamSearchParams | None = None,
        arrival_time: float | None = None,
        lora_request: None = None,
        *,
        cache_salt: str = "",
        priority: int = 0,
    ) -> None:
        """Puts a request in the queue.

        Args:
            request_id: No unfinished request may have the same.
            prompt: As `check_request` takes it, with params, cache_salt and priority; or what that has
                returned, which holds all of them.
            params: Without a seed they get one that depends on the engine's seed and how many requests came
                before.
            arrival_time: In seconds of time.monotonic() (not of time.time(), as vLLM's) and not in the
                future; None takes now.
            lora_request: None: adapters are not supported.
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
            check_arrival_time(arrival_time, now)
        check(lora_request is None, "lora_request", lora_request, "None, as adapters are not supported")
        if not isinstance(prompt, CheckedRequest):
            prompt = self.check_request(prompt, params, cache_salt=cache_salt, priority=priority)
        group = sequence_group(
            request_id, prompt, now if arrival_time is None else arrival_time, self._new_seed
        )
        tokenizer = self.tokenizer if group.sampling_params.detokenize else None
        state = RequestState(group, prompt.prompt, tokenizer, prompt.encoder_prompt, prompt.stop)
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
        self._check_open()
        return self._loop.advance()

    def schedule(self) -> StepPlan:
        """Plans the next step and does not run it; `run` does, or `step`, which runs it as it stands.

        It is made with the results of all steps before it, and drops a plan that has not run.
        """
        self._check_open()
        return self._loop.plan()

    def run(self, plan: StepPlan) -> list[RequestOutput]:
        """Runs a plan, perhaps without some requests or in another order; returns what `step` does.

        Raises:
            ValueError: If it is not the last plan, has run, or was changed otherwise.
        """
        self._check_open()
        outputs = (state.next_output() for state in self._loop.run(plan))
        return [output for output in outputs if output is not None]

    def drain(self) -> bool:
        """Waits for what the device still computes for requests that have ended; returns if no others run."""
        return self._loop.drain()

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
        return prefixes.pin(self, self._new_name("prefix"), prompt, cache_salt)

    def unpin_prefix(self, name: str) -> None:
        """Lets go of a pinned prefix, by the name that pin_prefix returned.

        Raises:
            ValueError: If no prefix is pinned by this name.
        """
        self.scheduler.block_manager.unpin(name)

    def fork(self, request_id: str, new_id: str | None = None, seed: int | None = None) -> str:
        """Adds a request that goes on from where another is, and shares its blocks; returns its id.

        Its id and seed are new ones unless given. Like all methods that follow, it waits for the steps in
        flight first; `step` returns what these bring. Without a free seat the fork waits, and computes again
        what the prefix cache does not hold.

        Raises:
            ValueError: If this can't be done, and nothing has changed; so in all methods that follow.
        """
        self._check_open()
        new_id = self._new_name(f"{request_id}-fork") if new_id is None else new_id
        request_edits.fork(self._loop, request_id, new_id, self._new_seed() if seed is None else seed)
        return new_id

    def rollback(self, request_id: str, num_tokens: int) -> None:
        """Takes the last output tokens of a request with one sequence back, as if they had not been drawn.

        Of deltas that were handed out, nothing is taken back: the next begins behind what is left.
        """
        self._check_open()
        request_edits.roll_back(self._loop, request_id, num_tokens)

    def verify(self, request_id: str, draft: Iterable[int]) -> Verification:
        """Computes a draft in one step, in which no other request advances; accepts what is drawn so, too.

        The output stays what it would be without drafts. A draft has less than max_num_seqs tokens, and its
        request one sequence and no penalties.
        """
        self._check_open()
        return request_edits.verify(self._loop, request_id, list(draft), self.config.vocab_size)

    def kv(self, request_id: str, layer: int, index: int = 0) -> "tuple[np.ndarray, np.ndarray]":
        """Returns a sequence's keys and values in the pool, each [computed tokens, kv heads, head_dim]."""
        self._check_open()
        return kv_access.kv(self._loop, request_id, layer, index)

    def page_table(self, request_id: str, index: int = 0) -> "PageTable":
        """Returns which block holds which tokens of a request's sequence; a notebook draws it."""
        from jax_paged.lab.page_table import page_table

        self._check_open()
        tables = kv_access.tables(self._loop, request_id, index)
        return page_table(*tables, self.tokenizer.token_text if self.tokenizer else str)

    def inspect(
        self,
        request_id: str,
        layers: Iterable[int] = (),
        heads: Iterable[int] | None = None,
        num_queries: int | None = 1,
        index: int = 0,
    ) -> Inspection:
        """Returns the logits that a request's next token is drawn from, and what the last tokens attend to.

        It is computed beside the steps, with the keys in the pool, and changes nothing. Of the layers of self
        attention and heads (None: all), the last num_queries tokens attend (None: all; 1 if blocks are gone).
        """
        self._check_open()
        return kv_access.inspect(self._loop, request_id, layers, heads, num_queries, index)

    def drop_kv(self, request_id: str, keep: Iterable[int]) -> None:
        """Drops blocks of a request with one sequence: later tokens do not attend to them any more.

        Positions stay those of the text, and keys as they were rotated (StreamingLLM counts positions in the
        cache). The prefix cache gets none of the later blocks. The request can't be computed again, so it is
        swapped out where others are preempted, and ends, saying so, if host memory has no room.

        Args:
            request_id: A request whose prompt is computed, of a model all of whose layers see all tokens.
            keep: Ascending places in its page table of the blocks that stay; the last block is one.
        """
        self._check_open()
        kv_access.drop(self._loop, request_id, keep)

    def record(self, sink: Callable[[str], object] | None) -> None:
        """Writes down every decision from now on as lines of JSON; `recording.replay` checks them.

        The engine starts again with an empty pool, without cached prefixes. `scheduler` is another one
        afterwards.

        Args:
            sink: Takes each line, such as an open file's `write` or a list's `append`; None ends a recording.

        Raises:
            RuntimeError: If requests are running or prefixes are pinned.
        """
        self._check_open()
        recordings.record(self._loop, sink)

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
        self._check_open()
        return recordings.replay(self._loop, self.config, lines)

    def state(self, *, weights: bool = False) -> EngineState:
        """Returns all that it takes to go on elsewhere, or later: `LLM.restore` and `load_state` do.

        Args:
            weights: Whether it holds the weights too. Without them, the engine that goes on has to serve the
                same ones, of which the state keeps a fingerprint.

        Raises:
            RuntimeError: If a plan has not run.
        """
        self._check_open()
        return snapshot.take(self, self._loop, with_weights=weights)

    def load_state(self, state: "EngineState | str | os.PathLike[str]") -> None:
        """Goes on from a state, or from the folder of one that was saved: the same tokens come, bit for bit.

        Raises:
            ValueError: If it is of an engine with another model or pool, or of another version.
            RuntimeError: If requests are running, prefixes are pinned, or the engine is being recorded.
        """
        self._check_open()
        loaded = state if isinstance(state, EngineState) else EngineState.load(state)
        snapshot.load(self, self._loop, loaded)

    def pool_map(self) -> "PoolMap":
        """Returns what each block of the pool holds, who holds it and how full it is; a notebook draws it."""
        from jax_paged.lab.pool_map import pool_map

        self._check_not_closed()
        return pool_map(self.scheduler.block_manager, (state.group for state in self._loop.requests.values()))

    def compile_plan(self) -> str:
        """Returns a table of the buckets: shapes, seconds and bytes of what is compiled."""
        self._check_not_closed()
        return self.executor.compile_plan()

    def close(self) -> None:
        """Frees weights and pool and forgets all requests; a second call does nothing."""
        if not self._closed:
            self._closed = True
            self._loop.requests.clear()
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

    def _check_open(self) -> None:
        self._check_not_closed()
        if self._loop.failure is not None:
            message = f"the engine has failed: {self._loop.failure!r}; make a new one"
            raise EngineDeadError(message) from self._loop.failure

    def _check_not_closed(self) -> None:
        if self._closed:
            raise EngineDeadError("this engine is closed; make a new one")
