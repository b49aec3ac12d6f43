"""What docs/vllm-compatibility.md says exists, exists; what it says does not, does not."""

import dataclasses
import importlib
import inspect
import re
from pathlib import Path

import pytest

import jax_paged
from jax_paged import (
    LLM,
    AsyncLLMEngine,
    BeamSearchParams,
    EngineArgs,
    LLMEngine,
    SamplingParams,
)
from jax_paged.arguments.ignored import ANY
from jax_paged.config.engine_args import _NONE_IS_DEFAULT
from jax_paged.config.ignored_args import IGNORED
from jax_paged.outputs import BeamSearchSequence, CompletionOutput, RequestOutput
from jax_paged.sampling_params import IGNORED as SAMPLING_IGNORED
from jax_paged.server.protocol.requests import ChatRequest, CompletionRequest
from jax_paged.server.protocol.responses import ApiError
from jax_paged.server.routes.pooling import EmbeddingRequest

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "vllm-compatibility.md").read_text(encoding="utf-8")
TEXT = re.sub(r"^```.*?^```$", "", TEXT, flags=re.MULTILINE | re.DOTALL)
# vLLM's classes that have another name here, and keywords of Python.
RENAMED = {"AsyncLLM", "FlexibleArgumentParser", "import", "from"}
# What vLLM does not have, or exports elsewhere.
OWN = {"EmbedsPrompt", "ExtraArgs", "Hook", "LLM", "LLMEngine", "Logprob", "LogitsProcessor", "PromptType"}


def section(heading: str) -> str:
    return re.split(r"^## ", TEXT.split(f"\n## {heading}\n")[1], flags=re.MULTILINE)[0]


def rows(heading: str) -> list[list[str]]:
    """Returns the cells of the tables of a section, without heads."""
    found = []
    for line in section(heading).splitlines():
        cells = [cell.strip() for cell in line.strip("|").replace(r"\|", "/").split(" |")]
        if line.startswith("| `") or (line.startswith("| ") and len(cells) > 2 and "vLLM" not in cells[:2]):
            found.append(cells)
    return found


def names(cell: str) -> list[str]:
    """Returns the names in a cell that are in `code`: of a call the function, of a path the last part."""
    spans = [re.split(r"[( ]", span)[0] for span in re.findall(r"`([^`]+)`", cell)]
    return [
        span.split(".")[-1] for span in spans if re.fullmatch(r"[A-Za-z_][\w.]*", span) and span != "with"
    ]


def fields(cls: type) -> set[str]:
    return {field.name for field in dataclasses.fields(cls)}


def is_missing(here: str) -> bool:
    return here.startswith("none")


def test_imports():
    modules = [jax_paged, *map(importlib.import_module, ("jax_paged.inputs", "jax_paged.outputs"))]
    checked = 0
    for vllm, here, *_ in rows("Where names are imported from"):
        for name in names(vllm):
            if "ImportError" in here:
                with pytest.raises(ImportError):
                    getattr(jax_paged, name)
            elif not is_missing(here) and name not in RENAMED:
                assert any(hasattr(module, name) for module in modules), name
                checked += 1
    assert checked > 20


def test_everything_that_vllm_exports_too_is_in_the_table_of_imports():
    text = section("Where names are imported from")
    for name in set(jax_paged.__all__) - OWN - {"paged_inputs"}:
        assert name in text, name


def test_methods_and_arguments_of_llm():
    known = fields(EngineArgs) | {
        "LLM",
        "LoRARequest",
        "BeamSearchOutput",
        "PoolingParams",
        "lora_int_id",
        "llm_engine",
        "max_seq_length",
    }
    known |= {"token_embed"}  # a task
    num_methods, num_arguments = 0, 0
    for what, _, here, *_ in rows("LLM"):
        for method, argument in re.findall(r"`(\w+)\((\w+)=\.\.\.\)`", what):
            if hasattr(LLM, method):
                assert (argument in inspect.signature(getattr(LLM, method)).parameters) != is_missing(here), (
                    what
                )
                num_arguments += 1
        what = re.sub(r"`\w+\(\w+=.*?\)`", "", what)
        for name in names(what):
            # A task of vLLM's; and what another method does here.
            if name not in ("plugin", "collective_rpc", "update_weights", "lora_request"):
                exists = name in known or hasattr(LLM, name) or hasattr(LLMEngine, name)
                assert exists != is_missing(here), what
                num_methods += 1
    assert num_methods > 25
    assert num_arguments > 5


