"""Prefixes that stay in the pool until they are unpinned."""

from typing import TYPE_CHECKING

from jax_paged.core.sequence import SequenceStatus
from jax_paged.errors import ArgumentError
from jax_paged.inputs import Prompt
from jax_paged.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jax_paged.engine.request_engine import RequestEngine


def pin(engine: "RequestEngine", name: str, prompt: Prompt, cache_salt: str) -> str:
    """Computes a prefix and keeps its full blocks by a name; see LLMEngine.pin_prefix."""
    if not engine.drain():
        raise RuntimeError("requests are running; pin prefixes before them")
    manager = engine.scheduler.block_manager
    if not manager.enable_prefix_caching:
        raise ArgumentError("enable_prefix_caching", False, "True for pinned prefixes")
    if engine.config.decoder_start_token_id is not None:
        raise ValueError(
            "an encoder-decoder model has no prefixes to pin: each encoder output is one request's"
        )
    params = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
    request = engine.check_request(prompt, params, cache_salt=cache_salt)
    if request.embeds is not None:
        raise ArgumentError("prompt", "prompt_embeds", "tokens because embeddings are not pinned")
    if request.stand_ins:
        raise ArgumentError("prompt", "multi_modal_data", "text alone because images are not pinned")
    if len(request.prompt_token_ids) < manager.block_size:
        allowed = f"at least {manager.block_size} (block_size) because only full blocks are shared"
        num_tokens, aspect = len(request.prompt_token_ids), "the number of tokens of"
        raise ArgumentError("prompt", num_tokens, allowed, aspect=aspect)
    engine.add_request(name, request)
    states = []
    try:
        while engine.has_unfinished_requests():
            states += engine.advance()
    finally:
        engine.end_requests([name])
    seq = states[-1].group.sequences[0]
    if not seq.output_token_ids or seq.status is SequenceStatus.FINISHED_ABORTED:
        num_free, num_usable = manager.num_free_blocks, manager.num_usable_blocks
        raise ValueError(
            f"the prefix was not computed: {seq.stop_reason or 'it was aborted'}. It needs finite logits and "
            f"must fit into the {num_free} free blocks of {num_usable}"
        )
    if not manager.pin(name, request.prompt_token_ids, cache_salt):
        manager.unpin(name)
        num_tokens, aspect = len(request.prompt_token_ids), "the number of tokens of"
        allowed = f"more than {manager.block_size} (block_size), while a slot for states is free"
        raise ArgumentError("prompt", num_tokens, allowed, aspect=aspect)
    return name
