"""Outputs taken apart: every format, whole and in random pieces, well and badly written."""

import dataclasses
import json
import random
import time

import pytest

from jax_paged.server.tools.formats import REASONING_FORMATS, TOOL_FORMATS, response_template
from jax_paged.server.tools.parsed_chat import OutputParser

F = ("f", json.dumps({"a": {"b": [{"c": "}"}]}, "text": 'x; y, "z" </tool {'}))
G = ("get_more-2", "{}")
# Arguments that hold what would end or begin a call elsewhere.
H = (
    "save",
    json.dumps({"text": 'a </tool_call> "b\\" {[', "items": [{"a": 1}, {"name": "x", "arguments": {}}]}),
)
J = (
    "save",
    json.dumps(
        {
            "text": 'a\n```<｜tool▁call▁end｜> [TOOL_CALLS]x[ARGS]{} ; {"name": "x", "parameters": {}}',
            "next": [{"y": 1}, {"name": "x", "parameters": {"name": "z"}}],
        },
        ensure_ascii=False,
    ),
)


@dataclasses.dataclass
class Written:
    """An output, and what it consists of."""

    tools: str | None
    reasoning: str | None
    text: str
    thoughts: str = ""
    content: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    starts_in_reasoning: bool = False


def hermes(name, arguments):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def plain(name, arguments, key="arguments"):
    return f'{{"name": "{name}", "{key}": {arguments}}}'


def deepseek(name, arguments):
    return f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>"


TWO_HERMES = f"{hermes(*F)}\n{hermes(*G)}"
TWO_MISTRAL = f"[TOOL_CALLS] [{plain(*F)}, {plain(*G)}]"
TWO_DEEPSEEK = f"<｜tool▁calls▁begin｜>{deepseek(*F)}\n{deepseek(*G)}<｜tool▁calls▁end｜>"
FIRST_HERMES = f'<tool_call>\n{{"arguments": {F[1]}, "name": "f"}}\n</tool_call>'
WELL = [
    Written(
        "hermes",
        "qwen3",
        f"<think>\nI {{}} <tool_call>\n</think>\n\nSo:\n{TWO_HERMES}",
        "I {} <tool_call>",
        "So:",
        (F, G),
    ),
    Written("qwen3", None, f"{TWO_HERMES}\nThat's it.", "", "That's it.", (F, G)),
    Written("hermes", None, f"{FIRST_HERMES}\n{FIRST_HERMES.removesuffix('</tool_call>')}", calls=(F, F)),
    Written("hermes", "qwen3", "Wörds 😀, and no call: 1 < 2", content="Wörds 😀, and no call: 1 < 2"),
    Written("hermes", "qwen3", "aha </think> yes", "aha", "yes", starts_in_reasoning=True),
    Written(None, "deepseek_r1", "<think>\naha\n</think>\n\nyes\n", "aha", "yes\n", starts_in_reasoning=True),
    Written("llama3", None, f"{plain(*F, 'parameters')}; {plain(*G, 'parameters')}", calls=(F, G)),
    Written(
        "llama3_json", None, f'<|python_tag|>{{"type": "function", {plain(*F, "parameters")[1:]}', calls=(F,)
    ),
    Written(
        "llama3",
        "deepseek_r1",
        f"so</think>\n\n{plain(*F, 'parameters')}",
        "so",
        "",
        (F,),
        starts_in_reasoning=True,
    ),
    Written("mistral", None, f"Well {TWO_MISTRAL}", content="Well", calls=(F, G)),
    Written("mistral", None, f"[TOOL_CALLS]f[ARGS]{F[1]}[TOOL_CALLS]get_more-2{{}}", calls=(F, G)),
    Written("mistral", "mistral", f"[THINK]so[/THINK][TOOL_CALLS]f[CALL_ID]a1[ARGS]{F[1]}", "so", "", (F,)),
    Written(
        "deepseek_r1",
        "deepseek_r1",
        f"so</think>\n\nYes {TWO_DEEPSEEK}",
        "so",
        "Yes",
        (F, G),
        starts_in_reasoning=True,
    ),
    Written(
        "deepseek_v3",
        None,
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{F[1]}<｜tool▁call▁end｜>",
        calls=(F,),
    ),
]
WELL += [
    Written("hermes", None, f"{hermes(*H)}\n{hermes(*G)} so", content="so", calls=(H, G)),
    Written(
        "hermes", None, f'<tool_call>\n{{"arguments": {H[1]}, "name": "save"}}\n</tool_call>', calls=(H,)
    ),
    Written("mistral", None, f"[TOOL_CALLS] [{plain(*H)}, {plain(*J)}, {plain(*G)}]", calls=(H, J, G)),
    Written("mistral", None, f"[TOOL_CALLS]save[ARGS]{J[1]}[TOOL_CALLS]get_more-2{{}}", calls=(J, G)),
    Written("llama3", None, f"{plain(*J, 'parameters')}; {plain(*H, 'parameters')}", calls=(J, H)),
    Written(
        "deepseek_r1",
        None,
        f"<｜tool▁calls▁begin｜>{deepseek(*J)}\n{deepseek(*H)}<｜tool▁calls▁end｜>",
        calls=(J, H),
    ),
]
THOUGHT = "<|channel|>analysis<|message|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>"


