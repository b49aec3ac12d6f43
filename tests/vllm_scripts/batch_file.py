"""Answers every question of a file, one JSON object per line: python batch_file.py MODEL INPUT OUTPUT"""

import functools
import json
import sys

from tqdm import tqdm
from vllm import LLM, SamplingParams

model, source, target = sys.argv[1:]
with open(source, encoding="utf-8") as file:
    requests = [json.loads(line) for line in file]

llm = LLM(
    model=model,
    max_model_len=256,
    max_num_seqs=8,
    max_num_batched_tokens=64,
    gpu_memory_utilization=0.5,
    quantization=None,
)
params = [SamplingParams(temperature=0, max_tokens=r["body"].get("max_tokens", 32)) for r in requests]
bar = functools.partial(tqdm, desc="answers", mininterval=1.0)
outputs = llm.chat([r["body"]["messages"] for r in requests], params, use_tqdm=bar)

with open(target, "w", encoding="utf-8") as file:
    for request, output in zip(requests, outputs, strict=True):
        answer = {"role": "assistant", "content": output.outputs[0].text}
        choice = {"message": answer, "finish_reason": output.outputs[0].finish_reason}
        file.write(json.dumps({"custom_id": request["custom_id"], "choices": [choice]}) + "\n")
print(f"{len(outputs)} answers, {sum(len(o.outputs[0].token_ids) for o in outputs)} tokens")
