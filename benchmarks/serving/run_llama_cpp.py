"""llama.cpp, by its bindings for Python, as a process that runs scenarios."""

import ctypes
import os
from dataclasses import dataclass, field
from typing import Any

import llama_cpp
import llama_cpp.llama_cpp as api
import numpy as np

from serving import runner
from serving.runner import Answer, Settings
from serving.workloads import Request

BATCH_TOKENS = 2048  # llama.cpp's default


@dataclass
class _Sequence:
    """State of a request.

    Args:
        pending: Tokens that are not in the cache yet: the rest of the prompt, or the last output token.
        num_left: Number of output tokens that are missing.
        num_cached: Number of tokens in the cache.
        in_prompt: Whether there is no output token yet.
    """

    pending: list[int]
    num_left: int
    num_cached: int = 0
    in_prompt: bool = True


class Engine(runner.Engine):
    """A model. Each call gets a context of its own, whose cache is as large as the requests need.

    Such a cache is divided among the sequences, as in llama-batched-bench, because a unified one is slower.
    """

    def __init__(self, settings: Settings) -> None:
        api.llama_backend_init()
        self._model: Any = api.llama_model_load_from_file(
            settings.model.encode(), api.llama_model_default_params()
        )
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {settings.model}")
        self._arguments = settings.arguments
        self._vocab_size = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self._model))
        self._batch = api.llama_batch_init(BATCH_TOKENS, 0, 1)
        self._context: Any = None

    def __call__(self, requests: list[Request], prefix_caching: bool) -> list[Answer]:
        """Runs requests.

        Raises:
            ValueError: If prefixes are to be cached, which this loop cannot do.
        """
        if prefix_caching:
            raise ValueError("the scenario must not share prefixes for llama.cpp")
        if self._context:
            api.llama_free(self._context)
        self._context = self._new_context(requests)
        run = _Run(self._context, self._batch, self._vocab_size)
        return runner.drive(requests, run.add, run.step)

    def _new_context(self, requests: list[Request]) -> Any:
        params = api.llama_context_default_params()
        longest = max(len(request.prompt) + request.max_tokens for request in requests)
        num_threads = len(os.sched_getaffinity(0))
        settings = {
            "n_ctx": len(requests) * (-(-longest // 256) * 256),  # llama.cpp rounds up, too
            "n_batch": BATCH_TOKENS,
            "n_seq_max": len(requests),
            "n_threads": num_threads,
            "n_threads_batch": num_threads,
            "kv_unified": False,
            **self._arguments,
        }
        for name, value in settings.items():
            setattr(params, name, value)
        return api.llama_init_from_model(self._model, params)


@dataclass
class _Run:
    """Continuous batching of requests.

    Prompts and output tokens are in different batches, and prompts go first, as in llama-batched-bench.
    """

    context: Any
    batch: Any
    vocab_size: int
    sequences: dict[int, _Sequence] = field(default_factory=dict)

    def add(self, i: int, request: Request) -> None:
        """Starts a request."""
        self.sequences[i] = _Sequence(list(request.prompt), request.max_tokens)

    def step(self) -> list[tuple[int, list[int]]]:
        """Runs a batch and returns the next tokens of the sequences that have no pending ones left."""
        prompts = {i: sequence for i, sequence in self.sequences.items() if sequence.in_prompt}
        rows = self._fill(prompts or self.sequences)
        code = api.llama_decode(self.context, self.batch)
        if code:
            raise RuntimeError(f"llama_decode returned {code}")
        found = []
        for i, row in rows.items():
            logits = api.llama_get_logits_ith(self.context, row)
            address = ctypes.cast(logits, ctypes.POINTER(ctypes.c_float))
            token = int(np.ctypeslib.as_array(address, (self.vocab_size,)).argmax())
            sequence = self.sequences[i]
            sequence.pending, sequence.in_prompt = [token], False
            sequence.num_left -= 1
            if not sequence.num_left:
                del self.sequences[i]
            found.append((i, [token]))
        return found

    def _fill(self, sequences: dict[int, _Sequence]) -> dict[int, int]:
        """Fills the batch with pending tokens and returns the row of each sequence's last one."""
        batch, rows, size = self.batch, {}, 0
        for i, sequence in sequences.items():
            count = min(len(sequence.pending), BATCH_TOKENS - size)
            for token in sequence.pending[:count]:
                batch.token[size], batch.pos[size] = token, sequence.num_cached
                batch.n_seq_id[size], batch.seq_id[size][0], batch.logits[size] = 1, i, False
                sequence.num_cached += 1
                size += 1
            del sequence.pending[:count]
            if count and not sequence.pending:
                batch.logits[size - 1] = True
                rows[i] = size - 1
        batch.n_tokens = size
        return rows


if __name__ == "__main__":
    runner.main(Engine, f"llama-cpp-python {llama_cpp.__version__}")
