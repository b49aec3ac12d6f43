"""OpenVINO GenAI's pipeline with continuous batching as a process that runs scenarios."""

import os
from typing import Any

import numpy as np
import openvino_genai
from openvino import Core, Tensor

from serving import runner
from serving.runner import Answer, Settings
from serving.workloads import Request

PRECISION = {"float32": "f32", "bfloat16": "bf16"}


class Engine(runner.Engine):
    """A pipeline. It is created again to switch prefix caching, which cannot be changed afterwards."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._pipeline: Any = None
        self._caches_prefixes = False

    def __call__(self, requests: list[Request], prefix_caching: bool) -> list[Answer]:
        """Runs requests. With prefix caching, their prompts must differ from the prompts of earlier calls."""
        if self._pipeline is None or self._caches_prefixes != prefix_caching:
            self._pipeline = None
            self._pipeline = self._make(prefix_caching)
            self._caches_prefixes = prefix_caching
            self._run([Request([300] * 8, 4)])
        return self._run(requests)

    def _make(self, prefix_caching: bool) -> Any:
        config = openvino_genai.SchedulerConfig()
        config.max_num_batched_tokens = 256
        config.max_num_seqs = runner.MAX_NUM_SEQS
        config.cache_size = runner.POOL_GIB
        config.enable_prefix_caching = prefix_caching
        config.dynamic_split_fuse = True
        precision = PRECISION[self._settings.dtype]
        if precision == "bf16" and "BF16" not in Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
            precision = (
                "f32"  # OpenVINO rejects a bfloat16 cache if the processor cannot compute in bfloat16.
            )
        properties = {
            "INFERENCE_PRECISION_HINT": precision,
            "KV_CACHE_PRECISION": precision,
            "INFERENCE_NUM_THREADS": len(os.sched_getaffinity(0)),
        }
        for name, value in self._settings.arguments.items():
            if name.isupper():
                properties[name] = value
            else:
                setattr(config, name, value)
        return openvino_genai.ContinuousBatchingPipeline(self._settings.model, config, "CPU", properties)

    def _run(self, requests: list[Request]) -> list[Answer]:
        handles = {}

        def add(i: int, request: Request) -> None:
            config = openvino_genai.GenerationConfig()
            config.max_new_tokens = request.max_tokens
            config.ignore_eos = True
            config.do_sample = False
            prompt = Tensor(np.array([request.prompt], dtype=np.int64))
            handles[i] = self._pipeline.add_request(i, prompt, config)

        def step() -> list[tuple[int, list[int]]]:
            self._pipeline.step()
            return [
                (i, list(output.generated_ids))
                for i, handle in handles.items()
                if handle.can_read()
                for output in handle.read().values()
            ]

        return runner.drive(requests, add, step)


if __name__ == "__main__":
    runner.main(Engine, openvino_genai.__version__)
