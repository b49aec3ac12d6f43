"""Outputs have the form that their requests ask for, and nobody else notices."""

import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from jax_paged import LLM, SamplingParams, StructuredOutputsParams
from jax_paged.core.stop_conditions import NO_TOKEN_ALLOWED

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
    "a keyword that is not supported": ({"json": {"not": {"type": "string"}}}, 'json .*"not"'),
    "a contradiction": ({"json": {"type": "integer", "minimum": 3, "maximum": 2}}, "json .*minimum"),
    "an unknown type": ({"json": {"type": "text"}}, "json .*Invalid type: text"),
    "a reference to nowhere": ({"json": {"$ref": "#/nobody"}}, "json .*nobody"),
    "a regular expression": ({"regex": "a(b"}, "regex .*unclosed group"),
    "a grammar": ({"grammar": "start: nobody"}, "grammar .*nobody"),
    "a grammar without words": ({"grammar": "start: a\na: a"}, "grammar can't be used"),
    "a tag without a trigger": ({"structural_tag": TAG | {"triggers": ["<g"]}}, "structural_tag .*begin"),
    "tags that are none": ({"structural_tag": {}}, "structural_tag .*triggers"),
}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(
        "pagelet",
        dtype="float32",
        attention_backend="xla",
        matmul_backend="xla",
        max_num_seqs=8,
        max_num_batched_tokens=64,
        num_gpu_blocks_override=400,
    ) as llm:
        llm.llm_engine.executor.wait_until_compiled()
        yield llm


def params(seed: int, form: dict[str, Any], **kwargs: Any) -> SamplingParams:
    settings = {"temperature": 1.0, "max_tokens": 200, "seed": seed} | kwargs
    return SamplingParams(structured_outputs=StructuredOutputsParams(**form), **settings)


def generate(llm: LLM, each: list[SamplingParams]) -> list[Any]:
    return llm.generate(["What is a block table?"] * len(each), each, use_tqdm=False)


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
    with pytest.raises(ValueError, match=f"structured_outputs.{message}"):
        generate(llm, [params(0, form)])
