"""A small random model on disk, its dense oracle, and real engines that serve it."""

import contextlib
import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tokenizers
from flax import nnx
from safetensors.numpy import save_file
from tokenizers import decoders, models, pre_tokenizers

from jax_paged import BeamSearchParams, EngineArgs, LLMEngine, SamplingParams
from jax_paged.core.block_manager import BlockManager
from jax_paged.core.request import Sequence, SequenceGroup
from jax_paged.core.scheduler import Scheduler
from jax_paged.core.scheduler_output import SchedulerOutput
from jax_paged.models.weights import load_model
from jax_paged.outputs import RequestOutput
from jax_paged.worker.compilation import plan_steps
from jax_paged.worker.compilation.buckets import Bucket, plan_verifying
from jax_paged.worker.executor import LocalExecutor

VOCAB_SIZE, EOS = 384, 7
MAX_MODEL_LEN = 400
# Float32 sums in another order move the log-probabilities of these models by up to 2e-5.
TOLERANCE = 1e-4
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "eos_token_id": EOS,
    "dtype": "float32",
}


@dataclasses.dataclass(frozen=True)
class Request:
    """A prompt and how it is answered."""

    prompt: list[int]
    params: SamplingParams
    beams: BeamSearchParams | None = None
    salt: str = ""
    priority: int = 0


