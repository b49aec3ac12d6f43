"""A runner of scripted tokens in place of the model, for tests of the engine around the device."""

import types

from jax_paged import LLMEngine, SamplingParams
from jax_paged.core.block_manager import CacheGroup
from jax_paged.core.runner_output import StepOutput, TokenLogprobs
from jax_paged.outputs import RequestOutput

VOCAB_SIZE, EOS = 300, 2
TEMPLATE = "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }};{% endfor %}a:"
LONG = SamplingParams(max_tokens=None)


class ScriptedRunner:
    """Answers "text?" with text, token by token, then with the end token."""

    num_blocks = 40
    sampling_defaults = types.MappingProxyType({})

    def __init__(self, args, loaded=None):
        self.config = types.SimpleNamespace(
            model_name="scripted",
            architecture="None",
            vocab_size=VOCAB_SIZE,
            max_model_len=args.max_model_len or 400,
            dtype="float32",
            backend="none",
            block_size=args.block_size,
            num_blocks=args.num_gpu_blocks_override or self.num_blocks,
            num_swap_blocks=1000,
            layout=types.SimpleNamespace(groups=(CacheGroup(),)),
            kv_cache_bytes=3 * 2**20,
            weight_bytes=2**31,
            max_num_seqs=args.max_num_seqs or 8,
            max_num_batched_tokens=args.max_num_batched_tokens or 64,
            eos_token_ids=frozenset({EOS}),
            decoder_start_token_id=None,
            max_logprobs=19,
            sampling_defaults=dict(self.sampling_defaults),
        )
        self.buckets = ("decode 1", "decode 8", "mixed 64x8")
        self.num_steps = 0
        self.num_closed = 0
        self.seeds = {}
        self.during_step = lambda output: None
        self.bad_request = None

    def execute(self, output):
        self.num_steps += 1
        self.during_step(output)
        rows = output.scheduled
        samples = [(row.group, seq) for row in rows for seq in row.sampling]
        tokens = [self._next(seq) for _, seq in samples]
        self.seeds |= {row.group.request_id: row.group.sampling_params.seed for row in rows}
        return StepOutput(
            token_ids=tokens,
            logprobs=[self._entry(token) for token in tokens],
            is_finite=[row.group.request_id != self.bad_request for row in rows],
            prompt_logprobs=[self._prompt(row) for row in rows],
        )

    def close(self):
        self.num_closed += 1

    def compile_plan(self):
        return "a table"

    @staticmethod
    def _next(seq):
        prompt, i = seq.prompt_token_ids, len(seq.output_token_ids)
        return prompt[i] if i < len(prompt) - 1 else EOS

    @staticmethod
    def _entry(token):
        top = [(token + 1) % VOCAB_SIZE, token]
        return TokenLogprobs(-1.5, 2, top, [-0.5, -1.5])

    def _prompt(self, row):
        if row.group.sampling_params.prompt_logprobs is None:
            return []
        stop = min(row.start + row.num_tokens + 1, len(row.seq.prompt_token_ids))
        return [self._entry(t) for t in row.seq.prompt_token_ids[row.start + 1 : stop]]


def run(engine: LLMEngine) -> dict[str, RequestOutput]:
    """Runs all requests to their end."""
    outputs = {}
    while engine.has_unfinished_requests():
        outputs |= {o.request_id: o for o in engine.step() if o.finished}
    return outputs


def no_block_lost(engine: LLMEngine) -> bool:
    manager = engine.scheduler.block_manager
    manager.check_integrity()
    return all(pool.num_free == pool.num_usable for pool in (manager.pool, manager.swap_pool))
