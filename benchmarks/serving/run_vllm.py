"""The CPU build of vLLM as a process that runs scenarios."""

import itertools

import vllm
from vllm.sampling_params import RequestOutputKind

from serving import runner
from serving.runner import Answer, Settings
from serving.workloads import Request


class Engine(runner.Engine):
    """vLLM's engine."""

    def __init__(self, settings: Settings) -> None:
        arguments = {
            "model": settings.model,
            "dtype": settings.dtype,
            "skip_tokenizer_init": True,
            "max_model_len": runner.MAX_MODEL_LEN,
            "max_num_seqs": runner.MAX_NUM_SEQS,
            "max_num_batched_tokens": 2048,
            "block_size": 32,
            "disable_log_stats": True,
        }
        self._engine = vllm.LLM(**{**arguments, **settings.arguments}).llm_engine
        self._runs = itertools.count()

    def __call__(self, requests: list[Request], prefix_caching: bool) -> list[Answer]:
        """Runs requests. A cache salt prevents them from using prefixes that earlier calls have cached."""
        salt = str(next(self._runs))

        def add(i: int, request: Request) -> None:
            params = vllm.SamplingParams(
                temperature=0.0,
                max_tokens=request.max_tokens,
                ignore_eos=True,
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
            )
            prompt = {"prompt_token_ids": request.prompt, "cache_salt": salt}
            self._engine.add_request(str(i), prompt, params)

        def step() -> list[tuple[int, list[int]]]:
            return [(int(out.request_id), list(out.outputs[0].token_ids)) for out in self._engine.step()]

        return runner.drive(requests, add, step)


if __name__ == "__main__":
    runner.main(Engine, vllm.__version__)
