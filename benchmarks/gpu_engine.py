"""Engine sections of gpu_check: exactness, accuracy with the Pallas kernels, throughput of Llamas."""

import math
import random
import time
from collections.abc import Iterator
from typing import Any

Report = dict[str, Any]

SMALL: Report = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    # With the usual value of 0.02, nearly all steps would produce the same token.
    "initializer_range": 0.1,
}
LLAMA3: Report = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
}
LLAMA_1B: Report = LLAMA3 | {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "head_dim": 64,
    "tie_word_embeddings": True,
}
LLAMA_8B: Report = LLAMA3 | {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "head_dim": 128,
}


def exactness(tiny: bool) -> Iterator[Report]:
    """Compares greedy float32 tokens of the engine with a dense forward pass.

    The requests run in batches, with cached prefixes, one at a time, and in a pool so small that requests are
    preempted. Yields one result for each of these.
    """
    from jax_paged.models.weights import random_model

    loaded = random_model(SMALL, "float32")
    rng = random.Random(0)
    prefix = [rng.randrange(512) for _ in range(48)]
    requests = []
    for i in range(16 if tiny else 64):
        tail = [rng.randrange(512) for _ in range(rng.choice([1, 15, 16, 17, 100, rng.randint(1, 150)]))]
        requests.append((prefix + tail if i % 2 else tail, rng.randint(8, 48)))
    longest = max(len(prompt) + num_tokens for prompt, num_tokens in requests)
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 32} if tiny else {"max_num_seqs": 32}
    engine = _engine(loaded, "xla", max_model_len=256, num_gpu_blocks_override=1024, **sizes)
    yield _compare("batched", loaded, requests, _run(engine, requests)[0])
    yield _compare("batched, cached prefixes", loaded, requests, _run(engine, requests)[0])
    some = requests[:4]
    yield _compare("one at a time", loaded, some, [_run(engine, [r])[0][0] for r in some])
    engine.close()
    engine = _engine(
        loaded,
        "xla",
        max_model_len=256,
        max_num_seqs=8 if tiny else 16,
        max_num_batched_tokens=64,
        enable_prefix_caching=False,
        num_gpu_blocks_override=longest // 16 + 8,
    )
    states, _ = _run(engine, requests)
    engine.close()
    assert any(s.group.metrics.num_preemptions for s in states), "the pool is too large for preemptions"
    yield _compare("small pool, small budget", loaded, requests, states)


def output_tokens(state: Any) -> list[int]:
    """Returns the output tokens of a request state."""
    return state.group.sequences[0].output_token_ids


def _compare(name: str, loaded: Any, requests: list[tuple[list[int], int]], states: list[Any]) -> Report:
    """Compares outputs with a dense forward pass over prompt and output.

    If the most likely token equals the output token at every position, the output is the dense greedy output.
    """
    import numpy as np

    num_equal, margin, distinct = 0, math.inf, set()
    for dense, state in zip(_dense_logits(loaded, requests, states), states, strict=True):
        num_equal += output_tokens(state) == dense.argmax(-1).tolist()
        second, best = np.sort(dense, axis=-1)[:, -2:].T
        margin = min(margin, float((best - second).min()))
        distinct |= set(output_tokens(state))
    found: Report = {
        "requests": len(requests),
        "equal": num_equal,
        "smallest_margin": margin,
        "distinct_tokens": len(distinct),
        "preemptions": sum(s.group.metrics.num_preemptions for s in states),
        "cached_tokens": sum(s.group.metrics.num_cached_tokens for s in states),
    }
    if num_equal < len(requests):
        raise AssertionError(f"{name}: tokens differ from those of the dense forward pass: {found}")
    return {name: found}


def _dense_logits(loaded: Any, requests: list[tuple[list[int], int]], states: list[Any]) -> Iterator[Any]:
    """Yields for each request the dense logits of its output tokens, float32 [tokens, vocabulary]."""
    import jax
    import numpy as np
    from flax import nnx

    tokens = np.zeros((len(requests), 256), np.int32)
    for row, (prompt, _), state in zip(tokens, requests, states, strict=True):
        text = prompt + output_tokens(state)
        row[: len(text)] = text
    # As in the engine, float32 products must not be rounded to a lower precision.
    with jax.default_matmul_precision("highest"):
        logits = np.asarray(nnx.jit(lambda model, tokens: model(tokens))(loaded.model, tokens), np.float32)
    for row, (prompt, num_tokens) in zip(logits, requests, strict=True):
        yield row[len(prompt) - 1 : len(prompt) - 1 + num_tokens]


def agreement(tiny: bool) -> Iterator[Report]:
    """Compares the accuracy of bfloat16 engines with the Pallas kernels and with XLA.

    The error is the difference of log-probabilities from a dense float32 forward pass, for the tokens that
    the engine sampled. The check fails if the mean error with the kernels is more than 1.5 times the mean
    error with XLA.
    """
    import jax
    import numpy as np

    from jax_paged.models.weights import random_model

    on_gpu = jax.default_backend() == "gpu"
    rng = random.Random(1)
    lens = [5, 70] if tiny else [1, 15, 16, 17, 63, 64, 65, 100, 128, 129, 150, 200]
    requests = [([rng.randrange(512) for _ in range(n)], 12 if tiny else 40) for n in lens]
    dense, errors = random_model(SMALL, "float32"), {}
    for backend in ("xla", "pallas" if on_gpu else "pallas_interpret"):
        loaded = random_model(SMALL, "bfloat16")
        sizes = {"max_num_seqs": 2 if tiny else 16, "max_num_batched_tokens": 64}
        engine = _engine(loaded, backend, max_model_len=256, num_gpu_blocks_override=256, **sizes)
        states, _ = _run(engine, requests, logprobs=0)
        found: list[float] = []
        for logits, state in zip(_dense_logits(dense, requests, states), states, strict=True):
            shifted = logits - logits.max(-1, keepdims=True)
            logprobs = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
            for row, entry in zip(logprobs, state.output().outputs[0].logprobs, strict=True):
                found += [abs(own.logprob - row[token]) for token, own in entry.items()]
        engine.close()
        errors[backend] = {"mean_error": float(np.mean(found)), "largest_error": float(np.max(found))}
        yield {"log_probabilities": errors}
    xla, ours = (kind["mean_error"] for kind in errors.values())
    if not ours <= 1.5 * xla:
        raise AssertionError(f"the mean error of the Pallas kernels is {ours / xla:.1f} times that of XLA")


