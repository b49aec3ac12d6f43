"""Pinned prefixes: prompts whose KV blocks are not evicted until they are unpinned."""

from jax_paged.core.request import SequenceStatus
from jax_paged.engine.feature import EngineFeature
from jax_paged.errors import ArgumentError
from jax_paged.inputs import Prompt
from jax_paged.sampling_params import SamplingParams


class PinnedPrefixes(EngineFeature):
    """Methods of LLMEngine that pin prefixes in the KV cache. Only full blocks are pinned."""

    def pin_prefix(self, prompt: Prompt, *, cache_salt: str = "") -> str:
        """Computes a prefix and keeps its full blocks in the KV cache until it is unpinned.

        Args:
            prompt: A prompt, in any form that `check_request` accepts.
            cache_salt: The cache salt of the requests that will share the prefix.

        Returns:
            A name for `unpin_prefix`.

        Raises:
            ValueError: If the prefix does not fit into the KV cache, or prefix caching is disabled.
            RuntimeError: If requests are running.
        """
        self._core.check_can_run()
        return self._pin(prompt, cache_salt, self._core.new_name("prefix"))

    def unpin_prefix(self, name: str) -> None:
        """Unpins a prefix. Its blocks stay cached until they are evicted.

        Args:
            name: The name that pin_prefix returned.

        Raises:
            ValueError: If no prefix is pinned under this name.
        """
        self._core.scheduler.block_manager.unpin(name)

    def _pin(self, prompt: Prompt, cache_salt: str, name: str) -> str:
        """Computes a prefix, pins it under the given name, and returns the name."""
        if not self._core.wait_if_idle():
            raise RuntimeError("requests are running; pin prefixes before or after them")
        manager = self._core.scheduler.block_manager
        if not manager.enable_prefix_caching:
            raise ArgumentError("enable_prefix_caching", False, "True to pin prefixes")
        if self._core.config.decoder_start_token_id is not None:
            raise ValueError("prefixes of encoder-decoder models can't be pinned because they are not shared")
        params = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
        checked = self.input_processor.check(prompt, params, cache_salt)
        request = checked.request
        if request.prompt_embeds is not None:
            raise ArgumentError("prompt", "prompt_embeds", "tokens because embeddings can't be pinned")
        if request.placeholder_data:
            raise ArgumentError("prompt", "multi_modal_data", "tokens because images can't be pinned")
        if len(request.prompt_token_ids) < manager.block_size:
            allowed = f"at least {manager.block_size} (block_size) because only full blocks are shared"
            num_tokens, aspect = len(request.prompt_token_ids), "the number of tokens of"
            raise ArgumentError("prompt", num_tokens, allowed, aspect=aspect)
        (state,) = self._core.run_to_end({name: checked})
        seq = state.group.sequences[0]
        if not seq.output_token_ids or seq.status is SequenceStatus.FINISHED_ABORTED:
            num_free, num_usable = manager.num_free_blocks, manager.num_usable_blocks
            raise ValueError(
                f"the prefix could not be computed: {seq.stop_reason or 'it was aborted'}. Its logits must "
                f"be finite, and it must fit into the free KV blocks ({num_free} of {num_usable})"
            )
        # For a model with recurrent layers, a pinned prefix also needs a slot that holds the recurrent state
        # at the end of a block.
        if not manager.pin(name, request.prompt_token_ids, cache_salt):
            manager.unpin(name)
            num_tokens, aspect = len(request.prompt_token_ids), "the number of tokens of"
            allowed = f"more than {manager.block_size} (block_size), and a recurrent state slot must be free"
            raise ArgumentError("prompt", num_tokens, allowed, aspect=aspect)
        return name

    def _forget_prefixes(self, kept_salt: str | None) -> None:
        """Drops all cached prefixes, and recomputes the pinned ones with the current weights.

        Args:
            kept_salt: See EngineFeature._forget_prefixes.

        Raises:
            ValueError: If a pinned prefix can't be recomputed. Such a prefix is no longer pinned.
        """
        core, problems = self._core, list[str]()
        manager, changed = core.scheduler.block_manager, core.take_changed()
        pinned = dict(manager.pinned)
        for name in pinned:
            manager.unpin(name)
        super()._forget_prefixes(kept_salt)
        for name, prefix in pinned.items():
            try:
                self._pin(prefix.token_ids, prefix.salt, name)
            except ValueError as error:
                problems.append(f"prefix {name!r} is no longer pinned: {error}")
        core.changed |= dict.fromkeys(changed)
        if problems:
            raise ValueError("\n".join(problems))
