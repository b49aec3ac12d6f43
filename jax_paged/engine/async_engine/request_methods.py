"""The methods that AsyncLLMEngine and ReplicatedEngine have in common."""

import abc
import asyncio
from collections.abc import AsyncGenerator
from typing import Self

from jax_paged.config.engine_args import EngineArgs
from jax_paged.engine.async_engine.request_stream import CumulativeOutputs, RequestStream
from jax_paged.engine.input_processor import CheckedRequest, RequestParams
from jax_paged.engine.llm_engine import LLMEngine
from jax_paged.inputs import Prompt
from jax_paged.lora_request import LoRARequest
from jax_paged.outputs import PoolingOutput, PoolingRequestOutput, RequestOutput
from jax_paged.pooling_params import PoolingParams
from jax_paged.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams


class RequestMethods(abc.ABC):
    """The methods of AsyncLLMEngine and ReplicatedEngine that are the same for one engine and for several.

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

    async def submit(
        self,
        prompt: Prompt | CheckedRequest,
        sampling_params: RequestParams,
        request_id: str,
        *,
        cache_salt: str = "",
        priority: int = 0,
        lora_request: LoRARequest | None = None,
        whole: bool = False,
    ) -> RequestStream:
        """Starts a request.

        Args:
            prompt: As LLMEngine.check_request takes it, with sampling_params, cache_salt, priority and
                lora_request; or the CheckedRequest that it returned, which holds all of them.
            sampling_params: As LLMEngine.check_request takes it.
            request_id: No unfinished request may have the same.
            cache_salt: As LLMEngine.check_request takes it.
            priority: As LLMEngine.check_request takes it.
            lora_request: As LLMEngine.check_request takes it.
            whole: Whether to give a single output, at the end; tokens then cost nothing on their way.

        Returns:
            The stream of its outputs. If the id is taken, it raises ValueError when iterated.

        Raises:
            ValueError: If the engine can't run it.
            EngineAsleepError: If the engine sleeps; in the last moment, the stream raises it.
            EngineDeadError: If the engine has failed or is closed.
        """
        if not isinstance(prompt, CheckedRequest):
            prompt = await asyncio.to_thread(
                self.engine.check_request,
                prompt,
                sampling_params,
                cache_salt=cache_salt,
                priority=priority,
                lora_request=lora_request,
            )
        return self.start(prompt, request_id, whole=whole)

    @abc.abstractmethod
    def start(self, request: CheckedRequest, request_id: str, *, whole: bool) -> RequestStream:
        """Starts a request that was checked; see `submit`."""

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
        pooling = self.engine.input_processor.pooling
        params = pooling.resolved(pooling_params)
        stream = await self.submit(prompt, params, request_id, priority=priority, whole=True)
        try:
            async for output in stream:
                yield PoolingRequestOutput(
                    request_id=request_id,
                    outputs=PoolingOutput(pooling.data_of(output, params)),
                    prompt_token_ids=output.prompt_token_ids,
                    num_cached_tokens=output.num_cached_tokens,
                )
        finally:
            stream.abort()

    async def is_sleeping(self) -> bool:
        """Returns whether the engine sleeps, in whole or in part; several engines never do."""
        return self.engine.is_sleeping()

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Reads an adapter ahead of its requests, as LLMEngine.add_lora does, beside the event loop."""
        return await asyncio.to_thread(self.engine.add_lora, lora_request)

    async def remove_lora(self, lora_id: int) -> bool:
        """Forgets an adapter, as LLMEngine.remove_lora does."""
        return self.engine.remove_lora(lora_id)

    @abc.abstractmethod
    def close(self) -> None:
        """Ends all requests, and frees weights and pool."""

    def shutdown(self) -> None:
        """Does what `close` does; the name that vLLM's scripts use."""
        self.close()
