"""Share of the time in which a device waits for the host, with one step and with two steps in flight.

    python benchmarks/device_idle.py                       256 running requests, steps of 5 ms
    python benchmarks/device_idle.py --step-ms 2 5 20      other step times
    python benchmarks/device_idle.py --burst 8             also with 8 decode steps per dispatch

The device is simulated: the executor does all of the host's work for a step (batch slots, padded buffer,
reading results), and computes when a device with the given step time would start and finish the step. Each
request streams text from random tokens, detokenized with the built-in tokenizer. As in the server, garbage
collection ignores objects that were created before the measurement.
"""

import argparse
import gc
import time
from collections import deque

import numpy as np

from jax_paged import EngineArgs, LLMEngine, SamplingParams
from jax_paged.config.engine_config import EngineConfig
from jax_paged.core.kv_cache.cache_group import CacheGroup
from jax_paged.core.model_runner_output import ModelRunnerOutput
from jax_paged.core.scheduler_output import SchedulerOutput
from jax_paged.sampling_params import RequestOutputKind
from jax_paged.worker.batch_builder import BatchBuilder
from jax_paged.worker.compilation.buckets import Bucket
from jax_paged.worker.features.feature_rows import FeatureRows
from jax_paged.worker.input_batch import InputBatch
from jax_paged.worker.step_result import PendingStep
from jax_paged.worker.step_rows import plan_logits_rows

VOCAB_SIZE, NUM_BLOCKS, MAX_MODEL_LEN, BLOCK_SIZE = 1000, 40_000, 2048, 16


class SimulatedExecutor:
    """Executor with a simulated device, which records how long the device waits for steps.

    Attributes:
        finished: Time at which the device finishes the last dispatched step, as time.perf_counter().
        idle_s: Total time in which the device waited for a step (seconds).
        busy_s: Total time in which the device ran steps (seconds).
    """

    def __init__(
        self, num_seqs: int, step_s: float, async_scheduling: bool, num_scheduler_steps: int
    ) -> None:
        self.config = EngineConfig(
            model_name="simulated",
            architecture="none",
            dtype="float32",
            attention_backend="none",
            matmul_backend="none",
            vocab_size=VOCAB_SIZE,
            max_model_len=MAX_MODEL_LEN,
            block_size=BLOCK_SIZE,
            num_blocks=NUM_BLOCKS,
            num_swap_blocks=1,
            cache_groups=(CacheGroup(),),
            kv_cache_bytes=1,
            weight_bytes=1,
            max_num_seqs=num_seqs,
            max_num_batched_tokens=max(num_seqs, 2048),
            max_logprobs=20,
            eos_token_ids=frozenset(),
            sampling_defaults={},
            async_scheduling=async_scheduling,
            num_scheduler_steps=num_scheduler_steps,
        )
        self.buckets = ()
        self.finished, self.idle_s, self.busy_s = 0.0, 0.0, 0.0
        self._step_s = step_s
        self._rng = np.random.default_rng(0)
        self._input_batch = InputBatch(
            max_num_seqs=num_seqs,
            num_groups=1,
            max_blocks_per_seq=MAX_MODEL_LEN // BLOCK_SIZE,
            num_blocks=NUM_BLOCKS,
            vocab_size=VOCAB_SIZE,
            features=FeatureRows(num_seqs),
        )
        self._builder = BatchBuilder(
            self._input_batch,
            block_size=BLOCK_SIZE,
            num_blocks=NUM_BLOCKS,
            groups=self.config.cache_groups,
            vocab_size=VOCAB_SIZE,
        )
        self._dispatched: deque[tuple[SchedulerOutput, float]] = deque()

    def dispatch(self, output: SchedulerOutput) -> None:
        """Does the host's work for a step and computes when the device would run it."""
        self._input_batch.update(output)
        if output.scheduled:
            n = len(output.scheduled)
            is_decode = output.num_batched_tokens == n
            num_tokens = n if is_decode else self.config.max_num_batched_tokens
            num_steps = self.config.num_scheduler_steps if output.num_multi_step_tokens else 1
            bucket = Bucket(is_decode, num_tokens, n if is_decode else self.config.max_num_seqs, num_steps)
            self._builder.build(output, plan_logits_rows(output), bucket)
        start = max(time.perf_counter(), self.finished)
        self.idle_s += start - self.finished
        step_s = self._step_s * max(output.num_multi_step_tokens, default=1)
        self.busy_s += step_s
        self.finished = start + step_s
        self._dispatched.append((output, self.finished))

    def result(self) -> ModelRunnerOutput:
        """Waits until the device would have finished the oldest step; returns random tokens."""
        output, finished = self._dispatched.popleft()
        time.sleep(max(0.0, finished - time.perf_counter()))
        logits_rows = plan_logits_rows(output)
        n = len(logits_rows.rows)
        # The layout of StepResult.tokens: row 0 has the tokens; the fifth row of multi-step decoding says
        # whether the sequence continues.
        results = np.ones(
            (max(output.num_multi_step_tokens), 5, n) if output.num_multi_step_tokens else (4, n), np.int32
        )
        results[..., 0, :] = self._rng.integers(260, VOCAB_SIZE, results[..., 0, :].shape)
        if output.num_multi_step_tokens:
            results[:, 4] = np.arange(len(results))[:, None] < output.num_multi_step_tokens
        num_top = np.full(len(logits_rows.samples), -1, np.int32)
        return PendingStep(
            output.step_id, len(output.scheduled), len(output.samples), logits_rows, num_top, results, None
        ).read()

    def check_weights(self) -> None:
        """Does nothing, because there are no weights."""

    def close(self) -> None:
        """Does nothing."""