def harmony(name, arguments, kind=" <|constrain|>json"):
    return f"<|channel|>commentary to=functions.{name}{kind}<|message|>{arguments}<|call|>"


WELL += [
    Written("openai", "openai_gptoss", f"{THOUGHT}so {{<|end|>{FINAL}Yes.<|return|>", "so {", "Yes."),
    Written(None, "openai_gptoss", f"{THOUGHT}so<|end|>{FINAL}1 < 2 |> {{", "so", "1 < 2 |> {"),
    Written(None, "openai_gptoss", f"so<|end|>{FINAL}Yes", "so", "Yes", starts_in_reasoning=True),
    Written("openai", "openai_gptoss", f"{THOUGHT}a<|end|><|start|>assistant{harmony(*H)}", "a", "", (H,)),
    Written("openai", None, f"{harmony(*F)}<|start|>assistant{harmony(*G, ' json')}", calls=(F, G)),
    # Text before a call, thoughts after one, and the recipient before the channel.
    Written(
        "openai",
        "openai_gptoss",
        f"{THOUGHT}a<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        "<|start|>assistant to=functions.save<|channel|>commentary <|constrain|>json<|message|>"
        f"{J[1]}<|call|>"
        f"<|start|>assistant{THOUGHT}b",
        "ab",
        "I look.",
        (J,),
    ),
    Written(
        "openai",
        "openai_gptoss",
        " to=get_more-2<|channel|>analysis<|message|>{}",
        calls=(G,),
    ),
    Written("openai", None, "<|channel|>final <|constrain|>json<|message|>[1]<|return|>", content="[1]"),
]
BADLY = [
    Written("openai", "openai_gptoss", "Plain <|chan", content="Plain <|chan"),
    Written("openai", "openai_gptoss", f"{THOUGHT}so<|en", "so<|en"),
    Written("openai", "openai_gptoss", f"{THOUGHT}so{FINAL}Yes", "so", "Yes"),
    Written("openai", None, "<|channel|>commentary to=", content="<|channel|>commentary to="),
    Written("openai", None, harmony("f", '{"a": '), calls=(("f", '{"a": <|call|>'),)),
    Written("openai", None, harmony("f", "print(1)", " code"), calls=(("f", "print(1)"),)),
    # What is no call stays text, to the last character.
    Written("hermes", None, "<tool_call> no JSON </tool_call>", content="<tool_call> no JSON </tool_call>"),
    Written(
        "hermes", None, 'a <tool_call>\n{"name": "f"}\n</to', content='a <tool_call>\n{"name": "f"}\n</to'
    ),
    Written("hermes", None, "a <tool_c", content="a <tool_c"),
    Written("hermes", "qwen3", "<think>so", "so"),
    Written("hermes", "qwen3", "<thi", content="<thi"),
    Written("hermes", "qwen3", "<think>so</thi", "so</thi"),
    Written(
        "llama3", None, 'My {"name": "f", "parameters": {}}', content='My {"name": "f", "parameters": {}}'
    ),
    Written("llama3", None, '{"name": "f"}', content='{"name": "f"}'),
    Written(
        "mistral", None, f"[{plain(*F)}, {plain(*F)}] [TOOL_", content=f"[{plain(*F)}, {plain(*F)}] [TOOL_"
    ),
    Written("deepseek_r1", None, "<｜tool▁call▁begin｜>function", content="<｜tool▁call▁begin｜>function"),
    # A call that has begun is one; its arguments are what the model has written.
    Written("hermes", None, hermes("f", '{"a": '), calls=(("f", '{"a": }\n'),)),
    Written("hermes", None, '<tool_call>{"name": "f", "arguments": {"a": [1', calls=(("f", '{"a": [1'),)),
    Written(
        "hermes",
        None,
        '<tool_call>{"name": "f", "arguments": {"a": 1}\n</tool_call>',
        calls=(("f", '{"a": 1}'),),
    ),
    Written(
        "mistral", None, '[TOOL_CALLS] [{"name": "f", "arguments": {"a": }}]', calls=(("f", '{"a": }}]'),)
    ),
    Written("mistral", None, "[TOOL_CALLS]f[ARGS]{broken", calls=(("f", "{broken"),)),
]


