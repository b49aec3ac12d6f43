"""Access to the KV cache of running requests: keys and values, logits and attention, dropping of blocks."""

import dataclasses
import itertools
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from jax_paged.arguments.plain_values import plain
from jax_paged.core.features.interactive.request_edits import DropBlocks
from jax_paged.core.request import Sequence
from jax_paged.core.scheduler_output import InspectionInput
from jax_paged.engine.feature import EngineFeature
from jax_paged.engine.features.interactive.request_edits import decoding_sequence, settled_state
from jax_paged.engine.output_processor import RequestState
from jax_paged.errors import check, check_int

if TYPE_CHECKING:
    from jax_paged.core.block_manager import BlockManager
    from jax_paged.lab.page_table import PageTable
    from jax_paged.lab.pool_map import PoolMap


@dataclasses.dataclass(frozen=True)
class Inspection:
    """Logits for the next token of a request, and attention probabilities of its last tokens.

    Args:
        logits: float32 [vocab_size], the logits that follow the last token, before penalties and other
            sampling parameters are applied.
        attention: Attention probabilities of the last tokens by layer, float32 [heads, queries, keys]. Each
            row sums to 1, or to less than 1 in layers with attention sinks.
        positions: int64 [keys], positions of the keys in the sequence. The queries are the last of these
            tokens.
    """

    logits: np.ndarray
    attention: dict[int, np.ndarray]
    positions: np.ndarray


