"""Shows what the sampling parameters do, one set of them per prompt: python sampling.py MODEL"""

import sys

from vllm import LLM, SamplingParams

PROMPT = "def read(path):\n"

settings = {
    "greedy": SamplingParams(temperature=0),
    "three samples": SamplingParams(n=3, temperature=1.0, seed=7),
    "top_k": SamplingParams(temperature=1.5, top_k=3, seed=7),
    "min_p": SamplingParams(temperature=1.5, min_p=0.2, seed=7),
    "penalties": SamplingParams(temperature=0, frequency_penalty=1.0, repetition_penalty=1.2),
    "stop": SamplingParams(temperature=0, stop=["exception", "class"], max_tokens=32),
    "stop, shown": SamplingParams(
        temperature=0, stop=["exception", "class"], max_tokens=32, include_stop_str_in_output=True
    ),
    "min_tokens": SamplingParams(temperature=0, min_tokens=24, max_tokens=24),
    "bad words": SamplingParams(temperature=0, bad_words=["class", "file"]),
    "allowed tokens": SamplingParams(temperature=1.0, seed=7, allowed_token_ids=[300, 301, 302]),
    "no text": SamplingParams(temperature=0, max_tokens=4, detokenize=False),
    "to the end": SamplingParams(temperature=0, max_tokens=100_000, ignore_eos=True),
}

llm = LLM(
    model=sys.argv[1], max_model_len=256, max_num_seqs=8, max_num_batched_tokens=64, disable_log_stats=True
)
outputs = llm.generate([PROMPT] * len(settings), list(settings.values()), use_tqdm=False)
for name, output in zip(settings, outputs, strict=True):
    for completion in output.outputs:
        ended = f"{completion.finish_reason} {completion.stop_reason}"
        print(f"{name}: {len(completion.token_ids)} tokens, {ended}: {completion.text!r}")

# The same object may be changed and used again.
params = SamplingParams(temperature=0, max_tokens=2)
lengths = []
for params.max_tokens in (2, 5):
    lengths.append(len(llm.generate(PROMPT, params, use_tqdm=False)[0].outputs[0].token_ids))
print(f"changed: {lengths}")
