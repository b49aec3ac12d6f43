"""Scenarios of the features, each with an engine or a few; SCENARIOS lists them."""

import contextlib
import dataclasses
import importlib
import json
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from golden.corpus import (
    SETTINGS,
    Golden,
    Request,
    Scenario,
    add,
    array_values,
    finish,
    make_engine,
    run,
    values_of,
)
from golden.plain import PROMPTS
from safetensors.numpy import load_file, save_file

from jax_paged import (
    LLM,
    BeamSearchParams,
    ExtraArgs,
    Hook,
    LLMEngine,
    LogitsProcessor,
    LoRARequest,
    PoolingParams,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)

MODELS = Path(__file__).parents[1] / "models"
FIXTURES, ADAPTERS = MODELS / "fixtures", MODELS / "adapters"
LLAMA = FIXTURES / "gqa4_llama3"
HIDDEN_SIZE, VOCAB_SIZE = 64, 256
TOKENS = {"skip_tokenizer_init": True}
# Drafts whatever there is: adaptive drafting goes by measured times.
NGRAM = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3, "adaptive": False}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "count": {"type": "integer", "maximum": 99}},
    "required": ["name", "count"],
    "additionalProperties": False,
}


@contextlib.contextmanager
def recorded(golden: Golden, engine: LLMEngine, name: str) -> Iterator[None]:
    """Records an engine, checks that the recording replays, and notes its decisions."""
    lines: list[str] = []
    engine.record(lines.append)
    yield
    engine.record(None)
    importlib.import_module("jax_paged.lab.recording").replay(lines)
    golden.note_steps(name, lines)


def run_recorded(
    golden: Golden, name: str, model: Any, requests: dict[str, Request], **settings: Any
) -> None:
    """Runs requests together in a new engine, recorded."""
    with make_engine(model, **settings) as engine, recorded(golden, engine, name):
        run(golden, engine, requests)


def greedy(max_tokens: int = 10, **settings: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True, **settings})


def sampled(number: int, max_tokens: int = 10, **settings: Any) -> SamplingParams:
    return SamplingParams(
        **{"temperature": 0.9, "seed": 2**40 + number, "max_tokens": max_tokens, **settings}
    )


def prompts(seed: int, *lengths: int, vocab_size: int = VOCAB_SIZE) -> list[list[int]]:
    """Draws prompts as token ids."""
    rng = np.random.default_rng(seed)
    return [rng.integers(8, vocab_size, length).tolist() for length in lengths]


