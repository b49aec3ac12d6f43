"""The memory that the steps of an engine need in addition to weights and KV cache."""

import dataclasses
import math

import jax

from jax_paged.sampling_params import MAX_BIAS_IDS
from jax_paged.worker.compilation.buckets import Bucket, plan_buckets
from jax_paged.worker.compilation.programs import Program, TraceContext
from jax_paged.worker.composition import image_programs
from jax_paged.worker.pipeline.stage_runner import lower_part
from jax_paged.worker.traced_step import StepProgram


def step_bytes(context: TraceContext, num_steps: int, verifying: list[Bucket]) -> int:
    """Returns the memory that an engine needs in addition to weights and KV cache (bytes).

    It compiles the largest steps to find out.

    Args:
        context: A context with a small KV cache, whose size does not matter.
        num_steps: Number of decode steps in multi-step decoding, whose results need additional memory; 1
            without it.
        verifying: The buckets for steps with drafts.
    """
    buckets = plan_buckets(context.max_num_seqs, context.max_num_batched_tokens)
    mixed = sorted(buckets, key=lambda b: b.num_tokens)[-1:]
    features = context.features
    largest_mixed = [
        dataclasses.replace(b, has_adapters=features.lora is not None, has_embeds=bool(features.embed_path))
        for b in mixed
    ]
    largest = {b.variant: b for b in [*largest_mixed, *verifying]}
    row_bytes = 4 * (2 * MAX_BIAS_IDS + context.num_mask_words)
    # For each number of logits rows, the device keeps arrays for steps without biases and masks. A step with
    # biases and masks brings its own arrays.
    num_rows = {b.num_logits for b in [*buckets, *verifying]}
    sampling_inputs = row_bytes * (sum(num_rows) + max(num_rows))
    kept = jax.tree.leaves(dataclasses.replace(context.state(), kv_cache=[]))
    state = sum(math.prod(x.shape) * x.dtype.itemsize for x in kept)
    programs: list[Program] = [StepProgram(bucket) for bucket in largest.values()]
    programs += image_programs(context)[-1:]
    step = max(_program_bytes(program, context) for program in programs)
    # For each token, multi-step decoding returns 5 numbers in StepResult.tokens. StepResult.details contains
    # its rank, and the ids and log-probabilities of the most likely tokens.
    num_drawn = num_steps * context.max_num_seqs if num_steps > 1 else 0
    return step + sampling_inputs + state + 4 * num_drawn * (6 + 2 * context.sampling.max_logprobs)


def _program_bytes(program: Program, context: TraceContext) -> int:
    """Returns the memory that a program needs in addition to its arguments (bytes)."""
    memory = lower_part(program, context).compile().memory_analysis()
    assert memory is not None, "XLA reports no memory analysis for the device"
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return memory.temp_size_in_bytes + results + memory.generated_code_size_in_bytes