def taken_apart(written, pieces, *, parallel=True):
    """Returns thoughts, content and calls of an output that comes in pieces."""
    tools, reasoning = TOOL_FORMATS.get(written.tools), REASONING_FORMATS.get(written.reasoning)
    parser = OutputParser(response_template(tools, reasoning, written.starts_in_reasoning), parallel=parallel)
    thoughts = content = ""
    calls = {}
    for i, piece in enumerate(pieces):
        new = parser.feed(piece, is_last=i == len(pieces) - 1)
        assert new.get("reasoning") == new.get("reasoning_content")
        thoughts += new.get("reasoning", "")
        content += new.get("content", "")
        for call in new.get("tool_calls", ()):
            index, function = call["index"], call["function"]
            assert ("id" in call) == ("name" in function) == (index not in calls), (
                "only the first part names it"
            )
            name, arguments = calls.get(index) or (function["name"], "")
            calls[index] = name, arguments + function["arguments"]
    assert list(calls) == list(range(len(calls)))
    return thoughts, content, tuple(calls.values())


def pieces_of(text, rng):
    sizes = rng.choice([[1], [1, 2, 3], [1, 5, 20], [40, 3]])
    pieces = []
    while text:
        size = rng.choice(sizes)
        pieces.append(text[:size])
        text = text[size:]
    return pieces


@pytest.mark.thorough
@pytest.mark.parametrize("written", WELL + BADLY, ids=lambda w: f"{w.tools}-{w.reasoning}-{w.text[:20]!r}")
def test_pieces_make_the_whole(written):
    expected = written.thoughts, written.content, written.calls
    assert taken_apart(written, [written.text]) == expected
    assert taken_apart(written, [written.text, ""]) == expected
    for seed in range(300):
        pieces = pieces_of(written.text, random.Random(seed))
        assert taken_apart(written, pieces) == expected, pieces


@pytest.mark.thorough
@pytest.mark.parametrize("written", [w for w in WELL if w.tools], ids=lambda w: f"{w.tools}-{w.text[:20]!r}")
def test_an_output_that_is_cut_off_anywhere_is_still_taken_apart(written):
    for end in range(len(written.text)):
        thoughts, content, calls = taken_apart(written, [written.text[:end]])
        assert (thoughts, content, calls) == taken_apart(written, list(written.text[:end]) or [""])
        assert [name for name, _ in calls] == [name for name, _ in written.calls][: len(calls)]
        for (_, arguments), (_, whole) in zip(calls, written.calls, strict=False):
            assert whole.startswith(arguments), "no part of a tag behind them belongs to them"


