"""Streams answers of several requests as they are generated: python async_streaming.py MODEL"""

import asyncio
import sys

from vllm import AsyncEngineArgs, AsyncLLMEngine, SamplingParams
from vllm.sampling_params import RequestOutputKind


async def stream(engine, request_id, prompt):
    pieces = []
    params = SamplingParams(temperature=0, max_tokens=32, output_kind=RequestOutputKind.DELTA)
    async for output in engine.generate(prompt=prompt, sampling_params=params, request_id=request_id):
        pieces.append(output.outputs[0].text)
        if output.finished:
            break
    return "".join(pieces)


async def whole(engine, request_id, prompt, kind):
    params = SamplingParams(temperature=0, max_tokens=32, output_kind=kind)
    outputs = [o async for o in engine.generate(prompt, params, request_id)]
    return len(outputs), outputs[-1].outputs[0].text


async def aborted(engine, request_id, prompt):
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    reason = None
    async for output in engine.generate(prompt, params, request_id):
        await engine.abort(request_id)
        reason = output.outputs[0].finish_reason
    return reason


async def main():
    args = AsyncEngineArgs(
        model=sys.argv[1], max_model_len=256, max_num_seqs=8, max_num_batched_tokens=64, enforce_eager=True
    )
    engine = AsyncLLMEngine.from_engine_args(args)
    try:
        prompts = {"a": "def close(self):\n", "b": {"prompt": "import sys\n"}}
        texts = await asyncio.gather(*(stream(engine, *item) for item in prompts.items()))
        for text in texts:
            print(f"streamed: {text!r}")
        num_outputs, text = await whole(engine, "c", prompts["a"], RequestOutputKind.FINAL_ONLY)
        print(f"in {num_outputs} output: {text == texts[0]}")
        num_outputs, text = await whole(engine, "d", prompts["a"], RequestOutputKind.CUMULATIVE)
        print(f"cumulative: {text == texts[0]}")
        print("aborted:", await aborted(engine, "e", prompts["a"]))
    finally:
        engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
