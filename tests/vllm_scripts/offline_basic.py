"""Completes a few prompts together: python offline_basic.py MODEL"""

import sys

from vllm import LLM, SamplingParams

prompts = [
    "def add(a, b):\n    ",
    "import os\n\n",
    '"""Return the number of',
    "class Queue:\n    ",
]
sampling_params = SamplingParams(temperature=0.8, top_p=0.95, seed=1)

llm = LLM(
    model=sys.argv[1],
    max_model_len=256,
    max_num_seqs=8,
    max_num_batched_tokens=64,
    enforce_eager=True,
    trust_remote_code=False,
)
outputs = llm.generate(prompts, sampling_params)

for output in outputs:
    print(f"Prompt: {output.prompt!r}")
    print(f"Output: {output.outputs[0].text!r}")
    print("-" * 60)
