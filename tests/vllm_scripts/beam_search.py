"""Finds the likeliest continuations of prompts: python beam_search.py MODEL"""

import sys

from vllm import LLM
from vllm.inputs import TextPrompt, TokensPrompt
from vllm.sampling_params import BeamSearchParams

llm = LLM(model=sys.argv[1], max_model_len=256, max_num_seqs=8, max_num_batched_tokens=64)
tokenizer = llm.get_tokenizer()
text = "def main():\n"
prompts = [TextPrompt(prompt=text), TokensPrompt(prompt_token_ids=tokenizer.encode("import "))]
params = BeamSearchParams(beam_width=4, max_tokens=12, length_penalty=1.0, temperature=0.0)

for prompt, output in zip(prompts, llm.beam_search(prompts, params), strict=True):
    print(f"Prompt: {prompt}")
    for sequence in output.sequences:
        print(f"  {sequence.cum_logprob:.3f} {sequence.text!r}")
