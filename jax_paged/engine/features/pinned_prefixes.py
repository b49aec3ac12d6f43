"""Prefixes that stay in the pool until they are unpinned."""

from jax_paged.core.sequence import SequenceStatus
from jax_paged.engine.engine_core import EngineCore
from jax_paged.engine.input_processor import InputProcessor
from jax_paged.errors import ArgumentError
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
            raise ArgumentError("enable_prefix_caching", False, "True for pinned prefixes")
        if self._core.config.decoder_start_token_id is not None:
            raise ValueError(
                "an encoder-decoder model has no prefixes to pin: each encoder output is one request's"
            )
        params = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
        checked = self._inputs.check(prompt, params, cache_salt)
        request = checked.request
        if request.prompt_embeds is not None:
            raise ArgumentError("prompt", "prompt_embeds", "tokens because embeddings are not pinned")
        if request.stand_ins:
            raise ArgumentError("prompt", "multi_modal_data", "text alone because images are not pinned")
        if len(request.prompt_token_ids) < manager.block_size:
            allowed = f"at least {manager.block_size} (block_size) because only full blocks are shared"
            num_tokens, aspect = len(request.prompt_token_ids), "the number of tokens of"
            raise ArgumentError("prompt", num_tokens, allowed, aspect=aspect)
        (state,) = self._core.run_to_end({name: checked})
        seq = state.group.sequences[0]
        if not seq.output_token_ids or seq.status is SequenceStatus.FINISHED_ABORTED:
            num_free, num_usable = manager.num_free_blocks, manager.num_usable_blocks
            raise ValueError(
                f"the prefix was not computed: {seq.stop_reason or 'it was aborted'}. It needs finite logits "
                f"and must fit into the {num_free} free blocks of {num_usable}"
            )
        if not manager.pin(name, request.prompt_token_ids, cache_salt):
            manager.unpin(name)
            num_tokens, aspect = len(request.prompt_token_ids), "the number of tokens of"
            allowed = f"more than {manager.block_size} (block_size), while a slot for states is free"
            raise ArgumentError("prompt", num_tokens, allowed, aspect=aspect)
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
