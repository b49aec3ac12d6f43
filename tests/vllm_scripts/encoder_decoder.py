"""Every form of prompt for an encoder-decoder model: python encoder_decoder.py MODEL"""

import sys

from vllm import LLM, SamplingParams
from vllm.inputs import ExplicitEncoderDecoderPrompt, TextPrompt, TokensPrompt, zip_enc_dec_prompts

llm = LLM(
    model=sys.argv[1],
    dtype="float32",
    max_num_seqs=8,
    max_num_batched_tokens=64,
    enforce_eager=True,
)
tokenizer = llm.get_tokenizer()

text = "a cat"
tokens = TokensPrompt(prompt_token_ids=tokenizer.encode("a dog"))
prompts = [
    text,
    TextPrompt(prompt=text),
    tokens,
    ExplicitEncoderDecoderPrompt(encoder_prompt=text, decoder_prompt=tokens),
    ExplicitEncoderDecoderPrompt(encoder_prompt=tokens, decoder_prompt=None),
    ExplicitEncoderDecoderPrompt(encoder_prompt=TextPrompt(prompt=text), decoder_prompt="so"),
    *zip_enc_dec_prompts(["one", "two"], ["1", "2"]),
]
outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
for output in outputs:
    print(
        f"Encoder: {output.encoder_prompt!r} {output.encoder_prompt_token_ids}, "
        f"decoder: {output.prompt!r} {output.prompt_token_ids}, output: {output.outputs[0].token_ids}"
    )
