"""Messages and items that clients send back, in the forms of OpenAI's API."""

import pytest

from jax_paged.engine.text.tokenizer import Tokenizer
from jax_paged.server.protocol.messages import messages_for, messages_of_input

QUESTION = {"role": "user", "content": "a"}
TEXT = {
    "type": "reasoning",
    "id": "rs_1",
    "content": [{"type": "reasoning_text", "text": "b"}],
    "summary": [],
}
SUMMARY = {"type": "reasoning", "content": None, "summary": [{"type": "summary_text", "text": "c"}]}
EMPTY = {"type": "reasoning", "summary": [], "content": None, "encrypted_content": None, "status": None}
ANSWER = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "d"}]}
REFUSAL = {"type": None, "role": "assistant", "content": [{"type": "refusal", "refusal": "e"}]}


def assistant(content: str, reasoning: str = "") -> dict[str, str]:
    message = {"role": "assistant", "content": content}
    return message | {"reasoning_content": reasoning} if reasoning else message


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        ([QUESTION, TEXT, ANSWER, QUESTION], [QUESTION, assistant("d", "b"), QUESTION]),
        ([QUESTION, TEXT, SUMMARY, ANSWER], [QUESTION, assistant("d", "bc")]),
        ([QUESTION, EMPTY, ANSWER], [QUESTION, assistant("d")]),
        ([QUESTION, TEXT, QUESTION], [QUESTION, assistant("", "b"), QUESTION]),
        ([QUESTION, TEXT], [QUESTION, assistant("", "b")]),
        ([QUESTION, ANSWER, TEXT, REFUSAL], [QUESTION, assistant("d"), assistant("e", "b")]),
    ],
)
def test_reasoning_is_a_part_of_the_message_that_follows(items, expected):
    assert messages_of_input(items, None) == expected


@pytest.mark.parametrize(
    ("item", "name"),
    [
        ({"type": "reasoning", "content": "b"}, "content"),
        ({"type": "reasoning", "content": [{"type": "output_text", "text": "b"}]}, "content[0].type"),
        ({"type": "reasoning", "summary": [{"type": "summary_text"}]}, "summary[0].text"),
        ({"type": "reasoning", "encrypted_content": "gAAA"}, "encrypted_content"),
        ({"type": "item_reference", "id": "rs_1"}, "type"),
    ],
)
def test_items_of_other_forms_are_errors(item, name):
    with pytest.raises(ValueError, match=r"^`input\[1\]\.") as error:
        messages_of_input([QUESTION, item], None)
    assert str(error.value).startswith(f"`input[1].{name}` must be ")


def test_fields_that_are_null_are_left_out(folder):
    nulls = dict.fromkeys(("content", "refusal", "audio", "annotations", "function_call", "tool_calls"))
    sent = [QUESTION, {"role": "assistant", **nulls}, {**QUESTION, "name": None}]
    assert messages_for(Tokenizer(folder), sent) == [QUESTION, {"role": "assistant"}, QUESTION]
