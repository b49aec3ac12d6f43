"""Outputs have the form that their requests ask for, and nobody else notices."""

import datetime
import functools
import json
import math
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from helpers.random_engine import RandomExecutor
from helpers.real_model import finished_outputs, make_executor, reschedule, reset
from helpers.schemas import SchemaMaker

from jax_paged import LLM, EngineArgs, LLMEngine, RequestOutputKind, SamplingParams, StructuredOutputsParams
from jax_paged.core.stop_conditions import NO_TOKEN_ALLOWED
from jax_paged.lab.recording import replay

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "count": {"type": "integer", "minimum": 3, "maximum": 20},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "count", "tags"],
    "additionalProperties": False,
}
TAG = {"structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f"]}
BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "a keyword that is not supported": ({"json": {"$dynamicRef": "#a"}}, r"json` .*\$dynamicRef"),
    "a contradiction": ({"json": {"type": "integer", "minimum": 3, "maximum": 2}}, "json` .*minimum"),
    "an unknown type": ({"json": {"type": "text"}}, "json` .*Invalid type: text"),
    "a reference to nowhere": ({"json": {"$ref": "#/nobody"}}, "json` .*nobody"),
    "a regular expression": ({"regex": "a(b"}, "regex` .*unclosed group"),
    "a grammar": ({"grammar": "start: nobody"}, "grammar` .*nobody"),
    "a grammar without words": ({"grammar": "start: a\na: a"}, "grammar` .*no output can satisfy it"),
    "a tag without a trigger": ({"structural_tag": TAG | {"triggers": ["<g"]}}, "structural_tag` .*begin"),
    "tags that are none": ({"structural_tag": {}}, "structural_tag` .*triggers"),
}


FORMATS = jsonschema.FormatChecker()
FORMATS.checkers = {**jsonschema.Draft202012Validator.FORMAT_CHECKER.checkers}


@FORMATS.checks("date", ValueError)
def is_date(value: object) -> bool:
    """RFC 3339 has a year 0, and Python has none; it was a leap year, as 4 was."""
    if isinstance(value, str):
        datetime.date.fromisoformat(re.sub("^0000", "0004", value))
    return True


SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "attention_backend": "xla",
    "matmul_backend": "xla",
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "num_gpu_blocks_override": 400,
    "num_scheduler_steps": 4,
}


def make_llm(model: str) -> LLM:
    """Returns an LLM with the largest bucket of each kind."""
    executor = make_executor(EngineArgs(model, **SETTINGS))
    llm = LLM(model, executor=executor, **SETTINGS)
    executor.wait_until_compiled()
    return llm


@pytest.fixture(scope="module")
def session_llm() -> Iterator[LLM]:
    with make_llm("pagelet") as llm:
        yield llm


@pytest.fixture
def llm(session_llm: LLM) -> LLM:
    reset(session_llm.llm_engine)
    return session_llm


@pytest.fixture
def random_llm(checkpoint: Path) -> Iterator[LLM]:
    with make_llm(str(checkpoint)) as llm:
        yield llm


def check(schema: dict[str, Any], text: str) -> None:
    """Validates a text, with what jsonschema knows of formats."""
    jsonschema.Draft202012Validator(schema, format_checker=FORMATS).validate(json.loads(text))


def with_pool_of(llm: LLM, num_blocks: int) -> None:
    """Lets the pool look so small."""
    reschedule(llm.llm_engine, num_blocks=num_blocks)


def params(seed: int, form: dict[str, Any], **kwargs: Any) -> SamplingParams:
    settings = {"temperature": 1.0, "max_tokens": 200, "seed": seed} | kwargs
    return SamplingParams(structured_outputs=StructuredOutputsParams(**form), **settings)


def generate(llm: LLM, each: list[SamplingParams]) -> list[Any]:
    return llm.generate(["What is a block table?"] * len(each), each, use_tqdm=False)


