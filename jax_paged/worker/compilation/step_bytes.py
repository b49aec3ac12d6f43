"""The memory that the steps of an engine need beside weights and pool."""

import dataclasses
import math

import jax

from jax_paged.sampling_params import MAX_BIAS_IDS
from jax_paged.worker.compilation.buckets import Bucket, plan_buckets
from jax_paged.worker.compilation.programs import Program, TraceContext
from jax_paged.worker.composition import image_programs
from jax_paged.worker.pipeline.own_stage import lower_part
from jax_paged.worker.traced_step import StepProgram


def step_bytes(context: TraceContext, num_steps: int, verifying: list[Bucket]) -> int:
    """Returns the memory that an engine needs beside weights and pool; the largest step tells.

    Args:
        context: With a small pool: its size does not matter.
        num_steps: Decode steps of multi-step decoding, whose results take memory beside a step's; 1 without.
        verifying: Shapes of steps with drafts.
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
    # What steps without biases and masks read, of every size; and what a step with them brings along.
    num_rows = {b.num_logits for b in [*buckets, *verifying]}
    sampling_inputs = row_bytes * (sum(num_rows) + max(num_rows))
    kept = jax.tree.leaves(dataclasses.replace(context.state(), kv_cache=[]))
    state = sum(math.prod(x.shape) * x.dtype.itemsize for x in kept)
    programs: list[Program] = [StepProgram(bucket) for bucket in largest.values()]
    programs += image_programs(context)[-1:]
    step = max(_program_bytes(program, context) for program in programs)
    num_drawn = num_steps * context.max_num_seqs if num_steps > 1 else 0
    return step + sampling_inputs + state + 4 * num_drawn * (6 + 2 * context.sampling.max_logprobs)


def _program_bytes(program: Program, context: TraceContext) -> int:
    """Returns the memory that a program needs beside its arguments."""
    memory = lower_part(program, context).compile().memory_analysis()
    assert memory is not None, "a GPU's compiler tells what a program needs"
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return memory.temp_size_in_bytes + results + memory.generated_code_size_in_bytes