def mixed(name: str, seed: int, count: int, max_tokens: int = 10, **settings: Any) -> dict[str, Request]:
    """Draws requests of 3 to 40 tokens: greedy and sampled in turns, every other one with a shared prefix."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(3, 28, count).tolist()
    shared, *own = prompts(seed, 13, *lengths)
    requests = {}
    for i, prompt in enumerate(own):
        tokens = max_tokens - i % 3
        params = sampled(i, tokens, ignore_eos=True, **settings) if i % 2 else greedy(tokens, **settings)
        requests[f"{name} {i}"] = Request(shared + prompt if i % 4 < 2 else prompt, params)
    return requests


@contextlib.contextmanager
def other_weights() -> Iterator[Path]:
    """Yields the folder of a model like LLAMA whose weights differ a little."""
    rng, tensors = np.random.default_rng(5), load_file(LLAMA / "model.safetensors")
    changed = {}
    for name, x in sorted(tensors.items()):
        x = x.astype(np.float32)
        changed[name] = (x + rng.normal(0, 0.05 * x.std(), x.shape)).astype(np.float32)
    with tempfile.TemporaryDirectory() as folder:
        save_file(changed, Path(folder) / "model.safetensors")
        (Path(folder) / "config.json").write_text((LLAMA / "config.json").read_text())
        yield Path(folder)


def sampling(golden: Golden) -> None:
    """Every filter, penalty and stop, alone and together."""
    settings: dict[str, dict[str, Any]] = {
        "temperature": {"temperature": 1.3},
        "top_p": {"top_p": 0.7},
        "top_k": {"top_k": 7},
        "min_p": {"min_p": 0.1},
        "presence": {"presence_penalty": 1.5},
        "frequency": {"frequency_penalty": 1.2},
        "repetition": {"repetition_penalty": 1.4},
        "greedy repetition": {"temperature": 0, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
        "bias": {"logit_bias": {5: 3.0, 225: -100, 512: 4.5}},
        "long bias": {"logit_bias": dict.fromkeys(range(300, 1400), -100)},
        "bad words": {"temperature": 0, "bad_words": [" the", "scope"]},
        "bad token ids": {"bad_words_token_ids": [[275], [292, 358]]},
        "allowed": {"allowed_token_ids": list(range(260, 330))},
        "min tokens": {"temperature": 0, "min_tokens": 6, "max_tokens": 12},
        "stop": {"temperature": 0, "stop": ["s", " of"], "max_tokens": 20},
        "stop included": {"temperature": 0, "stop": " the", "include_stop_str_in_output": True},
        "stop token": {"temperature": 0, "stop_token_ids": [275, 301, 203]},
        "ignore eos": {"temperature": 0, "ignore_eos": True},
        "forced": {"forced_token_ids": [330, 270, 275], "logprobs": 1},
        "truncated": {"truncate_prompt_tokens": 4},
        "no text": {"detokenize": False},
        "special tokens": {"temperature": 0, "skip_special_tokens": False, "ignore_eos": True},
        "engine seed": {"seed": None},
        "all": {
            **{"top_p": 0.95, "top_k": 50, "min_p": 0.01, "presence_penalty": 0.3, "frequency_penalty": 0.2},
            **{"repetition_penalty": 1.1, "logit_bias": {275: 1.0}, "min_tokens": 3, "logprobs": 3},
        },
    }
    requests = {}
    for i, (name, values) in enumerate(settings.items()):
        prompt = PROMPTS[4 if name in ("min tokens", "ignore eos") else i % len(PROMPTS)]
        requests[f"sampling {name}"] = Request(prompt, sampled(i, **values))
    logprobs = {
        "logprobs": sampled(50, 6, logprobs=3),
        "prompt logprobs": greedy(4, prompt_logprobs=2, logprobs=0),
        "final only": greedy(6, output_kind=RequestOutputKind.FINAL_ONLY),
    }
    requests |= {f"sampling {name}": Request(PROMPTS[3], params) for name, params in logprobs.items()}
    requests |= parallel_requests()
    run_recorded(golden, "sampling", "pagelet", requests)


def parallel_requests() -> dict[str, Request]:
    """Returns requests with several samples, and beam searches."""
    return {
        "parallel n": Request(PROMPTS[0], sampled(1, n=3)),
        "parallel n logprobs": Request(PROMPTS[5], sampled(2, n=2, logprobs=1, stop=[" the"])),
        "parallel best of": Request(PROMPTS[1], sampled(3, n=2, best_of=4)),
        "parallel one of": Request(PROMPTS[2], sampled(4, 6, n=1, best_of=3, temperature=1.4)),
        "beams 2": Request(PROMPTS[3], BeamSearchParams(2, max_tokens=8)),
        "beams 4": Request(PROMPTS[0], BeamSearchParams(4, max_tokens=6, length_penalty=0.5)),
        "beams 3 ignore eos": Request(PROMPTS[4], BeamSearchParams(3, max_tokens=6, ignore_eos=True)),
    }


def processed_logprobs(golden: Golden) -> None:
    """Log-probabilities of the distribution that tokens are drawn from."""
    requests = mixed("processed", 3, 4, logprobs=2, top_k=5)
    run_recorded(golden, "processed", LLAMA, requests, logprobs_mode="processed_logprobs", **TOKENS)


def llm_methods(golden: Golden) -> None:
    """LLM.generate with its own default settings, chat, and beam_search."""
    settings = {
        name: x for name, x in SETTINGS.items() if name not in ("async_scheduling", "num_scheduler_steps")
    }
    with LLM("pagelet", **settings) as llm:
        outputs = llm.generate(PROMPTS[:4], greedy(14, ignore_eos=False), use_tqdm=False)
        chats = [[{"role": "user", "content": text}] for text in PROMPTS[4:6]]
        outputs += llm.chat(chats, sampled(5), use_tqdm=False)  # pyright: ignore[reportArgumentType]
        for i, output in enumerate(outputs):
            golden.note(f"llm {i}", values_of(output))
        (found,) = llm.beam_search([PROMPTS[0]], BeamSearchParams(2, max_tokens=5), use_tqdm=False)
        beams = [
            {"tokens": list(x.tokens), "text": x.text, "sum": x.cum_logprob.hex()} for x in found.sequences
        ]
        golden.note("llm beams", beams)


def forms() -> dict[str, StructuredOutputsParams]:
    """Returns a grammar of each type."""
    tag = {
        "structures": [{"begin": "<a>", "schema": {"type": "integer"}, "end": "</a>"}],
        "triggers": ["<a"],
    }
    return {
        "json": StructuredOutputsParams(json=SCHEMA),
        "regex": StructuredOutputsParams(regex="(red|green|blue) [0-9]{2,4} [a-f]+!"),
        "choice": StructuredOutputsParams(choice=["yes", "no", "perhaps not"]),
        "grammar": StructuredOutputsParams(
            grammar='start: "sum(" NUMBER ("," NUMBER)* ")"\nNUMBER: /[0-9]{1,3}/'
        ),
        "json object": StructuredOutputsParams(json_object=True),
        "tag": StructuredOutputsParams(structural_tag=tag),
        "starts after": StructuredOutputsParams(regex="[ab]{3}", starts_after="."),
    }


def form_requests(name: str) -> dict[str, Request]:
    """Returns requests with structured outputs."""
    requests = {}
    for i, (form, params) in enumerate(forms().items()):
        values = sampled(i, 16, structured_outputs=params) if i % 2 else greedy(16, structured_outputs=params)
        requests[f"{name} {form}"] = Request(PROMPTS[i], values)
    several = sampled(9, 12, n=2, structured_outputs=forms()["json"])
    return requests | {f"{name} n": Request(PROMPTS[7], several)}


def structured_outputs(golden: Golden) -> None:
    """Every type of grammar."""
    run_recorded(golden, "structured", "pagelet", form_requests("structured"))


def forced_drafts(golden: Golden) -> None:
    """Drafts of the tokens that a grammar forces, and of n-grams."""
    settings = {"num_speculative_tokens": 4, **NGRAM}
    run_recorded(golden, "forced", "pagelet", form_requests("forced"), speculative_config=settings)


def speculation_requests(name: str) -> dict[str, Request]:
    """Returns requests that choose among few tokens, so that their texts repeat."""
    few: dict[str, Any] = {"allowed_token_ids": [20, 30, 40]}
    settings = [
        {},
        few,
        {"repetition_penalty": 1.2},
        few | {"n": 2},
        {"logprobs": 2},
        {"stop_token_ids": [9, 50]},
    ]
    requests = mixed(name, 11, len(settings), 16)
    listed = zip(requests.items(), settings, strict=True)
    return {
        key: dataclasses.replace(request, params=dataclasses.replace(request.params, **values))
        for (key, request), values in listed
    }


def ngram(golden: Golden) -> None:
    """Drafts of n-grams."""
    config = {**NGRAM, "num_speculative_tokens": 3}
    run_recorded(golden, "ngram", LLAMA, speculation_requests("ngram"), speculative_config=config, **TOKENS)


def draft_model(golden: Golden) -> None:
    """Drafts of a model that is right now and then."""
    with other_weights() as folder:
        config = {
            "method": "draft_model",
            "model": str(folder),
            "num_speculative_tokens": 3,
            "adaptive": False,
        }
        requests = speculation_requests("draft")
        run_recorded(golden, "draft", LLAMA, requests, speculative_config=config, **TOKENS)


def eagle(golden: Golden) -> None:
    """Drafts of a random EAGLE-3 head."""
    with tempfile.TemporaryDirectory() as folder:
        write_eagle_head(Path(folder))
        config = {"method": "eagle3", "model": folder, "num_speculative_tokens": 3, "adaptive": False}
        requests = speculation_requests("eagle")
        run_recorded(golden, "eagle", LLAMA, requests, speculative_config=config, **TOKENS)


def write_eagle_head(folder: Path) -> None:
    """Writes a random EAGLE-3 head for LLAMA."""
    config = {
        **{"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "vocab_size": VOCAB_SIZE},
        **{"draft_vocab_size": 200, "hidden_size": HIDDEN_SIZE, "intermediate_size": 96, "head_dim": 16},
        **{"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "rms_norm_eps": 1e-4},
        **{
            "max_position_embeddings": 128,
            "rope_theta": 500.0,
            "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
        },
    }
    size, shapes, layer = HIDDEN_SIZE, {}, "midlayer."
    shapes |= {"fc": (size, 3 * size), "lm_head": (200, size)}
    shapes |= {f"{layer}self_attn.{x}_proj": (n, 2 * size) for x, n in (("q", 32), ("k", 16), ("v", 16))}
    shapes |= {f"{layer}self_attn.o_proj": (size, 32), f"{layer}mlp.down_proj": (size, 96)}
    shapes |= {f"{layer}mlp.{x}_proj": (96, size) for x in ("gate", "up")}
    norms = ["norm", *(f"{layer}{x}" for x in ("input_layernorm", "hidden_norm", "post_attention_layernorm"))]
    rng = np.random.default_rng(0)
    tensors = {f"{x}.weight": rng.normal(0, 0.3, shape).astype(np.float32) for x, shape in shapes.items()}
    tensors |= {f"{x}.weight": rng.normal(1, 0.2, size).astype(np.float32) for x in norms}
    ids = np.sort(rng.permutation(VOCAB_SIZE)[:200])
    tensors |= {"d2t": ids - np.arange(200), "t2d": np.isin(np.arange(VOCAB_SIZE), ids)}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")


def prefixes(golden: Golden) -> None:
    """The prefix cache, salts, and pinned prefixes."""
    long, tail, other = prompts(21, 40, 6, 9)
    with make_engine(LLAMA, **TOKENS) as engine, recorded(golden, engine, "prefixes"):
        for salt in ("", "a"):
            options = {"cache_salt": salt}
            name = f"prefix {salt or 'none'}"
            run(golden, engine, {f"{name} 0": Request(long, greedy(6), options)})
            later = {"1": long, "2": long + tail, "3": long[:20] + other}
            run(golden, engine, {f"{name} {k}": Request(x, greedy(6), options) for k, x in later.items()})
        skipping = greedy(6, skip_reading_prefix_cache=True)
        run(golden, engine, {"prefix skipped": Request(long, skipping)})
        pinned = engine.pin_prefix({"prompt_token_ids": tail + other}, cache_salt="b")
        salted = {"cache_salt": "b"}
        run(golden, engine, {"prefix pinned": Request(tail + other + tail, greedy(6), salted)})
        engine.unpin_prefix(pinned)


def schedulers(golden: Golden) -> None:
    """Chunked and whole prompts, preemption by both methods, priorities."""
    small: dict[str, Any] = {"num_gpu_blocks_override": 30, **TOKENS}
    for mode in ("recompute", "swap"):
        requests = mixed(mode, 31, 7, 26) | {f"{mode} n": Request(prompts(33, 15)[0], sampled(8, 20, n=3))}
        run_recorded(golden, mode, LLAMA, requests, preemption_mode=mode, max_num_batched_tokens=16, **small)
    requests = mixed("whole", 32, 5)
    whole: dict[str, Any] = {"enable_chunked_prefill": False, "max_num_batched_tokens": 128}
    run_recorded(golden, "whole", LLAMA, requests, enable_prefix_caching=False, **whole, **TOKENS)
    with (
        make_engine(LLAMA, scheduling_policy="priority", max_num_batched_tokens=16, **small) as engine,
        recorded(golden, engine, "priority"),
    ):
        requests = mixed("priority", 34, 7, 20)
        for i, (name, request) in enumerate(requests.items()):
            add(engine, {name: dataclasses.replace(request, options={"priority": (5 * i) % 7 - 3})})
            engine.step()
        outputs = finish(engine)
        for name in requests:
            golden.note(name, values_of(outputs[name]))


def steps_ahead(golden: Golden) -> None:
    """Async scheduling, multi-step decoding, and both."""
    more: dict[str, dict[str, Any]] = {
        "ahead": {"async_scheduling": True},
        "multi": {"num_scheduler_steps": 4},
        "both": {"async_scheduling": True, "num_scheduler_steps": 4},
    }
    for name, settings in more.items():
        requests = mixed(name, 41, 5, 14) | {f"{name} beams": Request(prompts(42, 9)[0], BeamSearchParams(2))}
        run_recorded(golden, name, LLAMA, requests, **settings, **TOKENS)


def batch_invariance(golden: Golden) -> None:
    """Sums that are the same in every batch, and scores of given texts."""
    with make_engine(LLAMA, batch_invariant=True, **TOKENS) as engine, recorded(golden, engine, "invariant"):
        run(golden, engine, mixed("invariant", 43, 4, 8, logprobs=1))
        for i, scores in enumerate(engine.score(prompts(44, 12, 7), 4)):
            golden.note(f"score of text {i}", [x.hex() for x in scores])


def adapters(golden: Golden) -> None:
    """LoRA adapters, a soft prompt, and prompts as vectors."""
    names = ["rank1", "rank2_attention", "rank4_rslora", "rank8_all_linear", "soft_prompt"]
    listed = {name: LoRARequest(name, i, str(ADAPTERS / name)) for i, name in enumerate(names, 1)}
    requests = {}
    for name, request in mixed("adapter", 51, 7).items():
        adapter = [None, *listed.values(), listed["rank1"]][len(requests)]
        requests[name] = dataclasses.replace(request, options={"lora_request": adapter})
    rows = np.random.default_rng(52).normal(0, 0.2, (11, HIDDEN_SIZE)).astype(np.float32)
    soft = next(name for name in requests if requests[name].options["lora_request"] == listed["soft_prompt"])
    vectors = {
        soft: requests.pop(soft),
        "vectors": Request({"prompt_embeds": rows}, greedy()),
        "vectors salted": Request({"prompt_embeds": rows[::-1], "cache_salt": "a"}, sampled(5)),
    }
    settings: dict[str, Any] = {"enable_lora": True, "max_loras": 3, "enable_prompt_embeds": True}
    with make_engine(LLAMA, **settings, **TOKENS) as engine:
        with recorded(golden, engine, "adapters"):
            run(golden, engine, requests)
        run(golden, engine, vectors)  # vectors are not recorded


def steer(direction: Any, y: Any, args: Any) -> Any:
    return y + args * direction


def read(params: Any, y: Any, args: Any) -> Any:
    return y, y


def tempered(logits: Any, state: Any, extra: ExtraArgs) -> tuple[Any, Any]:
    return logits / extra.values[0], state


def guided(logits: Any, state: Any, extra: ExtraArgs) -> tuple[Any, Any]:
    return logits + extra.values[0] * (logits - state), 0.5 * state + 0.5 * logits


def only_even(token_ids: list[int], logits: Any) -> Any:
    return np.where(np.arange(len(logits)) % 2, -np.inf, logits)


def without_prompt(prompt: list[int], token_ids: list[int], logits: Any) -> Any:
    logits = logits.copy()
    logits[[*prompt, *token_ids]] -= 2
    return logits


def own_functions(golden: Golden) -> None:
    """Hooks, and logits processors on the device and on the host."""
    direction = np.random.default_rng(61).normal(size=HIDDEN_SIZE).astype(np.float32)
    hooks = [
        Hook("layers.0.mlp", steer, direction, name="steer"),
        Hook("layers.1.self_attn", read, num_args=0, name="read"),
    ]
    processors = [
        LogitsProcessor("tempered", tempered),
        LogitsProcessor("guided", guided, state=jnp.zeros(VOCAB_SIZE, jnp.float32)),
    ]
    given: dict[str, dict[str, Any]] = {
        "neither": {},
        "steer": {"hook_args": {"steer": 0.5}},
        "read": {"hook_args": {"read": []}},
        "both hooks": {"hook_args": {"steer": -0.5, "read": []}},
        "tempered": {"extra_args": {"tempered": 0.5}},
        "guided": {"extra_args": {"guided": 0.3, "tempered": 1.5}},
        "host": {"logits_processors": [only_even]},
        "host with prompt": {"logits_processors": [without_prompt]},
    }
    requests = {}
    for i, (name, values) in enumerate(given.items()):
        (prompt,) = prompts(62 + i, 5 + 3 * i)
        requests[f"functions {name}"] = Request(prompt, sampled(i, **values) if i % 2 else greedy(**values))
    on_host = {name: requests.pop(name) for name in list(requests) if "host" in name}
    with LLM(str(LLAMA), hooks=hooks, logits_processors=processors, **(SETTINGS | TOKENS)) as llm:
        with recorded(golden, llm.llm_engine, "functions"):
            run(golden, llm.llm_engine, requests)
        with warnings.catch_warnings(action="ignore", category=UserWarning):  # that the host is slow
            run(golden, llm.llm_engine, on_host)  # Python functions are not recorded


def picture(width: int, height: int, seed: int) -> np.ndarray:
    """Returns an image, uint8 [height, width, 3]."""
    y, x, channel = np.indices((height, width, 3))
    return ((3 * x + (5 + seed) * y + 40 * channel + 17 * seed + x * y // 7) % 256).astype(np.uint8)


def images(golden: Golden) -> None:
    """Models that read images, with text beside them."""
    for folder in ("smolvlm_tied", "qwen3_vl_tied"):
        cases = json.loads((MODELS / "image_fixtures" / folder / "reference.json").read_text())["cases"]
        requests = {}
        for i, case in enumerate(cases[:5]):
            data = {"image": [picture(*shape) for shape in case["pictures"]]}
            params = sampled(i) if i % 2 else greedy(8, logprobs=1)
            prompt = {"prompt": case["text"]} | ({"multi_modal_data": data} if case["pictures"] else {})
            requests[f"{folder} {i}"] = Request(prompt, params)
        settings: dict[str, Any] = {"max_model_len": 256, "block_size": 16, "num_gpu_blocks_override": 60}
        with make_engine(MODELS / "image_fixtures" / folder, **settings) as engine:
            run(golden, engine, requests)  # images are not recorded


def pooling(golden: Golden) -> None:
    """Embeddings, classes and scores, of encoders and decoders."""
    settings: dict[str, Any] = {"dtype": "float32", "max_compile_s": 0, "max_num_seqs": 4}
    settings |= {"attention_backend": "xla", "matmul_backend": "xla", "kv_cache_memory_bytes": 2**22}
    settings |= {"max_num_batched_tokens": 64}
    token_lists = prompts(71, 5, 17, 30, vocab_size=128)
    for name in ("bert_embedder", "qwen3_embedder", "llama_mean", "llama_classifier", "modernbert_reranker"):
        with LLM(str(MODELS / "pooling_fixtures" / name), **settings) as llm:
            if name.endswith(("embedder", "mean")):
                listed: list[Any] = [o.outputs.embedding for o in llm.embed(token_lists, use_tqdm=False)]
                listed += [
                    [o.outputs.score] for o in llm.score(token_lists[:1], token_lists[1:], use_tqdm=False)
                ]
                if name == "llama_mean":
                    params = PoolingParams(task="token_embed")
                    listed += [o.outputs.data for o in llm.encode(token_lists[:1], params, use_tqdm=False)]
            elif name == "llama_classifier":
                listed = [o.outputs.probs for o in llm.classify(token_lists, use_tqdm=False)]
                raw = PoolingParams(use_activation=False, task="classify")
                listed += [o.outputs.data for o in llm.encode(token_lists, raw, use_tqdm=False)]
            else:
                documents = ["A block of memory.", "A sheet of paper, or a part of a book."]
                listed = [[o.outputs.score] for o in llm.score("What is a page?", documents, use_tqdm=False)]
            for i, data in enumerate(listed):
                golden.note(f"{name} {i}", array_values(data))


def encoder_decoder(golden: Golden) -> None:
    """T5: the encoder's text, a prompt of the decoder, samples and beams."""
    first, second, decoder = prompts(81, 12, 25, 4)
    both = {"encoder_prompt": second, "decoder_prompt": [0, *decoder]}
    requests = {
        "t5 greedy": Request(first, greedy(logprobs=1)),
        "t5 both": Request(both, greedy()),
        "t5 n": Request(second, sampled(1, n=2)),
        "t5 beams": Request(first, BeamSearchParams(2, max_tokens=6)),
        "t5 penalty": Request(second, sampled(2, repetition_penalty=1.3)),
    }
    run_recorded(golden, "t5", FIXTURES / "t5_tied", requests, **TOKENS)