@pytest.mark.thorough
def test_json(llm: LLM) -> None:
    outputs = generate(llm, [params(seed, {"json": SCHEMA}, n=4) for seed in range(6)])
    completions = [completion for output in outputs for completion in output.outputs]
    for completion in completions:
        assert completion.finish_reason == "stop"
        jsonschema.validate(json.loads(completion.text), SCHEMA)
    assert len({completion.text for completion in completions}) > 12


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ({"regex": r"[0-9]{3}-[a-z]{1,5}"}, r"[0-9]{3}-[a-z]{1,5}"),
        ({"choice": ["yes", "no", 'may"be\n', "yesterday"]}, 'yes|no|may"be\n|yesterday'),
        ({"grammar": 'start: "x" /[0-9]/ ("," /[0-9]/){0,5}'}, r"x[0-9](,[0-9]){0,5}"),
    ],
)
def test_patterns(llm: LLM, form: dict[str, Any], pattern: str) -> None:
    for output in generate(llm, [params(seed, form) for seed in range(8)]):
        (completion,) = output.outputs
        assert re.fullmatch(pattern, completion.text), completion.text
        assert completion.finish_reason == "stop"


def test_structural_tag(llm: LLM) -> None:
    """Text is free until a trigger; bias makes the model write one."""
    ids = llm.get_tokenizer().encode("<f", add_special_tokens=False)
    bias, texts = dict.fromkeys(ids, 6.0), []
    each = [params(seed, {"structural_tag": TAG}, logit_bias=bias) for seed in range(8)]
    for output in generate(llm, each):
        (completion,) = output.outputs
        for found in re.findall(r"<f(.*?)</f>", completion.text, re.DOTALL):
            jsonschema.validate(json.loads(found.removeprefix(">")), SCHEMA)
            texts.append(found)
    assert texts


def test_dead_end_is_an_error(llm: LLM) -> None:
    form = {"grammar": 'start: "a" b\nb: b "c"'}
    for output in generate(llm, [params(0, form), params(1, form, n=2)]):
        for completion in output.outputs:
            assert (completion.finish_reason, completion.stop_reason) == ("abort", NO_TOKEN_ALLOWED)


@pytest.mark.parametrize("name", BROKEN)
def test_bad_forms_are_named(llm: LLM, name: str) -> None:
    form, message = BROKEN[name]
    with pytest.raises(ValueError, match=f"`structured_outputs.{message}.*, got "):
        generate(llm, [params(0, form)])


def test_a_form_begins_behind_the_end_of_thinking(llm: LLM) -> None:
    """Until then everything may be drawn but the end of the output."""
    form = {"regex": "[0-9]{4}", "starts_after": "the"}
    bias = dict.fromkeys(llm.get_tokenizer().encode("the", add_special_tokens=False), 5.0)
    for output in generate(llm, [params(seed, form, logit_bias=bias) for seed in range(6)]):
        (completion,) = output.outputs
        assert re.fullmatch(r".*?the[0-9]{4}", completion.text, re.DOTALL), completion.text
    tokenizer = llm.get_tokenizer()
    prompt = {"prompt_token_ids": tokenizer.encode("Think: the", add_special_tokens=False)}
    (output,) = llm.generate([prompt], params(0, form), use_tqdm=False)
    assert re.fullmatch("[0-9]{4}", output.outputs[0].text)


def test_end_tokens_that_are_ignored_do_not_end_a_form(llm: LLM) -> None:
    for form in ({"regex": "a{1,5}"}, {"json": SCHEMA}):
        (output,) = generate(llm, [params(1, form, ignore_eos=True)])
        assert output.outputs[0].finish_reason == "stop"
        if "regex" in form:
            assert output.outputs[0].text == "aaaaa"


