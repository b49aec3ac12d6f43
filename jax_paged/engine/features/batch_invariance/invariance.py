"""Start-up check that an engine's results do not depend on the batch. It runs the engine's own programs."""

import random

from jax_paged.engine.engine_core import EngineCore
from jax_paged.engine.input_processor import InputProcessor
from jax_paged.sampling_params import SamplingParams


class NotInvariantError(ValueError):
    """Error of an engine whose results depend on the batch although `batch_invariant` is True."""


NUM_PROMPT_TOKENS, NUM_OUTPUT_TOKENS = 24, 4


def check_invariance(core: EngineCore, inputs: InputProcessor) -> None:
    """Generates the same tokens in three ways and checks that tokens and log-probabilities are bitwise equal.

    The tokens of a random prompt are decoded alone, decoded in a batch with two other prompts, and (except
    for encoder-decoder models) computed one by one by prefilling the prompt and the previous output tokens.

    Args:
        core: An engine core without requests. The check leaves only a few unused cached blocks behind.
        inputs: Checks the requests.

    Raises:
        NotInvariantError: If any result differs.
    """
    config, rng = core.config, random.Random(0)
    most = min(config.max_model_len, (config.num_blocks - 1) * config.block_size // 4)
    num_prompt, num_output = min(NUM_PROMPT_TOKENS, most // 2), min(NUM_OUTPUT_TOKENS, most // 4)
    if num_output < 1:
        return  # The limits allow no request with a second token.
    # Random prompts must not contain image placeholders. The model may still generate one.
    placeholder = config.images and config.images.spec.token_id
    token_ids = [token_id for token_id in range(config.vocab_size) if token_id != placeholder]
    prompts = [rng.choices(token_ids, k=num_prompt) for _ in range(3)]
    (alone,) = _next_tokens(core, inputs, prompts[:1], num_output)
    results = [_next_tokens(core, inputs, prompts[::-1], num_output)[-1]]
    if config.decoder_start_token_id is None:
        texts = [prompts[0] + [token for token, _ in alone[:i]] for i in range(num_output)]
        texts = [text for text in texts if placeholder not in text]
        results.append([token for text in texts for token in _next_tokens(core, inputs, [text], 1)[0]])
    if any(result != alone[: len(result)] for result in results):
        raise NotInvariantError(
            "`batch_invariant` must be False for this model on this machine because results depend on the "
            "batch, got True"
        )


def _next_tokens(
    core: EngineCore, inputs: InputProcessor, prompts: list[list[int]], num_tokens: int
) -> list[list[tuple[int, float]]]:
    """Returns the tokens after each prompt with their log-probabilities, without using the prefix cache."""
    params = SamplingParams(
        temperature=0, max_tokens=num_tokens, logprobs=0, ignore_eos=True, detokenize=False
    )
    requests = {
        f"batch_invariant {i}": inputs.check(
            {"prompt_token_ids": prompt}, params, f"batch_invariant {len(prompts)} {len(prompt)} {i}"
        )
        for i, prompt in enumerate(prompts)
    }
    results = []
    for state in core.run_to_end(requests):
        completion = state.output().outputs[0]
        pairs = zip(completion.token_ids, completion.logprobs or [], strict=True)
        results.append([(token, entry[token].logprob) for token, entry in pairs])
    return results
