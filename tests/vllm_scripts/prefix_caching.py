"""Compares outputs with and without a cached prefix: python prefix_caching.py MODEL"""

import sys

from vllm import LLM, SamplingParams, TokensPrompt

prefix = (
    "You are a teacher of computer science who explains how an engine serves language models. "
    "Answer every question with one short sentence, and do not invent anything that you do not know. "
)
questions = ["What is a block table?", "What is a prefix?", "What is preemption?"]
sampling_params = SamplingParams(temperature=0.0, max_tokens=16)

regular_llm = LLM(
    model=sys.argv[1],
    max_model_len=256,
    max_num_seqs=8,
    max_num_batched_tokens=64,
    enable_prefix_caching=False,
)
regular = [o.outputs[0].text for o in regular_llm.generate([prefix + q for q in questions], sampling_params)]
del regular_llm

llm = LLM(
    model=sys.argv[1],
    max_model_len=256,
    max_num_seqs=8,
    max_num_batched_tokens=64,
    enable_prefix_caching=True,
    block_size=16,
)
llm.generate(prefix + "Hello", sampling_params)  # computes the prefix
outputs = llm.generate([prefix + q for q in questions], sampling_params)
print("same outputs:", [o.outputs[0].text for o in outputs] == regular)
print("cached tokens:", [o.num_cached_tokens for o in outputs])

token_ids = outputs[0].prompt_token_ids
salted = TokensPrompt(prompt_token_ids=token_ids, cache_salt="another user")
(output,) = llm.generate([salted], sampling_params)
print("cached tokens with a salt of its own:", output.num_cached_tokens)
(output,) = llm.generate(
    {"prompt_token_ids": token_ids},
    SamplingParams(temperature=0.0, max_tokens=16, skip_reading_prefix_cache=True),
)
print("cached tokens when it is not read:", output.num_cached_tokens)
