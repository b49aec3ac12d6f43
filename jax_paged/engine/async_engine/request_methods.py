"""RequestMethods: the methods that AsyncLLMEngine and ReplicatedEngine have in common."""

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
    """Base class of AsyncLLMEngine and ReplicatedEngine, with the methods that run requests.

    Args:
        args: Model and limits.

    Attributes:
        engine: Checks requests and has the configuration of the model. The first engine if there are several.
    """

    engine: LLMEngine

    @abc.abstractmethod
    def __init__(self, args: EngineArgs) -> None: ...

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:
        """Makes an engine. vLLM's scripts use this name."""
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
        final_only: bool = False,
    ) -> RequestStream:
        """Checks a request and starts it.

        Args:
            prompt: A prompt, or the result of LLMEngine.check_request. In the second case, sampling_params,
                cache_salt, priority and lora_request are ignored, because the result already contains them.
            sampling_params: See LLMEngine.check_request.
            request_id: The id of the request. Must differ from the ids of all unfinished requests.
            cache_salt: See LLMEngine.check_request.
            priority: See LLMEngine.check_request.
            lora_request: See LLMEngine.check_request.
            final_only: Whether the stream has a single output, at the end. This saves the cost of delivering
                tokens.

        Returns:
            The stream of the request's outputs. If the id is taken, iterating the stream raises ValueError.

        Raises:
            ValueError: If the engine can't run the request.
            EngineAsleepError: If the engine sleeps. The stream raises this error if the engine falls asleep
                after the request was checked.
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
        return self.start(prompt, request_id, final_only=final_only)

    @abc.abstractmethod
    def start(self, request: CheckedRequest, request_id: str, *, final_only: bool) -> RequestStream:
        """Starts a request that has been checked; see `submit`."""

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
        """Runs a request and yields its outputs. Leaving the loop early aborts the request.

        Args:
            prompt: See LLMEngine.check_request.
            sampling_params: See LLMEngine.check_request. The output_kind determines what each output
                contains.
            request_id: The id of the request. Must differ from the ids of all unfinished requests.
            lora_request: See LLMEngine.check_request.
            cache_salt: See LLMEngine.check_request.
            priority: See LLMEngine.check_request.

        Raises:
            ValueError: If the engine can't run the request.
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
            final_only=kind is RequestOutputKind.FINAL_ONLY,
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
        """Pools a prompt and yields a single output. Leaving the loop early aborts the request.

        Args:
            prompt: See LLMEngine.check_request.
            pooling_params: The task and its parameters. Without a task, the model's first task is used.
            request_id: The id of the request. Must differ from the ids of all unfinished requests.
            priority: See LLMEngine.check_request.

        Raises:
            ValueError: If the model does not support the task, or the engine can't run the request.
            EngineDeadError: If the engine has failed or is closed.
        """
        pooling = self.engine.input_processor.pooling
        params = pooling.resolve(pooling_params)
        stream = await self.submit(prompt, params, request_id, priority=priority, final_only=True)
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
        """Returns whether the engine sleeps, at least in part.

        Always False for a ReplicatedEngine, which does not support sleep mode.
        """
        return self.engine.is_sleeping()

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Reads an adapter before requests need it; see LLMEngine.add_lora. Does not block the event loop."""
        return await asyncio.to_thread(self.engine.add_lora, lora_request)

    async def remove_lora(self, lora_id: int) -> bool:
        """Removes an adapter; see LLMEngine.remove_lora."""
        return self.engine.remove_lora(lora_id)

    @abc.abstractmethod
    def close(self) -> None:
        """Ends all requests. Frees the weights and the KV cache."""

    def shutdown(self) -> None:
        """Does what `close` does. vLLM's scripts use this name."""
        self.close()