def write_checkpoint(folder: Path) -> None:
    """Writes a model and a byte tokenizer; the weights are NumPy's, the same with every version of JAX.

    The layers outweigh the embedding, so that greedy text varies; norms are random, as ones hide mistakes.
    """
    rng = np.random.default_rng(0)
    hidden, inner, kv = 64, 128, 32
    shapes = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    tensors = {
        "model.embed_tokens.weight": rng.normal(0, 0.15, (VOCAB_SIZE, hidden)),
        "model.norm.weight": rng.normal(1, 0.2, hidden),
        "lm_head.weight": rng.normal(0, 0.15, (VOCAB_SIZE, hidden)),
    }
    for i in range(2):
        for name, shape in shapes.items():
            tensors[f"model.layers.{i}.{name}.weight"] = rng.normal(0, 0.3, shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{i}.{name}.weight"] = rng.normal(1, 0.2, hidden)
    save_file({k: v.astype(np.float32) for k, v in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [a + b for a in alphabet[:12] for b in alphabet[:12]]
    pieces = ["<unk>", *alphabet, *pairs][:VOCAB_SIZE]
    backend = tokenizers.Tokenizer(models.BPE({p: i for i, p in enumerate(pieces)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "TokenizersBackend"}))


class DenseModel:
    """The checkpoint, called densely and without any cache.

    Args:
        folder: The checkpoint.
        max_len: Texts are padded to it, so that one program serves all.
    """

    def __init__(self, folder: Path, max_len: int = MAX_MODEL_LEN) -> None:
        self._model = load_model(folder, "float32").model
        self._call = nnx.jit(lambda model, tokens: model(tokens))
        self._max_len = max_len

    def logits(self, texts: list[list[int]]) -> list[np.ndarray]:
        """Returns the float32 logits [len(text), V] of each text."""
        out, rows = [], 10
        for i in range(0, len(texts), rows):
            tokens = np.zeros((rows, self._max_len), np.int32)
            for row, text in zip(tokens, texts[i : i + rows], strict=False):
                row[: len(text)] = text
            batch = np.asarray(self._call(self._model, tokens))
            out += [x[: len(text)] for x, text in zip(batch, texts[i : i + rows], strict=False)]
        return out

    def output_logits(self, outputs: list[RequestOutput]) -> list[np.ndarray]:
        """Returns the logits [n, V] from which each output's n tokens were chosen."""
        texts = [o.prompt_token_ids + list(o.outputs[0].token_ids) for o in outputs]
        firsts = [len(o.prompt_token_ids) - 1 for o in outputs]
        return [x[first:-1].copy() for x, first in zip(self.logits(texts), firsts, strict=True)]


def log_softmax(logits: np.ndarray) -> np.ndarray:
    x = logits.astype(np.float64)
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def margin(logits: np.ndarray) -> float:
    """Returns by how much the best token leads at the closest of some steps."""
    best = np.partition(logits, -2, axis=-1)
    return float((best[:, -1] - best[:, -2]).min())


def largest_buckets(max_num_seqs: int, max_num_batched_tokens: int, **kind: Any) -> list[Bucket]:
    """Returns the largest bucket of each kind, in place of all that plan_buckets returns."""
    decode = Bucket(True, max_num_seqs, max_num_seqs)
    return [decode, Bucket(False, max_num_batched_tokens, max_num_seqs)]


def make_engine(folder: Path, *, few_buckets: bool = False, **settings: Any) -> LLMEngine:
    """Returns an engine; with few_buckets, only the largest bucket of each kind is compiled.

    One step is in flight at a time unless asked for otherwise: tests look at what each of them has done.
    """
    defaults = {
        "async_scheduling": False,
        "dtype": "float32",
        "attention_backend": "xla",
        "matmul_backend": "xla",
        "max_model_len": MAX_MODEL_LEN,
    }
    args = EngineArgs(model=str(folder), **(defaults | settings))
    return LLMEngine(args, make_executor(args, few_buckets=few_buckets))


def make_executor(args: EngineArgs, *, few_buckets: bool = True) -> LocalExecutor:
    """Returns an executor; with few_buckets, only the largest bucket of each kind is compiled."""
    with pytest.MonkeyPatch.context() as patch:
        if few_buckets:
            patch.setattr(plan_steps, "plan_buckets", largest_buckets)
            patch.setattr(plan_steps, "plan_verifying", lambda config: plan_verifying(config)[-1:])
        return LocalExecutor(args)


def add(engine: LLMEngine, requests: list[Request], prefix: str = "") -> None:
    for i, request in enumerate(requests):
        checked = engine.check_request(
            request.prompt, request.beams or request.params, cache_salt=request.salt
        )
        # The policy may be one that the test has given the scheduler.
        values = dataclasses.replace(checked.request, priority=request.priority)
        engine.add_request(f"{prefix}{i}", dataclasses.replace(checked, request=values))


def drain(engine: LLMEngine) -> dict[str, RequestOutput]:
    """Runs all requests to their end; checks that no block is lost."""
    outputs = finished_outputs(engine)
    assert_no_block_lost(engine)
    return outputs


def finished_outputs(engine: LLMEngine) -> dict[str, RequestOutput]:
    """Runs all requests to their end."""
    outputs = {}
    while engine.has_unfinished_requests():
        outputs |= {o.request_id: o for o in engine.step() if o.finished}
    return outputs


def run(engine: LLMEngine, requests: list[Request]) -> list[RequestOutput]:
    """Runs requests together; returns their outputs in order."""
    add(engine, requests)
    outputs = drain(engine)
    assert len(outputs) == len(requests)
    return [outputs[str(i)] for i in range(len(requests))]


def run_alone(engine: LLMEngine, requests: list[Request]) -> list[RequestOutput]:
    """Runs requests one after the other."""
    outputs = []
    for request in requests:
        add(engine, [request])
        outputs.append(finished_outputs(engine)["0"])
    assert_no_block_lost(engine)
    return outputs


def tokens_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [list(o.outputs[0].token_ids) for o in outputs]


def assert_no_block_lost(engine: LLMEngine) -> None:
    manager = engine.scheduler.block_manager
    manager.check_integrity()
    assert not manager.block_tables
    assert not manager.swapped_tables
    for pool in (manager.pool, manager.swap_pool, manager.states.pool, manager.states.swap_pool):
        assert pool.num_free == pool.num_usable


def reset(engine: LLMEngine) -> LLMEngine:
    """Makes an engine idle and its scheduler new, whatever a test left behind; returns it."""
    queues = engine.scheduler.queues
    for request_id in [*queues.running, *queues.waiting, *queues.swapped]:
        engine.abort_request(request_id)
    engine.wait_if_idle()
    reschedule(engine)
    return engine


def set_prefix_caching(engine: LLMEngine, enabled: bool) -> None:
    """Gives an idle engine a new scheduler: with an empty prefix cache, or none."""
    reschedule(engine, enable_prefix_caching=enabled)


def reschedule(
    engine: LLMEngine,
    *,
    num_blocks: int | None = None,
    num_swap_blocks: int | None = None,
    num_state_slots: int | None = None,
    enable_prefix_caching: bool = True,
    **settings: Any,
) -> None:
    """Gives an idle engine a new scheduler and block manager, perhaps with less than the device has.

    Args:
        engine: The engine.
        num_blocks: Of the pool, null block included; None for all of the device's.
        num_swap_blocks: Of host memory; None for all that the executor has.
        num_state_slots: For states, one that is unused included; None for all of the device's.
        enable_prefix_caching: Whether to share prefixes.
        **settings: Of the scheduler, in place of the engine's.
    """
    assert not engine.has_unfinished_requests()
    config = engine.config
    if num_swap_blocks is None:
        num_swap_blocks = config.num_swap_blocks
    assert (num_blocks or 0) <= config.num_blocks
    assert num_swap_blocks <= config.num_swap_blocks
    manager = BlockManager(
        num_blocks or config.num_blocks,
        config.block_size,
        enable_prefix_caching,
        groups=config.cache_groups,
        num_swap_blocks=num_swap_blocks,
        num_state_slots=config.num_state_slots if num_state_slots is None else num_state_slots,
        num_swap_state_slots=config.num_swap_state_slots,
    )
    limits = {
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "max_model_len": config.max_model_len,
        "eos_token_ids": config.eos_token_ids,
        "num_scheduler_steps": config.num_scheduler_steps,
        "speculation": config.speculation,
        "max_loras": config.max_loras,
    }
    engine._core.scheduler = Scheduler(block_manager=manager, **(limits | settings))


class Steps(list[SchedulerOutput]):
    """Steps, and the sequences that their rows name by ids."""

    def __init__(self) -> None:
        super().__init__()
        self.named: dict[int, tuple[SequenceGroup, Sequence]] = {}


def steps_of(engine: LLMEngine, patch: pytest.MonkeyPatch) -> Steps:
    """Returns a list to which the engine's scheduler adds each of its steps."""
    steps, scheduler = Steps(), engine.scheduler
    schedule = scheduler.schedule

    def note(now: float) -> SchedulerOutput:
        output = schedule(now)
        steps.append(output)
        for row in output.scheduled:
            named = scheduler.find(row.seq_id)
            assert named is not None, row
            steps.named[row.seq_id] = named
        return output

    patch.setattr(engine.scheduler, "schedule", note)
    return steps


def greedy_requests(seed: int, count: int) -> list[Request]:
    """Draws prompts of 1 to 300 tokens and outputs of 1 to 100.

    Every second prompt shares a prefix with others; half of all lengths lie within one token of a multiple
    of 16 (so also of 4 and, every other time, of 32).
    """
    rng = np.random.default_rng(seed)
    prefixes = rng.integers(0, VOCAB_SIZE, (8, 300))

    def near_multiple(length: int, low: int, high: int) -> int:
        if rng.random() < 0.5:
            length = 16 * round(length / 16) + int(rng.integers(-1, 2))
        return min(max(length, low), high)

    requests = []
    for i in range(count):
        num_prompt = near_multiple(int(rng.integers(1, 301)), 1, 300)
        num_output = int(rng.integers(1, 101))
        num_output = near_multiple(num_prompt + num_output, num_prompt + 1, num_prompt + 100) - num_prompt
        prompt = rng.integers(0, VOCAB_SIZE, num_prompt)
        if i % 2:
            num_shared = near_multiple(int(rng.integers(1, num_prompt + 1)), 1, num_prompt)
            prompt[:num_shared] = prefixes[rng.integers(0, 8), :num_shared]
        params = SamplingParams(temperature=0, max_tokens=num_output)
        requests.append(Request(prompt.tolist(), params))
    return requests


def mixed_requests(seed: int, count: int, max_prompt: int, max_output: int) -> list[Request]:
    """Draws requests of every kind of parameter."""
    rng = np.random.default_rng(seed)

    def chance(value: Any, otherwise: Any, p: float = 0.4) -> Any:
        return value if rng.random() < p else otherwise

    requests = []
    for _ in range(count):
        params = SamplingParams(
            temperature=chance(0.0, float(rng.uniform(0.3, 1.5)), 0.25),
            top_p=chance(float(rng.uniform(0.3, 0.99)), 1.0),
            top_k=chance(int(rng.integers(1, 50)), 0),
            min_p=chance(float(rng.uniform(0.01, 0.3)), 0.0),
            presence_penalty=chance(float(rng.uniform(-1, 1)), 0.0, 0.3),
            frequency_penalty=chance(float(rng.uniform(-1, 1)), 0.0, 0.3),
            repetition_penalty=chance(float(rng.uniform(0.7, 1.5)), 1.0, 0.3),
            # Seeds of two words: a lost half would show.
            seed=int(rng.integers(2**62)),
            logprobs=chance(int(rng.integers(0, 21)), None),
            prompt_logprobs=chance(int(rng.integers(0, 21)), None, 0.2),
            logit_bias=chance(
                {int(t): float(rng.uniform(-3, 3)) for t in rng.integers(0, VOCAB_SIZE, 5)}, None
            ),
            min_tokens=chance(2, 0),
            max_tokens=int(rng.integers(2, max_output + 1)),
        )
        prompt = rng.integers(0, VOCAB_SIZE, rng.integers(1, max_prompt + 1)).tolist()
        requests.append(Request(prompt, params))
    return requests


def ends_rightly(request: Request, token_ids: list[int]) -> bool:
    """Whether a greedy output stops where it must: at the end token or at max_tokens, and not before."""
    if EOS in token_ids:
        return token_ids.index(EOS) == len(token_ids) - 1
    return len(token_ids) == (request.params.max_tokens or math.inf)


@contextlib.contextmanager
def nan_embedding(engine: LLMEngine, token_ids: list[int]) -> Iterator[None]:
    """Makes the embedding of some tokens NaN for a while."""
    weights: Any = engine.executor.runner.arrays["weights"]  # pyright: ignore[reportAttributeAccessIssue]
    index = next(
        i for i, w in enumerate(weights) if w.shape == (VOCAB_SIZE, 64)
    )  # the served model's come first
    kept = weights[index]
    broken = np.array(kept)
    broken[token_ids] = np.nan
    weights[index] = jax.device_put(broken, kept.sharding)
    try:
        yield
    finally:
        weights[index] = kept
