"""Adapters in an engine: the methods of LLMEngine, and the weights that a step loads."""

import dataclasses
from collections.abc import Mapping

from jax_paged.core.scheduler_output import SchedulerOutput
from jax_paged.engine.feature import EngineFeature
from jax_paged.engine.output_processor import RequestState
from jax_paged.engine.serialized import any_thread
from jax_paged.lora_request import LoRARequest


class LoRAMethods(EngineFeature):
    """Methods of LLMEngine for its adapters. They do not wait for the calls of other threads."""

    @any_thread
    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Reads an adapter ahead of its requests, and keeps it in host memory until it is removed.

        Like the two that follow, it does not wait for calls of other threads.

        Returns:
            Whether it was not added before.

        Raises:
            ValueError: If it does not fit the model, if its id is another adapter's, or if max_cpu_loras
                adapters were added.
        """
        self._core.check_open()
        return self.input_processor.adapters.add(lora_request)

    @any_thread
    def remove_lora(self, lora_id: int) -> bool:
        """Forgets an adapter, and what its id stands for; requests that have it go on with it.

        Returns:
            Whether there was one.
        """
        self._core.check_not_closed()
        return self.input_processor.adapters.remove(lora_id)

    @any_thread
    def list_loras(self) -> set[int]:
        """Returns the ids of the adapters in host memory."""
        return self.input_processor.adapters.ids


def with_adapters(output: SchedulerOutput, requests: Mapping[str, RequestState]) -> SchedulerOutput:
    """Returns a step with the weights of the adapters that it loads; the engine's requests hold them."""
    known = {s.adapter.key: s.adapter for s in requests.values() if s.adapter is not None}
    loads = [load._replace(weights=known[load.adapter]) for load in output.adapter_loads]
    return dataclasses.replace(output, adapter_loads=tuple(loads))
