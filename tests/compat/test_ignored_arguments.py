"""vLLM's arguments of engines: harmless ones are accepted with one warning, others are errors."""

import argparse
import dataclasses
import re
import warnings
from pathlib import Path

import pytest

from jax_paged import LLM, AsyncEngineArgs, EngineArgs, SamplingParams
from jax_paged.config.ignored_args import IGNORED

DOCUMENT = Path(__file__).parent.parent.parent / "docs" / "vllm-compatibility.md"


def test_one_warning_names_all_that_is_ignored() -> None:
    with pytest.warns(UserWarning, match="EngineArgs ignores") as caught:
        args = EngineArgs(
            max_num_seqs=3,
            enforce_eager=True,  # pyright: ignore[reportCallIssue]
            disable_log_stats=True,  # pyright: ignore[reportCallIssue]
            compilation_config={"level": 3},  # pyright: ignore[reportCallIssue]
            trust_remote_code=False,  # pyright: ignore[reportCallIssue]
        )
    (warning,) = caught
    names = "compilation_config, disable_log_stats, enforce_eager, trust_remote_code"
    assert str(warning.message).startswith(f"EngineArgs ignores {names},")
    assert warning.filename == __file__
    assert args == EngineArgs(max_num_seqs=3)


def test_one_warning_is_in_the_singular_and_names_the_line_of_replace() -> None:
    with pytest.warns(UserWarning, match="SamplingParams ignores skip_clone, which has no meaning") as caught:
        dataclasses.replace(SamplingParams(), skip_clone=True)  # pyright: ignore[reportCallIssue]
    assert caught[0].filename == __file__
    with pytest.warns(UserWarning, match="ignores device, enforce_eager, which have no meaning"):
        EngineArgs(device="auto", enforce_eager=True)  # pyright: ignore[reportCallIssue]


def test_llm_takes_them_too() -> None:
    with pytest.warns(UserWarning, match="ignores enforce_eager") as caught, pytest.raises(ValueError):
        LLM("/nowhere/at/all", "/nowhere/either", enforce_eager=True)
    assert caught[0].filename == __file__


def test_what_would_change_a_result_is_an_error() -> None:
    bad = {
        "trust_remote_code": True,
        "hf_config_path": "elsewhere",
        "enable_prompt_adapter": True,
        "cpu_offload_gb": 1,
    }
    with pytest.raises(ValueError) as error:
        EngineArgs(**bad)  # pyright: ignore[reportArgumentType]
    lines = sorted(str(error.value).splitlines())
    assert [line.split("`")[1] for line in lines] == sorted(bad)
    assert (
        "`hf_config_path` must be None because this engine does not support other values, got 'elsewhere'"
        in lines
    )
    assert EngineArgs(distributed_executor_backend=None) == EngineArgs()  # pyright: ignore[reportArgumentType]
    with pytest.raises(
        ValueError, match="must be one of 'uni', 'mp', 'ray', 'external_launcher', got 'dask'"
    ):
        EngineArgs(distributed_executor_backend="dask")  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="nonsense"):
        EngineArgs(nonsense=1)  # pyright: ignore[reportCallIssue]


def test_none_is_the_default_where_vllm_says_so() -> None:
    args = EngineArgs(
        seed=None,  # pyright: ignore[reportArgumentType]
        block_size=None,  # pyright: ignore[reportArgumentType]
        enable_prefix_caching=None,  # pyright: ignore[reportArgumentType]
        enable_chunked_prefill=None,  # pyright: ignore[reportArgumentType]
    )
    assert args == EngineArgs()


def test_no_field_is_ignored_and_none_warns() -> None:
    fields = {field.name: field.default for field in dataclasses.fields(EngineArgs)}
    fields |= {"max_compile_s": 0}  # the default in tests
    assert not fields.keys() & IGNORED.keys()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert EngineArgs(**fields) == EngineArgs()


def test_problems_are_listed_together() -> None:
    with pytest.raises(ValueError) as error:
        EngineArgs(model="", max_model_len=1, block_size=3, max_logprobs=-2, seed=-1)
    names = [line.split("`")[1] for line in str(error.value).splitlines()]
    assert names == ["model", "block_size", "max_model_len", "max_logprobs", "seed"]


def test_one_token_is_no_model_len() -> None:
    with pytest.raises(ValueError, match=r"`max_model_len` must be an integer of at least 2.*got 1"):
        EngineArgs(max_model_len=1)
    EngineArgs(max_model_len=2)


def test_async_engine_args_are_engine_args() -> None:
    args = AsyncEngineArgs(model="m", seed=5)
    assert isinstance(args, EngineArgs)
    with pytest.warns(UserWarning, match="AsyncEngineArgs ignores disable_log_requests"):
        AsyncEngineArgs(disable_log_requests=True)  # pyright: ignore[reportCallIssue]


@pytest.mark.parametrize("cls", [EngineArgs, AsyncEngineArgs])
def test_command_lines(cls: type[EngineArgs]) -> None:
    parser = cls.add_cli_args(argparse.ArgumentParser())
    parser.add_argument("--mine", default=1)
    line = "--model m --max-model-len 9 --no-enable-prefix-caching --scheduler-delay-factor 0.5 --mine 2"
    args = cls.from_cli_args(parser.parse_args(line.split()))
    assert args == cls(model="m", max_model_len=9, enable_prefix_caching=False, scheduler_delay_factor=0.5)
    assert cls.from_cli_args(parser.parse_args([])) == cls()


def test_the_document_names_all_that_is_ignored() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    named = set(re.findall(r"`(\w+)", text))
    assert IGNORED.keys() <= named
    assert {field.name for field in dataclasses.fields(EngineArgs)} <= named