FAMILIES = [
    *(
        "deepseek_v3_groups",
        "mixtral",
        "gpt_oss",
        "gemma2",
        "gemma4_shared",
        "qwen3_5",
        "lfm2",
        "phi3_longrope",
    ),
    *("gpt_oss_mxfp4",),
]


def families(golden: Golden) -> None:
    """Latent attention, experts, windows, sinks, shared layers, recurrent layers, quantized checkpoints."""
    for name in FAMILIES:
        first, second = prompts(91, 33, 7, vocab_size=128)
        requests = {
            f"{name} greedy": Request(first, greedy(12, logprobs=1)),
            f"{name} sampled": Request(second, sampled(1, 14, ignore_eos=True)),
            f"{name} shared": Request(first[:22] + second, greedy(8)),
        }
        with (
            make_engine(FIXTURES / name, block_size=16, max_num_batched_tokens=48, **TOKENS) as engine,
            recorded(golden, engine, name),
        ):
            run(golden, engine, requests)
            run(golden, engine, {f"{name} again": Request(first, greedy(4))})


def quantization(golden: Golden) -> None:
    """Quantized weights and quantized KV caches."""
    more: dict[str, dict[str, Any]] = {
        "weights int8": {"quantization": "int8"},
        "weights fp8": {"quantization": "fp8"},
        "cache int8": {"kv_cache_dtype": "int8"},
        "cache fp8": {"kv_cache_dtype": "fp8_e4m3"},
    }
    for name, settings in more.items():
        run_recorded(golden, name, LLAMA, mixed(name, 101, 3, logprobs=1), **settings, **TOKENS)


