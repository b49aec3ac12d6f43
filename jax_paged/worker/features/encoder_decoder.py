"""The encoder of encoder-decoder models. It runs once per request and fills the cross-attention KV cache."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jax_paged.config.engine_config import EngineConfig
from jax_paged.core.kv_cache.cache_group import CacheGroup
from jax_paged.core.scheduler_output import EncoderInput, SchedulerOutput
from jax_paged.worker.compilation.programs import Program, TraceContext
from jax_paged.worker.input_batch import InputBatch


@dataclasses.dataclass(frozen=True)
class EncodeProgram(Program):
    """Program that encodes one text and writes keys and values for cross attention to the KV cache.

    Args:
        num_tokens: Maximum length of the text (tokens).
    """

    num_tokens: int

    def __str__(self) -> str:
        return f"encode {self.num_tokens}"

    def trace(self, context: TraceContext) -> jax.stages.Traced:
        """Traces the program; see Program."""

        def encode_text(
            weights: list[Array], pool: list[Array], tokens: Array, length: Array, slots: Array
        ) -> list[Array]:
            model: Any = context.merge(weights)
            options = {
                "kv_locations": context.layout.locations,
                "backend": context.backend,
                "grid": context.grid,
            }
            return model.write_encoded(tokens, length, pool, slots, **options)

        pool, n = context.pool(), self.num_tokens
        shapes = ((n,), (), (len(context.layout.groups), n))
        inputs = [context.shape(shape, jnp.int32) for shape in shapes]
        jitted = jax.jit(encode_text, donate_argnums=1, out_shardings=[context.pool_sharding] * len(pool))
        return jitted.trace(context.weights, pool, *inputs)


def plan_encoders(max_model_len: int) -> list[EncodeProgram]:
    """Returns the programs for the lengths that texts are padded to, in ascending order."""
    lengths = [n for n in (32, 128, 512, 2048) if n < max_model_len]
    return [EncodeProgram(n) for n in (*lengths, max_model_len)]


def encode(
    run: Callable[..., Any],
    programs: list[EncodeProgram],
    output: SchedulerOutput,
    config: EngineConfig,
    weights: list[Array],
    kv_cache: list[Array],
) -> list[Array]:
    """Runs the encoder for the requests that start in a step.

    Args:
        run: Runs a program.
        programs: The encoder programs, in ascending order of their sizes.
        output: The step.
        config: Engine configuration.
        weights: The model's weights.
        kv_cache: The arrays of the KV cache; donated if there is a text to encode.

    Returns:
        The arrays of the KV cache.
    """
    for text in output.encoder_inputs:
        program = next(p for p in programs if p.num_tokens >= len(text.token_ids))
        inputs = build_encoder_inputs(
            text,
            program.num_tokens,
            groups=config.cache_groups,
            num_blocks=config.num_blocks,
            block_size=config.block_size,
        )
        kv_cache = run(program, weights, kv_cache, *inputs)
    return kv_cache


def build_encoder_inputs(
    text: EncoderInput, size: int, *, groups: tuple[CacheGroup, ...], num_blocks: int, block_size: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Pads a text for the encoder.

    Args:
        text: The text, and the block tables of its request.
        size: Padded length, N (tokens).
        groups: All G cache groups. Only cross-attention groups are written.
        num_blocks: Blocks of the KV cache.
        block_size: Tokens per block.

    Returns:
        int32 tokens [N], length [] and slots [G, N].
    """
    num_tokens = len(text.token_ids)
    tokens = np.zeros(size, np.int32)
    tokens[:num_tokens] = text.token_ids
    slots = np.full((len(groups), size), num_blocks * block_size, np.int32)
    position = np.arange(num_tokens)
    for g, group in enumerate(groups):
        if group.is_cross:
            blocks = np.array(text.block_tables[g], np.int32)[position // block_size]
            assert blocks.min() > 0, "a token would be written to the null block"
            slots[g, :num_tokens] = blocks * block_size + position % block_size
    return tokens, np.array(num_tokens, np.int32), slots


def fill_encoder_lens(context_lens: np.ndarray, batch: InputBatch, batch_slots: np.ndarray) -> None:
    """Fills the field `context_lens` for cross-attention groups with the number of encoder tokens."""
    for g, is_cross in enumerate(batch.is_cross):
        if is_cross:
            context_lens[g, : len(batch_slots)] = batch.features.num_encoder_tokens[batch_slots]