def throughput(hf_config: Report, tiny: bool, backend: str) -> Iterator[Report]:
    """Measures 64 bfloat16 requests with 256 prompt tokens and 128 output tokens each, submitted at once."""
    import jax

    from jax_paged.models.weights import random_model

    if backend == "pallas" and jax.default_backend() != "gpu":
        yield {"skipped": "the Pallas kernels need a GPU"}
        return
    num_requests, input_len, output_len = (4, 16, 8) if tiny else (64, 256, 128)
    if tiny:
        hf_config = hf_config | {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128}
        hf_config |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    start = time.perf_counter()
    loaded = random_model(hf_config, "bfloat16")
    jax.block_until_ready(loaded.model)
    yield {"weights_s": since(start), "weight_bytes": loaded.weight_bytes}

    start = time.perf_counter()
    engine = _engine(
        loaded,
        backend,
        max_model_len=64 if tiny else 1024,
        max_num_seqs=num_requests,
        max_num_batched_tokens=32 if tiny else 2048,
        enable_prefix_caching=False,
    )
    config = engine.config
    yield {
        "ready_s": since(start),
        "kv_cache_bytes": config.kv_cache_bytes,
        "backend": config.attention_backend,
    }
    engine.executor.wait_until_compiled()
    yield {"all_compiled_s": since(start), "compile_plan": engine.executor.compile_plan().splitlines()}

    rng = random.Random(0)
    requests = [
        ([rng.randrange(config.vocab_size) for _ in range(input_len)], output_len)
        for _ in range(num_requests)
    ]
    _run(engine, requests)
    rounds = []
    for _ in range(2):
        start = time.perf_counter()
        states, steps = _run(engine, requests)
        wall_s = time.perf_counter() - start
        first = [s.group.metrics.first_token_time - s.group.metrics.arrival_time for s in states]
        decode = [s for s, is_decode in steps if is_decode]
        prefill = [s for s, is_decode in steps if not is_decode]
        rounds.append(
            {
                "output_tokens_per_s": round(num_requests * output_len / wall_s, 1),
                "wall_s": round(wall_s, 3),
                "ttft_p50_s": _percentile(first, 50),
                "ttft_p99_s": _percentile(first, 99),
                "prefill_steps": len(prefill),
                "prefill_step_p50_s": _percentile(prefill, 50),
                "decode_steps": len(decode),
                "decode_step_p50_s": _percentile(decode, 50),
                "decode_step_p99_s": _percentile(decode, 99),
            }
        )
        yield {"workload": f"{num_requests} x {input_len} in, {output_len} out", "rounds": rounds}
    stats = jax.devices()[0].memory_stats() or {}
    yield {"peak_bytes": stats.get("peak_bytes_in_use")}


def _engine(loaded: Any, backend: str, **limits: Any) -> Any:
    from jax_paged import EngineArgs, LLMEngine
    from jax_paged.worker.executor import LocalExecutor

    name = "random weights"
    args = EngineArgs(model=name, skip_tokenizer_init=True, attention_backend=backend, **limits)
    return LLMEngine(args, LocalExecutor(args, loaded))


def _run(
    engine: Any, requests: list[tuple[list[int], int]], **options: Any
) -> tuple[list[Any], list[tuple[float, bool]]]:
    """Runs greedy requests that are submitted at once.

    Returns:
        The states of the requests. For each step, its time (seconds) and whether all prompts had been
        computed before it.
    """
    from jax_paged import SamplingParams

    for i, (prompt, max_tokens) in enumerate(requests):
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **options)
        engine.add_request(str(i), prompt, params)
    states: dict[str, Any] = {}
    steps = []
    while engine.has_unfinished_requests():
        is_decode = len(states) == len(requests)
        start = time.perf_counter()
        changed = engine.advance()
        steps.append((time.perf_counter() - start, is_decode))
        states |= {state.group.request_id: state for state in changed}
    for i, (_, max_tokens) in enumerate(requests):
        num_tokens = len(output_tokens(states[str(i)]))
        assert num_tokens == max_tokens, f"request {i} ended after {num_tokens} of {max_tokens} tokens"
    return [states[str(i)] for i in range(len(requests))], steps


def _percentile(values: list[float], percent: float) -> float | None:
    """Returns a percentile (nearest rank, rounded to 5 digits) of the values; None if there are no values."""
    return round(sorted(values)[math.ceil(len(values) * percent / 100) - 1], 5) if values else None


def since(start: float) -> float:
    """Returns the seconds since `start`, a value of time.perf_counter(), with two decimals."""
    return round(time.perf_counter() - start, 2)