def cascade(golden: Golden) -> None:
    """Sequences that attend to a long prefix together."""
    shared, *own = prompts(111, 296, 3, 5, 2, 7, 4, 6)
    with (
        make_engine(LLAMA, max_model_len=400, num_gpu_blocks_override=600, **TOKENS) as engine,
        recorded(golden, engine, "cascade"),
    ):
        run(golden, engine, {"cascade first": Request(shared, greedy(1))})
        run(golden, engine, {f"cascade {i}": Request(shared + x, greedy(8)) for i, x in enumerate(own)})
        assert engine.num_saved_reads > 0
        golden.note("cascade shared tokens", engine.num_saved_reads)


def edits(golden: Golden) -> None:
    """Forks, rollbacks, verified drafts, dropped blocks, aborts, and steps that are planned by hand."""
    requests = mixed("edit", 121, 5, 24)
    with make_engine(LLAMA, **TOKENS) as engine, recorded(golden, engine, "edits"):
        add(engine, requests)
        names = list(requests)
        ended: dict[str, Any] = {}

        def step() -> None:
            ended.update({o.request_id: o for o in engine.step() if o.finished})

        for _ in range(6):
            step()
        engine.fork(names[1], "edit fork", seed=7)
        step()
        engine.rollback(names[0], 2)
        found = engine.verify(names[2], [20, 30, 40])
        golden.note(
            "edit verify", dataclasses.asdict(found) | {"logprobs": [x.hex() for x in found.logprobs]}
        )
        step()
        engine.drop_kv(names[0], [0, len(engine.page_table(names[0]).entries) - 1])
        state = engine.abort_request(names[3])
        assert state is not None
        golden.note(names.pop(3), values_of(state.output()))
        plan = engine.schedule()
        engine.run(plan)
        ended |= finish(engine)
        for name in [*names, "edit fork"]:
            golden.note(name, values_of(ended[name]))


