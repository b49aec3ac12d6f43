"""Prefixes that stay in the pool until they are unpinned."""

from jax_paged.core.sequence import SequenceStatus
from jax_paged.engine.engine_core import EngineCore
from jax_paged.engine.input_processor import InputProcessor
from jax_paged.inputs import Prompt
from jax_paged.sampling_params import SamplingParams


class PinnedPrefixes:
    """Computes prefixes and keeps their full blocks in the pool.

    Args:
        core: Computes the prefixes, and owns the pool.
        inputs: Checks the prefixes.
    """

    def __init__(self, core: EngineCore, inputs: InputProcessor) -> None:
        self._core = core
        self._inputs = inputs

    def pin(self, prompt: Prompt, cache_salt: str, name: str | None = None) -> str:
        """Computes a prefix and pins it; see LLMEngine.pin_prefix.

        Args:
            prompt: The prefix.
            cache_salt: The salt of the requests that will share it.
            name: The name to pin it by; None makes a new one.
        """
        name = self._core.new_name("prefix") if name is None else name
        if not self._core.drain():
            raise RuntimeError("requests are running; pin prefixes before them")
        manager = self._core.scheduler.block_manager
        if not manager.enable_prefix_caching:
            raise ValueError("enable_prefix_caching is False; allowed for pinned prefixes: True")
        if self._core.config.decoder_start_token_id is not None:
            raise ValueError(
                "an encoder-decoder model has no prefixes to pin: each encoder output is one request's"
            )
        params = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
        request = self._inputs.check(prompt, params, cache_salt)
        if request.embeds is not None:
            raise ValueError("prompt_embeds is given; allowed for pinned prefixes: tokens")
        if request.stand_ins:
            raise ValueError("multi_modal_data is given; allowed for pinned prefixes: text alone")
        if len(request.prompt_token_ids) < manager.block_size:
            raise ValueError(
                f"the prefix has {len(request.prompt_token_ids)} tokens; allowed: at least a block of "
                f"{manager.block_size}, as only full blocks are shared"
            )
        (state,) = self._core.run_to_end({name: request})
        seq = state.group.sequences[0]
        if not seq.output_token_ids or seq.status is SequenceStatus.FINISHED_ABORTED:
            num_free, num_usable = manager.num_free_blocks, manager.num_usable_blocks
            raise ValueError(
                f"the prefix was not computed: {seq.stop_reason or 'it was aborted'}; allowed: one of finite "
                f"logits, for which the {num_free} free blocks of {num_usable} are enough"
            )
        if not manager.pin(name, request.prompt_token_ids, cache_salt):
            manager.unpin(name)
            raise ValueError(
                f"the prefix has {len(request.prompt_token_ids)} tokens, and no state was kept behind a "
                f"block of them; allowed: more than {manager.block_size} tokens, while there is a free slot "
                "for states"
            )
        return name

    def unpin(self, name: str) -> None:
        """Releases a pinned prefix."""
        self._core.scheduler.block_manager.unpin(name)

    def forget_cached(self, kept_salt: str | None) -> None:
        """Drops all cached prefixes, and computes the pinned ones again with the weights of now.

        Args:
            kept_salt: As Scheduler.forget_prefixes takes it.

        Raises:
            ValueError: If pinned prefixes can't be computed again; these are not pinned any more.
        """
        core, problems = self._core, list[str]()
        manager, changed = core.scheduler.block_manager, core.take_changed()
        pinned = dict(manager.pinned)
        for name in pinned:
            manager.unpin(name)
        core.scheduler.forget_prefixes(kept_salt)
        for name, prefix in pinned.items():
            try:
                self.pin(prefix.token_ids, prefix.salt, name)
            except ValueError as error:
                problems.append(f"{name} is pinned no more: {error}")
        core.changed |= dict.fromkeys(changed)
        if problems:
            raise ValueError("\n".join(problems))