@pytest.mark.parametrize("end", range(1, len("</tool_call>")))
def test_a_call_that_is_cut_within_its_closing_tag(end):
    for text in (hermes(*F), FIRST_HERMES):
        cut = text.removesuffix("</tool_call>") + "</tool_call>"[:end]
        for pieces in ([cut], list(cut)):
            assert taken_apart(Written("hermes", None, cut), pieces) == ("", "", (F,))


@pytest.mark.parametrize(
    ("reasoning", "prompt", "starts_in_reasoning"),
    [
        ("qwen3", "<|im_start|>assistant\n", False),
        ("qwen3", "<|im_start|>assistant\n<think>\n", True),
        ("qwen3", "<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("deepseek_r1", "<｜Assistant｜>", True),
        ("deepseek_r1", "<｜Assistant｜><think>\n", True),
        ("deepseek_r1", "<｜Assistant｜></think>", False),
        ("mistral", "[/INST]", False),
        ("openai_gptoss", "<|end|><|start|>assistant", False),
        ("openai_gptoss", "<|start|>assistant<|channel|>analysis<|message|>", True),
    ],
)
def test_prompts_tell_whether_a_model_is_thinking(reasoning, prompt, starts_in_reasoning):
    assert REASONING_FORMATS[reasoning].starts_in_reasoning(prompt) == starts_in_reasoning


def test_arguments_come_while_they_are_written():
    parser = OutputParser(response_template(TOOL_FORMATS["hermes"], None, False), parallel=True)
    new = [parser.feed(character, is_last=False) for character in hermes("f", '{"city": "Paris"}')]
    parts = [call["function"]["arguments"] for part in new for call in part.get("tool_calls", ())]
    assert len([part for part in parts if part]) == len('{"city": "Paris"}') - 2, (
        "a space and a brace wait for what follows"
    )
    assert "".join(parts) == '{"city": "Paris"', "the last brace comes with the end"
    (end,) = parser.feed("", is_last=True)["tool_calls"]
    assert end["function"] == {"arguments": "}"}


@pytest.mark.parametrize("tools", ["hermes", "mistral", "deepseek_r1", "openai"])
def test_only_the_first_call_counts_where_calls_are_not_parallel(tools):
    written = next(w for w in WELL if w.tools == tools and len(w.calls) > 1)
    assert taken_apart(written, list(written.text), parallel=False)[2] == written.calls[:1]


@pytest.mark.parametrize("tools", sorted(TOOL_FORMATS))
def test_random_text_loses_nothing(tools):
    tags = [
        *TOOL_FORMATS[tools].tags,
        '{"name": "',
        '", "arguments": ',
        "{",
        "}",
        "]",
        ";",
        ",",
        " ",
        "\n",
        "x",
        '"',
        "```json",
        "function",
    ]
    without_thoughts = response_template(TOOL_FORMATS[tools], None, False)
    for seed in range(300):
        rng = random.Random(seed)
        text = "".join(rng.choices([*tags, "<think>", "</think>"], k=30))
        whole = OutputParser(without_thoughts, parallel=True).feed(text, is_last=True)
        if "tool_calls" not in whole and "｜tool▁calls▁end" not in text and tools != "openai":
            assert whole["content"] == text
        pieces = pieces_of(text, rng)
        assert taken_apart(Written(tools, "qwen3", text), pieces) == taken_apart(
            Written(tools, "qwen3", text), [text]
        )


@pytest.mark.thorough
@pytest.mark.parametrize("tools", sorted(TOOL_FORMATS))
@pytest.mark.parametrize(
    "unit", [" ", "\n", "a", '"', "{", "}", ",", "<", "[", '", "arguments": ', '{"name": "f']
)
def test_no_text_takes_long(tools, unit):
    written = Written(tools, "qwen3", unit * (20_000 // len(unit)))
    start = time.process_time()
    taken_apart(written, [written.text])
    taken_apart(written, [written.text[i : i + 20] for i in range(0, 20_000, 20)])
    assert time.process_time() - start < 5, "a search that is quadratic in the text takes minutes"