class KVAccess(EngineFeature):
    """Methods of LLMEngine that read the KV cache of running requests or drop some of their blocks."""

    def _sequence_with_blocks(self, request_id: str, index: int) -> tuple[RequestState, Sequence]:
        """Waits for the steps in flight; returns a request and its sequence with the given index.

        Raises:
            ValueError: If the sequence has no blocks on the device.
        """
        core = self._core
        state = settled_state(core, request_id)
        index = check_int("index", index, 0, len(state.group.sequences) - 1)
        seq, tables = state.group.sequences[index], core.scheduler.block_manager.block_tables
        allowed = f"the id of a running request (its sequence {index} is {seq.status.name.lower()})"
        check(seq in tables, "request_id", request_id, allowed)
        return state, seq

    def pool_map(self) -> "PoolMap":
        """Returns which requests hold each KV block, and how full it is. Notebooks draw the result."""
        from jax_paged.lab.pool_map import pool_map

        self._core.check_not_closed()
        return pool_map(
            self._core.scheduler.block_manager, (state.group for state in self._core.requests.values())
        )

    def page_table(self, request_id: str, index: int = 0) -> "PageTable":
        """Returns which block holds which tokens of a sequence. Notebooks draw the result."""
        from jax_paged.lab.page_table import page_table

        self._core.check_can_run()
        state, seq = self._sequence_with_blocks(request_id, index)
        token_text = self.tokenizer.token_text if self.tokenizer else str
        return page_table(self._core.scheduler.block_manager, state.group, seq, token_text)

    def kv(self, request_id: str, layer: int, index: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Returns the cached keys and values of a sequence, each [computed tokens, kv heads, head_dim].

        The arrays have the model's dtype. For a quantized KV cache they are the dequantized values, which
        this dtype represents exactly.
        """
        core = self._core
        core.check_can_run()
        state, seq = self._sequence_with_blocks(request_id, index)
        manager = core.scheduler.block_manager
        num_own = seq.num_computed_tokens - seq.num_dropped_tokens
        num_cross = len(state.group.request.encoder_token_ids)
        num_tokens = [num_cross if group.is_cross else num_own for group in manager.groups]
        return core.executor.read_kv(check_int("layer", layer, 0), manager.block_tables[seq], num_tokens)

    def inspect(
        self,
        request_id: str,
        layers: Iterable[int] = (),
        heads: Iterable[int] | None = None,
        num_queries: int | None = 1,
        index: int = 0,
    ) -> Inspection:
        """Returns the logits for a request's next token and the attention probabilities of its last tokens.

        The values are computed from the cached keys, outside the regular steps, and change nothing.

        Args:
            request_id: A request that has one token left to compute.
            layers: Indices of the self-attention layers whose attention is returned.
            heads: Indices of the heads to return; None for all.
            num_queries: Number of last tokens whose attention is returned; None for all. Must be 1 if blocks
                of the request were dropped.
            index: Index of the sequence in the request.

        Raises:
            ValueError: If an argument is wrong or the request can't be inspected.
        """
        core = self._core
        core.check_can_run()
        state, seq = self._sequence_with_blocks(request_id, index)
        why = "recurrent states already include the token that would be computed again"
        core.check_not_recurrent("inspect()", why)
        allowed = f"the id of a request with one token left to compute (it has {seq.num_new_tokens})"
        check(seq.num_new_tokens == 1, "request_id", request_id, allowed)
        is_plain = not (state.group.adapter or state.group.request.prompt_embeds or seq.placeholder_data)
        allowed = "the id of a request without a LoRA adapter, images or prompt_embeds"
        check(is_plain, "request_id", request_id, allowed)
        manager = core.scheduler.block_manager
        num_queries = len(seq) if num_queries is None else num_queries
        num_queries = check_int("num_queries", num_queries, 1, 1 if seq.num_dropped_tokens else len(seq))
        start, tables = len(seq) - num_queries, manager.block_tables[seq]
        allowed = "smaller because blocks that the first queries attend to have left the sliding window"
        check(not manager.lacks_window_blocks(tables, start), "num_queries", num_queries, allowed)
        logits, attention = core.executor.inspect(
            InspectionInput(
                token_ids=seq.tokens(start, len(seq)),
                start=start,
                num_computed_tokens=seq.num_computed_tokens,
                num_dropped_tokens=seq.num_dropped_tokens,
                num_encoder_tokens=len(state.group.request.encoder_token_ids),
                block_tables=[list(table) for table in tables],
                layers=[check_int("layers", layer, 0) for layer in layers],
            )
        )
        if heads is not None:
            chosen = list(heads)
            for probabilities in attention.values():
                chosen = [check_int("heads", head, 0, len(probabilities) - 1) for head in chosen]
            attention = {layer: probabilities[chosen] for layer, probabilities in attention.items()}
        return Inspection(logits, attention, positions(seq, manager))

    def drop_kv(self, request_id: str, keep: Iterable[int]) -> None:
        """Drops KV blocks of a request that has one sequence, so that later tokens do not attend to them.

        Positions and rotary embeddings of the remaining tokens do not change. (StreamingLLM, in contrast,
        uses positions within the cache.) Later blocks of the request are not added to the prefix cache. The
        request can't be recomputed, so it is swapped out if it has to be preempted. If host memory has no
        room for it, it ends, with finish_reason "length".

        Args:
            request_id: A request whose prompt is computed. Every layer of the model must use full attention.
            keep: Indices, in ascending order, of the blocks in its block table to keep; must include the last
                block.
        """
        core = self._core
        core.check_can_run()
        state = settled_state(core, request_id)
        seq, manager = decoding_sequence(core, state), core.scheduler.block_manager
        is_plain = (
            len(manager.groups) == 1 and manager.groups[0].window is None and not manager.groups[0].is_cross
        )
        allowed = "a model in which every layer uses full attention"
        check(is_plain, "model", core.config.architecture, allowed)
        num_blocks = manager.num_blocks_of(seq.num_computed_tokens - seq.num_dropped_tokens)
        kept = tuple(map(plain, keep))
        core.check_not_recurrent("drop_kv()", "recurrent states include the tokens that would be dropped")
        ok = all(isinstance(i, int) and 0 <= i < num_blocks for i in kept)
        ok = ok and all(a < b for a, b in itertools.pairwise(kept)) and kept[-1:] == (num_blocks - 1,)
        allowed = f"ascending block indices below {num_blocks} that include {num_blocks - 1}"
        check(ok, "keep", kept, allowed)
        if len(kept) < num_blocks:
            core.scheduler.edit_request(DropBlocks(request_id, tuple(map(int, kept))))


def positions(seq: Sequence, manager: "BlockManager") -> np.ndarray:
    """Returns the positions (int64) of all tokens that a sequence attends to, including its last one."""
    size, num_slots = manager.block_size, len(seq) - seq.num_dropped_tokens
    first = np.array([seq.original_block_index(i) * size for i in range(manager.num_blocks_of(num_slots))])
    return (first[:, None] + np.arange(size)).reshape(-1)[:num_slots]
