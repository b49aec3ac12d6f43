"""Log-probabilities of prompts and outputs: python logprobs.py MODEL"""

import math
import sys

from vllm import LLM, SamplingParams

llm = LLM(model=sys.argv[1], max_model_len=256, max_num_seqs=8, max_num_batched_tokens=64, max_logprobs=-1)

params = SamplingParams(temperature=0, max_tokens=3, logprobs=2, prompt_logprobs=1)
(output,) = llm.generate("import os", params, use_tqdm=False)
for token_id, candidates in zip(output.prompt_token_ids, output.prompt_logprobs, strict=True):
    print("prompt:", "None" if candidates is None else f"{candidates[token_id].logprob:.2f}")
completion = output.outputs[0]
for token_id, candidates in zip(completion.token_ids, completion.logprobs, strict=True):
    best = max(candidates.values(), key=lambda c: c.logprob)
    print(f"output: {candidates[token_id].decoded_token!r} rank {candidates[token_id].rank}", end=" ")
    print(f"of {len(candidates)}, best {best.decoded_token!r} {best.logprob:.2f}")
pairs = zip(completion.token_ids, completion.logprobs, strict=True)
total = sum(candidates[token_id].logprob for token_id, candidates in pairs)
print("sum is cumulative_logprob:", math.isclose(total, completion.cumulative_logprob, rel_tol=1e-5))

# -1 reports the whole vocabulary.
(output,) = llm.generate("import os", SamplingParams(max_tokens=1, logprobs=-1, seed=0), use_tqdm=False)
everything = output.outputs[0].logprobs[0]
print("vocabulary:", len(everything) == len(llm.get_tokenizer()))
print(f"probabilities sum to {sum(math.exp(c.logprob) for c in everything.values()):.3f}")
