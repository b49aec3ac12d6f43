"""LoRA methods of LLMEngine, and adapter weights for the steps that load adapters."""

import dataclasses
from collections.abc import Mapping

from jax_paged.core.scheduler_output import SchedulerOutput
from jax_paged.engine.feature import EngineFeature
from jax_paged.engine.output_processor import RequestState
from jax_paged.engine.synchronized import unsynchronized
from jax_paged.lora_request import LoRARequest


class LoRAMethods(EngineFeature):
    """Methods of LLMEngine for LoRA adapters. They may run while another thread runs a step."""

    @unsynchronized
    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Reads an adapter before any request uses it, and keeps it in host memory until it is removed.

        Returns:
            True if the adapter was added, False if it had already been added.

        Raises:
            ValueError: If the adapter does not fit the model, if its id belongs to another adapter, or if
                max_cpu_loras adapters have already been added.
        """
        self._core.check_can_run()
        return self.input_processor.adapters.add(lora_request)

    @unsynchronized
    def remove_lora(self, lora_id: int) -> bool:
        """Removes an adapter and frees its id. Requests that already use the adapter are not affected.

        Returns:
            True if the adapter was known.
        """
        self._core.check_not_closed()
        return self.input_processor.adapters.remove(lora_id)

    @unsynchronized
    def list_loras(self) -> set[int]:
        """Returns the ids of the adapters in host memory."""
        return self.input_processor.adapters.ids


def with_adapters(output: SchedulerOutput, requests: Mapping[str, RequestState]) -> SchedulerOutput:
    """Returns a step with the weights of the adapters that it loads to the device.

    Args:
        output: The step, as scheduled.
        requests: The engine's unfinished requests by id, which hold their adapters.
    """
    known = {s.adapter.key: s.adapter for s in requests.values() if s.adapter is not None}
    loads = [load._replace(weights=known[load.adapter]) for load in output.adapter_loads]
    return dataclasses.replace(output, adapter_loads=tuple(loads))
