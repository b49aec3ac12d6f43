"""An executor of scripted tokens in place of the model, for tests of the engine around the device."""

from collections import deque
from collections.abc import Callable
from typing import Any

from jax_paged import EngineArgs, LLMEngine, SamplingParams
from jax_paged.config.engine_config import EngineConfig
from jax_paged.core.kv_cache.cache_group import CacheGroup
from jax_paged.core.model_runner_output import ModelRunnerOutput, TokenLogprobs
from jax_paged.core.scheduler_output import (
    BlockTables,
    InspectionInput,
    NewSequence,
    ScheduledSequence,
    SchedulerOutput,
)
from jax_paged.outputs import RequestOutput

VOCAB_SIZE, EOS = 300, 2
TEMPLATE = "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }};{% endfor %}a:"
LONG = SamplingParams(max_tokens=None)


class ScriptedExecutor:
    """Answers "text?" with text, token by token, then with the end token.

    Args:
        args: Limits.
        sampling_defaults: What a generation_config.json would say of sampling.
        num_tokens: Tokens that each sequence gets per step.
    """

    def __init__(
        self, args: EngineArgs, sampling_defaults: dict[str, Any] | None = None, num_tokens: int = 1
    ) -> None:
        self.config = EngineConfig(
            model_name="scripted",
            architecture="None",
            dtype="float32",
            attention_backend="none",
            matmul_backend="none",
            vocab_size=VOCAB_SIZE,
            max_model_len=args.max_model_len or 400,
            block_size=args.block_size,
            num_blocks=args.num_gpu_blocks_override or 40,
            num_swap_blocks=1000,
            cache_groups=(CacheGroup(),),
            kv_cache_bytes=3 * 2**20,
            weight_bytes=2**31,
            max_num_seqs=args.max_num_seqs or 8,
            max_num_batched_tokens=args.max_num_batched_tokens or 64,
            max_logprobs=19,
            eos_token_ids=frozenset({EOS}),
            sampling_defaults=sampling_defaults or {},
            enable_prefix_caching=args.enable_prefix_caching,
            enable_chunked_prefill=args.enable_chunked_prefill,
            scheduling_policy=args.scheduling_policy,
            preemption_mode=args.preemption_mode,
            scheduler_delay_factor=args.scheduler_delay_factor,
            async_scheduling=args.async_scheduling,
            seed=args.seed,
        )
        self.buckets = ("decode 1", "decode 8", "mixed 64x8")
        self.compile_progress = (3, 3)
        self.num_steps = 0
        self.num_closed = 0
        self.seeds: dict[str, int] = {}
        self.during_step: Callable[[SchedulerOutput], object] = lambda output: None
        self.bad_request: str | None = None
        self._num_tokens = num_tokens
        self._seats: dict[int, NewSequence] = {}
        self._dispatched: deque[SchedulerOutput] = deque()

    def dispatch(self, output: SchedulerOutput) -> None:
        self._dispatched.append(output)

    def result(self) -> ModelRunnerOutput:
        output = self._dispatched.popleft()
        self._take_seats(output)
        if output.scheduled:
            self.num_steps += 1
            self.during_step(output)
        token_ids = [self._next(output.scheduled[sample.scheduled_index]) for sample in output.samples]
        request_ids = [self._seats[row.seq_id].request.request_id for row in output.scheduled]
        return ModelRunnerOutput(
            step_id=output.step_id,
            token_ids=token_ids,
            logprobs=[list(map(self._entry, tokens)) for tokens in token_ids],
            is_finite=[request_id != self.bad_request for request_id in request_ids],
            prompt_logprobs=[self._prompt(row) for row in output.scheduled],
        )

    def wait_until_compiled(self) -> None:
        pass

    def on_failure(self, callback: Callable[[str], None]) -> None:
        pass

    def read_memory(self, blocks: list[int], host_blocks: list[int], *, with_weights: bool) -> dict[str, Any]:
        return {}

    def write_memory(
        self, blocks: list[int], host_blocks: list[int], arrays: dict[str, Any], *, with_weights: bool
    ) -> None:
        assert not arrays

    def fingerprint(self) -> tuple[str, str]:
        return "scripted", "none"

    def update_weights(self, new: Any) -> None:
        raise ValueError("scripted tokens have no weights")

    def free_memory(self, *, keeps_weights: bool) -> None:
        pass

    def restore_weights(self) -> None:
        pass

    def restore_pool(self) -> None:
        pass

    def check_weights(self) -> None:
        pass

    def close(self) -> None:
        self.num_closed += 1

    def read_kv(self, layer: int, block_tables: BlockTables, num_tokens: list[int]) -> Any:
        raise NotImplementedError("scripted tokens have no keys")

    def inspect(self, query: InspectionInput) -> Any:
        raise NotImplementedError("scripted tokens have no logits")

    def compile_plan(self) -> str:
        return "a table"

    def compile_report(self) -> list[Any]:
        return []

    def _take_seats(self, output: SchedulerOutput) -> None:
        if output.step_id == 0:  # the first of another scheduler
            self._seats.clear()
        for seq_id in output.released_seq_ids:
            del self._seats[seq_id]
        for new in output.new_sequences:
            assert new.seq_id not in self._seats, "a seat taken twice"
            self._seats[new.seq_id] = new
            assert new.request.sampling_params.seed is not None, "the engine gives every request a seed"
            self.seeds[new.request.request_id] = new.request.sampling_params.seed

    def _next(self, row: ScheduledSequence) -> list[int]:
        prompt = self._seats[row.seq_id].request.prompt_token_ids
        first = row.start + row.num_tokens - len(prompt)
        answer = [*prompt[:-1], *[EOS] * self._num_tokens]
        return answer[min(first, len(prompt) - 1) :][: self._num_tokens]

    @staticmethod
    def _entry(token: int) -> TokenLogprobs:
        top = [(token + 1) % VOCAB_SIZE, token]
        return TokenLogprobs(-1.5, 2, top, [-0.5, -1.5])

    def _prompt(self, row: ScheduledSequence) -> list[TokenLogprobs]:
        seat = self._seats[row.seq_id]
        if seat.request.sampling_params.prompt_logprobs is None:
            return []
        return [
            self._entry(t)
            for t in seat.request.prompt_token_ids[row.start + 1 : row.start + row.num_tokens + 1]
        ]


def run(engine: LLMEngine) -> dict[str, RequestOutput]:
    """Runs all requests to their end."""
    outputs = {}
    while engine.has_unfinished_requests():
        outputs |= {o.request_id: o for o in engine.step() if o.finished}
    return outputs


def no_block_lost(engine: LLMEngine) -> bool:
    manager = engine.scheduler.block_manager
    manager.check_integrity()
    return all(pool.num_free == pool.num_usable for pool in (manager.pool, manager.swap_pool))
