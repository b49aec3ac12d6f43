"""LLMEngine: an engine that can be opened, to look in and to change it."""

import os
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from typing import TYPE_CHECKING

from jax_paged.engine.features import recording, scoring, snapshot
from jax_paged.engine.features.interactive import kv_access, request_edits
from jax_paged.engine.features.interactive.kv_access import Inspection
from jax_paged.engine.features.interactive.request_edits import Verification
from jax_paged.engine.features.interactive.step_plan import StepPlan
from jax_paged.engine.features.snapshot import EngineState
from jax_paged.engine.features.weights import sleeping, weight_updates
from jax_paged.engine.request_engine import RequestEngine
from jax_paged.outputs import RequestOutput
from jax_paged.sampling_params import SamplingParams

if TYPE_CHECKING:
    import numpy as np

    from jax_paged.lab.page_table import PageTable
    from jax_paged.lab.pool_map import PoolMap
    from jax_paged.lab.what_if import Replay
    from jax_paged.models.loading.new_weights import NewWeights
    from jax_paged.worker.compilation.compiler import CompileRecord


class LLMEngine(RequestEngine):
    """Runs requests together: each `step` computes one batch and returns the outputs that grew.

    What it takes to serve is in RequestEngine, whose arguments it has. The methods here plan a step by hand,
    edit running requests, look at what they hold, exchange weights, and save and record all of it.
    """

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

    def update_weights(
        self,
        weights: "NewWeights",
        *,
        running: weight_updates.Running = "error",
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
        self._check_open(checks_weights=False, may_sleep=True)
        weight_updates.update(self, self._loop, weights, running, weight_version)

    def sleep(self, level: int = 1, mode: sleeping.Mode = "wait") -> None:
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
        self._check_open(checks_weights=False, may_sleep=True)
        sleeping.sleep(self, self._loop, level, mode)

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
        self._check_open(checks_weights=False, may_sleep=True)
        sleeping.wake_up(self, self._loop, tags)

    def check_sleep(self, level: int, mode: str) -> None:
        """Raises what `sleep` would, and changes nothing."""
        sleeping.check_sleep(self, self._loop, level, mode)

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
        self._check_open()
        return scoring.score(self, token_lists, num_prompt_tokens, sampling_params)

    def settle(self) -> None:
        """Takes in the results of the steps in flight; what they change is returned with the next step."""
        self._loop.settle()

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
        seed = SamplingParams(seed=seed).seed
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
        """Returns a sequence's keys and values in the pool, each [computed tokens, kv heads, head_dim].

        They are in the model's dtype, which holds exactly what a quantised cache stands for.
        """
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
        recording.record(self._loop, sink)

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
        return recording.replay(self._loop, self.config, lines)

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

        With async_scheduling the steps in flight end before a state is taken, so that other requests may be
        preempted than without a stop: tokens stay the same, log-probabilities but for the last digits.

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

    def compile_report(self) -> "list[CompileRecord]":
        """Returns what is compiled, as records: shapes, seconds, bytes."""
        self._check_not_closed()
        return self.executor.compile_report()
