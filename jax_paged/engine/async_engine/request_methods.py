"""What asyncio asks of engines, whether there is one or several: outputs as they grow."""

import abc
from collections.abc import AsyncGenerator
from typing import Self

from jax_paged.config.engine_args import EngineArgs
from jax_paged.engine.async_engine.request_stream import CumulativeOutputs, RequestStream
from jax_paged.engine.features import pooling
from jax_paged.engine.input_processor import CheckedRequest
from jax_paged.engine.llm_engine import LLMEngine
from jax_paged.inputs import Prompt
from jax_paged.lora_request import LoRARequest
from jax_paged.outputs import PoolingOutput, PoolingRequestOutput, RequestOutput
from jax_paged.pooling_params import PoolingParams
from jax_paged.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams


class RequestMethods(abc.ABC):
    """The methods of AsyncLLMEngine and ReplicatedEngine that run a request through `submit`.

    Args:
        args: Model and limits.

    Attributes:
        engine: Checks requests, and says what the model is; the first of several.
    """

    engine: LLMEngine

    @abc.abstractmethod
    def __init__(self, args: EngineArgs) -> None: ...

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:
        """Makes an engine; the name that vLLM's scripts use."""
        return cls(engine_args)

    @abc.abstractmethod
    async def submit(
        self,
        prompt: Prompt | CheckedRequest,
        sampling_params: SamplingParams | BeamSearchParams | PoolingParams | None,
        request_id: str,
        *,
        cache_salt: str = "",
        priority: int = 0,
        lora_request: LoRARequest | None = None,
        whole: bool = False,
    ) -> RequestStream:
        """Starts a request; returns the stream of its outputs."""

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | BeamSearchParams | None,
        request_id: str,
        lora_request: LoRARequest | None = None,
        *,
        cache_salt: str = "",
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput]:
        """Runs a request; what each output holds is output_kind's choice. Leaving the loop early aborts it.

        Args:
            prompt: As LLMEngine.check_request takes it.
            sampling_params: As LLMEngine.check_request takes it.
            request_id: No unfinished request may have the same.
            lora_request: As LLMEngine.check_request takes it.
            cache_salt: As LLMEngine.check_request takes it.
            priority: As LLMEngine.check_request takes it.

        Raises:
            ValueError: If the engine can't run it.
            EngineDeadError: If the engine has failed or is closed.
        """
        kind = sampling_params.output_kind if isinstance(sampling_params, SamplingParams) else None
        stream = await self.submit(
            prompt,
            sampling_params,
            request_id,
            cache_salt=cache_salt,
            priority=priority,
            lora_request=lora_request,
            whole=kind is RequestOutputKind.FINAL_ONLY,
        )
        outputs = CumulativeOutputs()
        try:
            async for part in stream:
                yield part if kind is RequestOutputKind.DELTA else outputs.add(part)
        finally:
            stream.abort()

    async def encode(
        self, prompt: Prompt, pooling_params: PoolingParams, request_id: str, *, priority: int = 0
    ) -> AsyncGenerator[PoolingRequestOutput[PoolingOutput]]:
        """Pools a prompt; the only output is the last. Leaving the loop early aborts it.

        Args:
            prompt: As LLMEngine.check_request takes it.
            pooling_params: What to make of it; without a task it is the model's first.
            request_id: No unfinished request may have the same.
            priority: As LLMEngine.check_request takes it.

        Raises:
            ValueError: If the model can't do it, or the engine can't run it.
            EngineDeadError: If the engine has failed or is closed.
        """
        config = self.engine.config
        params = pooling.resolved(pooling_params, None, config)
        stream = await self.submit(prompt, params, request_id, priority=priority, whole=True)
        assert config.pooling is not None, "it can pool"
        try:
            async for output in stream:
                data = pooling.data_of(output, params, config.pooling)
                facts = output.prompt_token_ids, output.num_cached_tokens
                yield PoolingRequestOutput(request_id, PoolingOutput(data), *facts)
        finally:
            stream.abort()

    @abc.abstractmethod
    def close(self) -> None:
        """Ends all requests, and frees weights and pool."""

    def shutdown(self) -> None:
        """Does what `close` does; the name that vLLM's scripts use."""
        self.close()
