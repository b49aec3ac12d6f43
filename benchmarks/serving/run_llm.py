"""`LLM.generate` as a process that runs scenarios. Unlike the other engines, it detokenizes the outputs."""

import itertools
import time

import jax

from jax_paged import LLM, SamplingParams
from serving import runner
from serving.runner import Answer, Settings
from serving.workloads import Request


class Engine(runner.Engine):
    """`LLM` with its defaults for scripts. It compiles programs in the background until `settle` returns."""

    def __init__(self, settings: Settings) -> None:
        arguments = {
            "dtype": settings.dtype,
            "max_model_len": runner.MAX_MODEL_LEN,
            "max_num_seqs": runner.MAX_NUM_SEQS,
            "kv_cache_memory_bytes": runner.OUR_POOL_BYTES,
        }
        self._llm = LLM(settings.model, **{**arguments, **settings.arguments})
        self._runs = itertools.count()

    def __call__(self, requests: list[Request], prefix_caching: bool) -> list[Answer]:
        """Runs requests that all arrive at once. Only the times of their first and last tokens are known.

        A cache salt prevents them from using prefixes that earlier calls have cached.

        Raises:
            ValueError: If a request has a later arrival time.
        """
        if any(request.arrival_s for request in requests):
            raise ValueError("all requests must arrive at once for LLM.generate")
        salt = str(next(self._runs))
        prompts = [{"prompt_token_ids": request.prompt, "cache_salt": salt} for request in requests]
        params = [
            SamplingParams(temperature=0.0, max_tokens=request.max_tokens, ignore_eos=True)
            for request in requests
        ]
        start = time.monotonic()
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        answers = []
        for output in outputs:
            times, tokens = output.metrics, list(output.outputs[0].token_ids)
            assert times.first_token_time is not None, "every request gets a token"
            assert times.finished_time is not None, "every request has ended"
            answers.append(
                Answer(tokens, len(tokens), [times.first_token_time - start, times.finished_time - start])
            )
        return answers

    def settle(self) -> None:
        """Waits until all programs are compiled."""
        self._llm.llm_engine.executor.wait_until_compiled()


if __name__ == "__main__":
    runner.main(Engine, f"jax {jax.__version__}")
