"""Prefixes that stay in the pool until they are unpinned."""

from typing import TYPE_CHECKING

from jax_paged.core.sequence import SequenceStatus
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
        raise ValueError("enable_prefix_caching is False; allowed for pinned prefixes: True")
    if engine.config.decoder_start_token_id is not None:
        raise ValueError(
            "an encoder-decoder model has no prefixes to pin: each encoder output is one request's"
        )
    params = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
    request = engine.check_request(prompt, params, cache_salt=cache_salt)
    if request.embeds is not None:
        raise ValueError("prompt_embeds is given; allowed for pinned prefixes: tokens")
    if request.stand_ins:
        raise ValueError("multi_modal_data is given; allowed for pinned prefixes: text alone")
    if len(request.prompt_token_ids) < manager.block_size:
        raise ValueError(
            f"the prefix has {len(request.prompt_token_ids)} tokens; allowed: at least a block of "
            f"{manager.block_size}, as only full blocks are shared"
        )
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
            f"the prefix was not computed: {seq.stop_reason or 'it was aborted'}; allowed: one of finite "
            f"logits, for which the {num_free} free blocks of {num_usable} are enough"
        )
    if not manager.pin(name, request.prompt_token_ids, cache_salt):
        manager.unpin(name)
        raise ValueError(
            f"the prefix has {len(request.prompt_token_ids)} tokens, and no state was kept behind a block of "
            f"them; allowed: more than {manager.block_size} tokens, while there is a free slot for states"
        )
    return name
