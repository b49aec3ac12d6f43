"""Tool calls and reasoning in chat outputs.

`formats` describes how each model family writes tool calls and reasoning. `chat_reader.ChatReaders` selects
the formats for a request and returns a `ChatReader`, which adds the grammar for forced calls to the sampling
parameters. `parsed_chat.OutputParser` splits an output into reasoning, content and tool calls while it is
generated. The routes for chats and responses use `ChatReaders` and `OutputParser`.
"""
