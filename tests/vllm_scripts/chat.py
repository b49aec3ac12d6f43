"""Answers one conversation, then several at once, then with a template of its own: python chat.py MODEL"""

import sys

from vllm import LLM, SamplingParams

TEMPLATE = "{% for m in messages %}<|user|>{{ prefix }}{{ m['content'] }}<|end|>{% endfor %}<|assistant|>"

llm = LLM(sys.argv[1], max_model_len=256, max_num_seqs=8, max_num_batched_tokens=64)
sampling_params = llm.get_default_sampling_params()
sampling_params.max_tokens = 64


def ask(question):
    return [{"role": "user", "content": question}]


def show(title, outputs):
    for output in outputs:
        print(f"{title}: {output.outputs[0].text}")


conversation = [{"role": "system", "content": "You are helpful."}, *ask("What is 12 + 30?")]
show("one", llm.chat(conversation, sampling_params, use_tqdm=False))

questions = ["What is 20 + 22?", "What is a block table?", "What is copy-on-write?"]
show("several", llm.chat([ask(q) for q in questions], sampling_params, use_tqdm=True))

outputs = llm.chat(
    ask("a block table?"),
    SamplingParams(temperature=0, max_tokens=64),
    chat_template=TEMPLATE,
    chat_template_content_format="string",
    chat_template_kwargs={"prefix": "What is "},
    use_tqdm=False,
)
show("template", outputs)

started = [*ask("What is a block table?"), {"role": "assistant", "content": "A block table"}]
outputs = llm.chat(
    started, sampling_params, add_generation_prompt=False, continue_final_message=True, use_tqdm=False
)
show("continued", outputs)
