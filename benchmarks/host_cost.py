"""Host time per step (schedule, build, update), by number of waiting requests and by context length.

    python benchmarks/host_cost.py

256 requests run and compute one token each per step. The pool has blocks for all of them, so all steps are
alike. No model is run. "schedule" and "update" are the methods of the scheduler. "build" is the worker's
part: it updates the batch slots and fills the padded buffer. The settings alternate round by round, so that
other load on the machine affects all of them. The result of a round is the median of its 64 steps. The table
shows the best round of each part; its last column is the median round of the total.
"""

import argparse
import dataclasses
import json
import statistics
import time

import numpy as np

from jax_paged.core.block_manager import BlockManager
from jax_paged.core.model_runner_output import ModelRunnerOutput, TokenLogprobs
from jax_paged.core.request import Request, SequenceGroup
from jax_paged.core.scheduler import Scheduler
from jax_paged.sampling_params import SamplingParams
from jax_paged.worker.batch_builder import BatchBuilder
from jax_paged.worker.compilation.buckets import Bucket
from jax_paged.worker.features.feature_rows import FeatureRows
from jax_paged.worker.input_batch import InputBatch
from jax_paged.worker.step_rows import plan_logits_rows

NUM_RUNNING, BLOCK_SIZE, VOCAB_SIZE = 256, 16, 128_256
PARTS = ("schedule", "build", "update")


@dataclasses.dataclass(frozen=True)
class Setting:
    """One combination of queue length and context length.

    Args:
        num_waiting: Number of waiting requests.
        prompt_len: Context length of each running request (tokens).
    """

    num_waiting: int
    prompt_len: int


class Host:
    """A scheduler whose running requests have computed their prompts, and the batch slots of a worker."""

    def __init__(self, setting: Setting) -> None:
        max_model_len = setting.prompt_len + 4096
        blocks_per_seq = -(-max_model_len // BLOCK_SIZE)
        self.budget = NUM_RUNNING * setting.prompt_len
        manager = BlockManager(NUM_RUNNING * blocks_per_seq + 2, BLOCK_SIZE, enable_prefix_caching=True)
        self.scheduler = Scheduler(
            block_manager=manager,
            max_num_seqs=NUM_RUNNING,
            max_num_batched_tokens=self.budget,
            max_model_len=max_model_len,
            eos_token_ids=frozenset({7}),
        )
        self.batch = InputBatch(
            max_num_seqs=NUM_RUNNING,
            num_groups=1,
            max_blocks_per_seq=blocks_per_seq,
            num_blocks=manager.pool.num_blocks,
            vocab_size=VOCAB_SIZE,
            features=FeatureRows(NUM_RUNNING),
        )
        self.builder = BatchBuilder(
            self.batch,
            block_size=BLOCK_SIZE,
            num_blocks=manager.pool.num_blocks,
            groups=manager.groups,
            vocab_size=VOCAB_SIZE,
        )
        params = SamplingParams(max_tokens=4000, seed=0)
        for i in range(NUM_RUNNING + setting.num_waiting):
            # Lengths differ, so that the requests do not all need a new block in the same step.
            prompt = [i, *range(setting.prompt_len - 1 - i % BLOCK_SIZE)]
            self.scheduler.add(SequenceGroup.from_request(Request(str(i), prompt, params), 0.0))
        for _ in range(2):
            self.step()

    def step(self) -> tuple[float, float, float]:
        """Runs one step and returns the times of schedule, build and update (seconds)."""
        times = [time.perf_counter()]
        output = self.scheduler.schedule(0.0)
        times.append(time.perf_counter())
        self.batch.update(output)
        is_decode = output.num_batched_tokens == len(output.scheduled)
        bucket = Bucket(is_decode, NUM_RUNNING if is_decode else self.budget, NUM_RUNNING)
        self.builder.build(output, plan_logits_rows(output), bucket)
        times.append(time.perf_counter())
        result = ModelRunnerOutput(
            output.step_id,
            [[100] for _ in output.samples],
            [[TokenLogprobs(-1.0, 0, [], [])] for _ in output.samples],
            [True] * len(output.scheduled),
            [[]] * len(output.scheduled),
        )
        updating = time.perf_counter()
        self.scheduler.update(output, result, 0.0)
        return times[1] - times[0], times[2] - times[1], time.perf_counter() - updating


def main() -> None:
    """Measures all settings and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--waiting",
        type=int,
        nargs="+",
        default=[0, 1_000, 10_000, 100_000],
        help="numbers of waiting requests, measured with the first context length",
    )
    parser.add_argument(
        "--contexts",
        type=int,
        nargs="+",
        default=[100, 1_500, 8_000],
        help="context lengths (tokens), measured with the first number of waiting requests",
    )
    parser.add_argument("--rounds", type=int, default=15, help="rounds of 64 steps (default: %(default)s)")
    args = parser.parse_args()
    settings = [Setting(n, args.contexts[0]) for n in args.waiting]
    settings += [Setting(args.waiting[0], n) for n in args.contexts[1:]]
    hosts = {setting: Host(setting) for setting in settings}
    rounds: dict[Setting, list[np.ndarray]] = {setting: [] for setting in settings}
    for _ in range(args.rounds):
        for setting, host in hosts.items():
            parts = np.array([host.step() for _ in range(64)]) * 1e3
            rounds[setting].append(np.median([*parts.T, parts.sum(axis=1)], axis=1))

    print(f"{NUM_RUNNING} running requests; ms per step, best round\n")
    print("| waiting | context | " + " | ".join(PARTS) + " | total | median round |\n|" + " --- |" * 7)
    report = {}
    for setting, found in rounds.items():
        best, median = np.min(found, axis=0), statistics.median(float(x[-1]) for x in found)
        cells = " | ".join(f"{x:.2f}" for x in best)
        print(f"| {setting.num_waiting:,} | {setting.prompt_len:,} | {cells} | {median:.2f} |")
        report[f"{setting.num_waiting} waiting, context {setting.prompt_len}"] = round(float(best[-1]), 3)
    print("RESULT " + json.dumps(report))


if __name__ == "__main__":
    main()
