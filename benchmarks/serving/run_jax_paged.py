"""jax-paged's `LLMEngine` as a process that runs scenarios."""

import itertools

import jax

from jax_paged import EngineArgs, LLMEngine, SamplingParams
from jax_paged.sampling_params import RequestOutputKind
from serving import runner
from serving.runner import Answer, Settings
from serving.workloads import Request


class Engine(runner.Engine):
    """An engine. It compiles programs in the background until `settle` returns."""

    def __init__(self, settings: Settings) -> None:
        arguments = {
            "model": settings.model,
            "dtype": settings.dtype,
            "skip_tokenizer_init": True,
            "max_model_len": runner.MAX_MODEL_LEN,
            "max_num_seqs": runner.MAX_NUM_SEQS,
            "kv_cache_memory_bytes": runner.OUR_POOL_BYTES,
        }
        self._engine = LLMEngine(EngineArgs(**{**arguments, **settings.arguments}))
        self._runs = itertools.count()

    def __call__(self, requests: list[Request], prefix_caching: bool) -> list[Answer]:
        """Runs requests. A cache salt prevents them from using prefixes that earlier calls have cached."""
        salt = str(next(self._runs))

        def add(i: int, request: Request) -> None:
            params = SamplingParams(
                temperature=0.0,
                max_tokens=request.max_tokens,
                ignore_eos=True,
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
            )
            self._engine.add_request(str(i), request.prompt, params, cache_salt=salt)

        def step() -> list[tuple[int, list[int]]]:
            return [(int(out.request_id), list(out.outputs[0].token_ids)) for out in self._engine.step()]

        return runner.drive(requests, add, step)

    def settle(self) -> None:
        """Waits until all programs are compiled."""
        self._engine.executor.wait_until_compiled()


if __name__ == "__main__":
    runner.main(Engine, f"jax {jax.__version__}")