def snapshots(golden: Golden) -> None:
    """An engine's state, saved mid-run, and loaded by the engine itself and by another."""
    requests = mixed("snapshot", 131, 4, 16)
    with tempfile.TemporaryDirectory() as folder:
        with make_engine(LLAMA, **TOKENS) as engine:
            add(engine, requests)
            for _ in range(5):
                engine.step()
            engine.state().save(folder)
            outputs = finish(engine)
            for name in requests:
                golden.note(name, values_of(outputs[name]))
            engine.load_state(folder)
            again = finish(engine)
        with LLM.restore(folder) as llm:
            restored = finish(llm.llm_engine)
    for name in requests:
        golden.note(f"{name} loaded", values_of(again[name]))
        golden.note(f"{name} restored", values_of(restored[name]))


def weights(golden: Golden) -> None:
    """Sleep and new weights, with and without running requests."""
    with (
        other_weights() as folder,
        make_engine(LLAMA, **TOKENS) as engine,
        recorded(golden, engine, "weights"),
    ):
        run(golden, engine, mixed("before", 141, 2))
        engine.sleep(1)
        engine.wake_up()
        requests = mixed("meanwhile", 142, 2, 14)
        add(engine, requests)
        for _ in range(4):
            engine.step()
        engine.update_weights(str(folder), running="recompute")
        outputs = finish(engine)
        for name in requests:
            golden.note(name, values_of(outputs[name]) | {"versions": list(outputs[name].weight_versions)})
        run(golden, engine, mixed("after", 141, 2))