def idle_share(
    num_seqs: int, step_s: float, async_scheduling: bool, num_scheduler_steps: int, num_steps: int
) -> tuple[float, float]:
    """Returns the share of the time in which the device is idle, and the decode steps per second.

    Args:
        num_seqs: Number of requests; all of them decode.
        step_s: Time of a decode step on the device (seconds).
        async_scheduling: Whether two steps are in flight.
        num_scheduler_steps: Number of decode steps per dispatch.
        num_steps: Number of decode steps to measure.
    """
    executor = SimulatedExecutor(num_seqs, step_s, async_scheduling, num_scheduler_steps)
    engine = LLMEngine(EngineArgs(), executor)
    params = SamplingParams(
        max_tokens=MAX_MODEL_LEN - 64, ignore_eos=True, seed=0, output_kind=RequestOutputKind.DELTA
    )
    for i in range(num_seqs):
        engine.add_request(str(i), {"prompt_token_ids": [300 + i % 500] * (8 + i % BLOCK_SIZE)}, params)
    for _ in range(20):
        engine.step()
    gc.freeze()
    executor.idle_s = executor.busy_s = 0.0
    start = time.perf_counter()
    for _ in range(num_steps // num_scheduler_steps):
        engine.step()
    elapsed = time.perf_counter() - start
    return executor.idle_s / (
        executor.idle_s + executor.busy_s
    ), num_steps // num_scheduler_steps * num_scheduler_steps / elapsed


def main() -> None:
    """Measures all combinations and prints one line for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-seqs", type=int, default=256, help="running requests (default: %(default)s)")
    parser.add_argument("--step-ms", type=float, nargs="+", default=[5.0], help="step times of the device")
    parser.add_argument("--steps", type=int, default=200, help="decode steps per round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--burst", type=int, default=1, help="num_scheduler_steps, in addition to 1")
    args = parser.parse_args()
    print(f"{args.num_seqs} running requests; idle share of the device, and steps per second, per round")
    for step_ms in args.step_ms:
        kinds = [(is_async, n) for n in sorted({1, args.burst}) for is_async in (False, True)]
        rows: dict[tuple[bool, int], list[tuple[float, float]]] = {kind: [] for kind in kinds}
        for _ in range(args.rounds):
            for kind, measured in rows.items():
                measured.append(idle_share(args.num_seqs, step_ms / 1e3, *kind, args.steps))
        for (is_async, n), measured in rows.items():
            text = "  ".join(f"{share:6.1%} {rate:6.1f}/s" for share, rate in measured)
            print(f"steps of {step_ms:g} ms, async_scheduling={is_async!s:<5}  {n} per dispatch  {text}")


if __name__ == "__main__":
    main()