def test_what_the_form_allows_is_drawn_as_without_it(llm: LLM) -> None:
    """Neither a form that allows everything changes a token, nor one that allows what is drawn."""
    plain = SamplingParams(temperature=1.0, seed=5, max_tokens=30)
    (free,) = generate(llm, [plain])
    text = free.outputs[0].text
    for form in ({"regex": "(?s:.*)"}, {"choice": [text, "x" + text, text + "."]}):
        (output,) = generate(llm, [params(5, form, max_tokens=30)])
        assert (output.outputs[0].text, output.outputs[0].token_ids) == (text, free.outputs[0].token_ids)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "seeds", [range(60), pytest.param(range(60, 620), marks=pytest.mark.slow)], ids=["60", "560"]
)
@pytest.mark.parametrize("model", ["pagelet", "random"])
def test_schemas(request: pytest.FixtureRequest, model: str, seeds: range) -> None:
    """Each schema at temperature 1; 4 samples now and then; preempted, swapped, cached and streamed."""
    llm = request.getfixturevalue("llm" if model == "pagelet" else "random_llm")
    engine, schemas = llm.llm_engine, {str(seed): SchemaMaker(seed).schema() for seed in seeds}
    num_traces = engine.executor.runner.compiled.num_traces
    plain = SamplingParams(temperature=1.0, seed=1, max_tokens=40)
    alone = [list(o.outputs[0].token_ids) for o in generate(llm, [plain])]
    texts: dict[tuple[str, int], str] = defaultdict(str)
    reasons: dict[tuple[str, int], str | None] = {}
    with_pool_of(llm, 26)  # full, so that requests lose their blocks
    for name, schema in schemas.items():
        seed = int(name)
        settings = {"n": 4 if seed % 5 == 0 else 1, "max_tokens": 300, "output_kind": RequestOutputKind.DELTA}
        engine.add_request(name, "An object: " * (1 + seed % 7), params(seed, {"json": schema}, **settings))
    engine.add_request("free", "What is a block table?", plain)
    free: list[int] = []
    num_preemptions = 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.request_id == "free":
                free = list(output.outputs[0].token_ids)
                continue
            num_preemptions += output.finished and output.metrics.num_preemptions > 0
            for completion in output.outputs:
                key = output.request_id, completion.index
                texts[key] += completion.text
                reasons[key] = completion.finish_reason
    assert [free] == alone  # to the bit, beside all of these
    assert engine.executor.runner.compiled.num_traces == num_traces
    assert num_preemptions > 0
    whole = [key for key, reason in reasons.items() if reason == "stop"]
    assert {*reasons.values()} <= {"stop", "length"}
    assert len(whole) > 0.8 * len(reasons)  # open objects may go on for ever
    for name, index in whole:
        check(schemas[name], texts[name, index])


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({}, "exactly one"),
        ({"regex": "a", "choice": ["b"]}, "exactly one"),
        ({"json": "[1"}, "must be JSON"),
        ({"json": "[1]"}, "a JSON object"),
        (
            {"json": {"const": math.nan}},
            r"`json` must be a JSON object \(Out of range float values are not JSON compliant:",
        ),
        (
            {"json": {"const": {1, 2}}},
            r"`json` must be a JSON object \(Object of type set is not JSON serializable\), got .*1, 2",
        ),
        ({"json": {"const": "b" * 200_000}}, "the length of `json` must be at most 131072 characters, got 2"),
        (
            {"json": functools.reduce(lambda inner, _: {"not": inner}, range(3000), {})},
            "the nesting depth of `json` must be at most 60, got 61",
        ),
        ({"regex": ""}, "`regex` must be a non-empty string, got ''"),
        ({"choice": [""]}, r"`choice` must be a list of strings, at least one of them not empty, got \[''\]"),
        ({"json_object": "yes"}, "`json_object` must be .*got 'yes'"),
        ({"regex": "a", "starts_after": ""}, "`starts_after` must be .*got ''"),
    ],
)
def test_what_is_no_form(form: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StructuredOutputsParams(**form)


def test_a_form_that_is_given_up_says_why(llm: LLM) -> None:
    form = {"grammar": 'start: e\ne: e e | /[a-z]/ | "(" e ")" | e "x" e'}
    (output,) = generate(llm, [params(0, form, min_tokens=100)])
    (completion,) = output.outputs
    assert completion.finish_reason == "abort"
    assert str(completion.stop_reason).startswith(f"{NO_TOKEN_ALLOWED}: parser error: Too many items")


def test_forks_rollbacks_and_states_follow_the_form(llm: LLM) -> None:
    """What has a form goes on with it after a fork, tokens taken back, a draft and a restored state."""
    engine, form = llm.llm_engine, {"json": SCHEMA}
    (whole,) = generate(llm, [params(3, form)])
    wanted = list(whole.outputs[0].token_ids)
    engine.add_request("a", "What is a block table?", params(3, form))
    seq = engine.scheduler.queues.find("a").sequences[0]  # pyright: ignore[reportOptionalMemberAccess]
    while len(seq.output_token_ids) < 5:
        engine.step()
    engine.fork("a", "b", seed=3)
    engine.rollback("b", 3)
    assert engine.verify("a", [0, 0]).num_accepted == 0  # end tokens, which the form does not allow
    state = engine.state()
    engine.abort_request(["a", "b"])
    engine.wait_if_idle()
    reset(engine)
    engine.load_state(state)
    outputs = finished_outputs(engine)
    assert {name: list(output.outputs[0].token_ids) for name, output in outputs.items()} == {
        "a": wanted,
        "b": wanted,
    }


def test_a_recording_with_forms_replays_decisions_but_not_tokens(llm: LLM) -> None:
    engine, lines = llm.llm_engine, []
    engine.record(lines.append)
    generate(llm, [params(3, {"json": SCHEMA}, n=2)])
    engine.record(None)
    assert replay(lines).num_steps > 3
    with pytest.raises(
        ValueError, match="structured_outputs of each request in `lines` must be None because recordings"
    ):
        engine.replay(lines)


@pytest.mark.thorough
@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("mode", [None, "recompute", "swap"])
def test_any_tokens_that_the_masks_allow_have_the_form(
    folder: str, mode: Any, async_scheduling: bool
) -> None:
    """624 schemas over these settings, drawn as evenly as no model does, in a pool that is full."""
    args = EngineArgs(
        folder,
        num_gpu_blocks_override=22,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        max_model_len=400,
        preemption_mode=mode,
        async_scheduling=async_scheduling,
    )
    part = 2 * [None, "recompute", "swap"].index(mode) + async_scheduling
    schemas = {str(seed): SchemaMaker(seed).schema() for seed in range(part * 104, part * 104 + 104)}
    with LLMEngine(args, RandomExecutor(args)) as engine:
        for name, schema in schemas.items():
            settings = {"n": 4 if int(name) % 5 == 0 else 1, "max_tokens": 300}
            engine.add_request(
                name, "abc" * (1 + int(name) % 5), params(int(name), {"json": schema}, **settings)
            )
        outputs = finished_outputs(engine)
    assert sum(output.metrics.num_preemptions for output in outputs.values()) > 3
    completions = [(name, c) for name, output in outputs.items() for c in output.outputs]
    assert {c.finish_reason for _, c in completions} <= {"stop", "length"}
    whole = [(name, c.text) for name, c in completions if c.finish_reason == "stop"]
    assert len(whole) > 0.8 * len(completions)  # open objects may go on for ever
    for name, text in whole:
        check(schemas[name], text)


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ({"regex": r"(ab|c)*d{2,3}"}, r"(ab|c)*d{2,3}"),
        ({"regex": r"[à-ü日本]{1,4}"}, r"[à-ü日本]{1,4}"),
        ({"regex": r"[0-9]{4}-(0[1-9]|1[0-2])"}, r"[0-9]{4}-(0[1-9]|1[0-2])"),
        ({"choice": ["é", "a\tb", "a\\nb", '"', "", "\x7f"]}, r'é|a\tb|a\\nb|"||\x7f'),
        ({"grammar": 'start: "(" start ")" | "x"'}, r"\(*x\)*"),
        (
            {"grammar": "start: word (SEP word){1,3}\nword: /[a-c]{1,3}/\nSEP: / ?, ?/"},
            r"[a-c]+( ?, ?[a-c]+){1,3}",
        ),
        ({"grammar": 'start: %json {"type": "integer", "minimum": 5, "maximum": 9} "!"'}, r"[5-9]!"),
    ],
)
def test_any_tokens_match_the_pattern(folder: str, form: dict[str, Any], pattern: str) -> None:
    args = EngineArgs(folder, max_num_seqs=8, max_num_batched_tokens=64, max_model_len=400)
    with LLMEngine(args, RandomExecutor(args)) as engine:
        for i in range(20):
            engine.add_request(str(i), "abc", params(i, form, n=1 + i % 3))
        outputs = finished_outputs(engine)
    for output in outputs.values():
        for completion in output.outputs:
            assert completion.finish_reason == "stop"
            assert re.fullmatch(pattern, completion.text), completion.text
            if form.get("grammar", "").startswith('start: "("'):
                assert completion.text.count("(") == completion.text.count(")")