def devices(golden: Golden) -> None:
    """Models divided among devices, in heads, experts, stages and replicas."""
    requests = mixed("tensors", 151, 5, logprobs=1) | {
        "tensors beams": Request(prompts(152, 9)[0], BeamSearchParams(2, max_tokens=6))
    }
    run_recorded(golden, "tensors", LLAMA, requests, tensor_parallel_size=2, **TOKENS)
    experts: dict[str, Any] = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
    run_recorded(golden, "experts", FIXTURES / "mixtral", mixed("experts", 153, 3), **experts, **TOKENS)
    for name in ("pipeline", "data"):
        listed = mixed(name, 154, 6, logprobs=1)
        settings = SETTINGS | TOKENS | {f"{name}_parallel_size": 2}
        with LLM(str(LLAMA), **settings) as llm:
            params = [request.params for request in listed.values()]
            found = llm.generate([request.prompt for request in listed.values()], params, use_tqdm=False)
        for key, output in zip(listed, found, strict=True):
            golden.note(key, values_of(output))


SCENARIOS: dict[str, Scenario] = {
    scenario.__name__: scenario
    for scenario in [
        *(sampling, processed_logprobs, llm_methods, structured_outputs, forced_drafts, ngram, draft_model),
        *(
            eagle,
            prefixes,
            schedulers,
            steps_ahead,
            batch_invariance,
            adapters,
            own_functions,
            images,
            pooling,
        ),
        *(encoder_decoder, families, quantization, cascade, edits, snapshots, weights, devices),
    ]
}
