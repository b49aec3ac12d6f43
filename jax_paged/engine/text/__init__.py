"""Conversion between text and token ids.

`Tokenizer` (tokenizer.py) loads a model's tokenizer and applies its chat template. `read_tokenizer`
(gguf_tokenizer.py) makes the tokenizer of a GGUF file. `Tokenizer` extends `TextCodec`
(text_codec.py), which encodes and decodes text. For each running output, a `Detokenizer` converts tokens to
text as they arrive, and `StopStrings` finds stop strings in that text. `ControlTokens` keeps users from
writing control tokens into chats. `Vocabulary` finds the bytes of tokens and the maximum number of characters
per token. engine/input_processor.py and the server use the tokenizer; engine/sample_output.py uses the
detokenizer.
"""
