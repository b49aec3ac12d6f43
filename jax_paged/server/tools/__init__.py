"""Tool calls and reasoning in chat outputs.

`formats` describes how each model family writes tool calls and reasoning. `chat_settings.ModelFormats` holds
the formats of the served model, and returns the `ChatSettings` of a request, which add the grammar for forced
calls to the sampling parameters. `parsed_chat.OutputParser` splits an output into reasoning, content and tool
calls while it is generated. The routes for chats and responses use `ModelFormats` and `OutputParser`.
"""
