"""An executor that draws any of the tokens that a step's masks allow, in place of a model."""

import random
from typing import Any

import numpy as np
from helpers.scripted_engine import VOCAB_SIZE, ScriptedExecutor

from jax_paged.core.model_runner_output import NO_TOKEN, ModelRunnerOutput, TokenLogprobs


class RandomExecutor(ScriptedExecutor):
    """Draws tokens that have a mask from it, all others from those of the byte tokenizer."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._rng = random.Random(0)

    def result(self) -> ModelRunnerOutput:
        output = self._dispatched.popleft()
        self._take_seats(output)
        allowed: dict[int, list[int]] = {}
        if output.token_masks is not None:
            rows, words = output.token_masks
            bits = np.frombuffer(words, np.uint8).reshape(len(rows), -1)
            masks = np.unpackbits(bits, axis=1, bitorder="little")[:, :VOCAB_SIZE]
            allowed = {row: np.flatnonzero(mask).tolist() for row, mask in zip(rows, masks, strict=True)}
        assert all(sample.num_logits == 1 for sample in output.samples)
        token_ids = []
        for row in range(len(output.samples)):
            some = allowed.get(row, range(3, 259))
            token_ids.append([self._rng.choice(some) if some else NO_TOKEN])
        return ModelRunnerOutput(
            step_id=output.step_id,
            token_ids=token_ids,
            logprobs=[[TokenLogprobs(-1.0, 1, [], [])] for _ in token_ids],
            is_finite=[True] * len(output.scheduled),
            prompt_logprobs=[[] for _ in output.scheduled],
        )