def test_parameters():
    checked = 0
    known = fields(SamplingParams) | fields(BeamSearchParams) | set(SAMPLING_IGNORED) | {"max_model_len"}
    for what, _, here, *_ in rows("SamplingParams"):
        for name in names(what):
            assert (name in known) != is_missing(here), name
            checked += 1
    assert checked > 30
    for name in SAMPLING_IGNORED:
        assert f"`{name}`" in section("SamplingParams"), name


def test_outputs():
    for what, _, here, *_ in rows("Outputs"):
        for owner, name in re.findall(r"`(\w+)\.(\w+)`", what):
            cls = {"RequestOutput": RequestOutput, "CompletionOutput": CompletionOutput}[owner]
            assert (name in fields(cls) or hasattr(cls, name)) != is_missing(here), what
    assert not {"logprobs", "lora_request"} & fields(BeamSearchSequence)


def test_methods_of_engines():
    checked = 0
    for what, _, here, *_ in rows("LLMEngine and AsyncLLMEngine"):
        of_async = "AsyncLLMEngine" in what or "AsyncLLMEngine" in here
        for name in names(what):
            if name in ("arrival_time", "request_id", "AsyncLLMEngine"):
                continue
            exists = hasattr(AsyncLLMEngine if of_async else LLMEngine, name) or (
                is_missing(here) is False and hasattr(LLMEngine, name)
            )
            assert exists != is_missing(here), name
            checked += 1
    assert checked > 12


def test_arguments_of_engines():
    listed = {name for what, *_ in rows("EngineArgs") for name in names(what)}
    assert listed <= fields(EngineArgs) | set(IGNORED) | {"rope_scaling"}
    missing = fields(EngineArgs) - set(names(TEXT))
    assert not missing, f"arguments that the document does not name: {missing}"
    text = section("EngineArgs")
    (none_is_default,) = re.findall(r"^`None` for ((?:.|\n)*?) takes the default", text, re.MULTILINE)
    assert set(names(none_is_default)) == set(_NONE_IS_DEFAULT)


def test_ignored_arguments():
    text = section("EngineArgs")
    harmless, others = text.split("whatever their\nvalue:\n")[1].split("These are accepted")
    assert set(names(harmless)) == {name for name, allowed in IGNORED.items() if allowed is ANY}
    table = [line for line in others.splitlines() if line.startswith("| `")]
    listed = {}
    for line in table:
        what, allowed = line.strip("| ").split(" | ")
        listed |= dict.fromkeys(names(what.split("(")[0]) + names(what.partition(")")[2]), allowed)
    assert set(listed) == {name for name, allowed in IGNORED.items() if allowed is not ANY}
    for name, allowed in listed.items():
        for value in IGNORED[name] or ():
            shown = {"{}": "empty", "[]": "empty", "''": "empty", "0.0": "0"}.get(repr(value), repr(value))
            assert shown.replace("'", '"') in allowed, (name, value)


def check_fields(body: ChatRequest | CompletionRequest) -> None:
    """Raises an error for a field that is not built, or whose value is not allowed."""
    body.check_unsupported()
    body.sampling_params({})


def test_fields_of_the_server():
    bodies = {"chat": ChatRequest, "completion": CompletionRequest}
    needed = {"chat": {"messages": [{"role": "user", "content": "a"}]}, "completion": {"prompt": "a"}}
    checked = 0
    for what, _, here, *_ in rows("HTTP server"):
        for part in what.split(";"):
            kinds = [kind for kind in bodies if f"of a {kind}" in part] or list(bodies)
            for name in names(part):
                if here.startswith("an error") and "with" not in part:
                    for kind in kinds:
                        with pytest.raises((ValueError, ApiError), match=name):
                            check_fields(bodies[kind](**needed[kind], **{name: "x"}))
                else:
                    assert any(name in bodies[kind].model_fields for kind in kinds), name
                checked += 1
    assert checked > 20
    assert "dimensions" in EmbeddingRequest.model_fields
