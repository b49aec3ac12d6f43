"""Arguments of the public classes and methods: NumPy's scalars, paths, dtypes, and misspelt names."""

import collections
import dataclasses
import fractions
import json
import types
import typing
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jax_paged import (
    LLM,
    BeamSearchParams,
    EngineArgs,
    LoRARequest,
    PoolingParams,
    SamplingParams,
    StructuredOutputsParams,
)
from jax_paged.arguments.plain_values import plain
from jax_paged.config.engine_args import DTypeName
from jax_paged.config.speculative import SpeculativeConfig
from jax_paged.lab.simulator import Request, StepTimeModel
from jax_paged.pooling_params import PoolerConfig
from jax_paged.server.launch.cli import make_batch_parser, parse_args
from jax_paged.server.launch.options import ServerOptions

# The arguments that a class needs, by class.
CLASSES = {
    EngineArgs: {},
    SamplingParams: {},
    BeamSearchParams: {"beam_width": 2},
    PoolingParams: {},
    PoolerConfig: {},
    LoRARequest: {"lora_name": "a", "lora_int_id": 1, "lora_path": "a"},
    StructuredOutputsParams: {"regex": "a"},
    SpeculativeConfig: {},
    ServerOptions: {},
    Request: {"arrival_s": 0.0, "prompt": 3, "output_len": 2},
    StepTimeModel: {"base_s": 0.5},
}
# Values of fields whose default is None or not a number, and for which 2, 0.5 or True is not allowed.
VALUES = {
    "truncate_prompt_tokens": 3,
    "hf_overrides": {"a": 1},
    "speculative_config": {"num_speculative_tokens": 3},
    "limit_mm_per_prompt": {"image": 2},
    "mm_processor_kwargs": {"max_pixels": 100},
    "logit_bias": {5: 2.0},
    "stop_token_ids": [3, 4],
    "allowed_token_ids": [3, 4],
    "forced_token_ids": [3, 4],
    "bad_words_token_ids": [[3], [4, 5]],
    "hook_args": {"a": [1.0, 2.0], "b": 3.0},
    "extra_args": {"a": [1.0, 2.0], "b": 3.0},
    "extra_kwargs": {"compressed_token_type_ids": 3},
    "json_object": True,
    "max_compile_s": 0.5,
    "gpu_memory_utilization": 0.5,  # equal in float32 and float64
}
# Fields of the simulator that are not checked on their own.
UNCHECKED = {"prompt", "priority"}
# What these fields need beside them.
BESIDE = {
    "json_object": {"regex": None},
    "max_buffered_bytes": {"max_body_bytes": 1024},
}
INTEGERS = (np.int64, np.int32, np.uint8, np.array, jnp.asarray)
NUMBERS = (np.float32, np.float64, np.array, fractions.Fraction, jnp.asarray)


def is_numeric(hint: typing.Any) -> bool:
    if typing.get_origin(hint) in (types.UnionType, typing.Union, list, dict, tuple):
        return any(map(is_numeric, typing.get_args(hint)))
    return hint in (int, float, bool)


def numeric_fields():
    for cls, needed in CLASSES.items():
        hints = typing.get_type_hints(cls)
        for field in dataclasses.fields(cls):
            if is_numeric(hints[field.name]):
                yield pytest.param(cls, needed, field, hints[field.name], id=f"{cls.__name__}.{field.name}")


def plain_value(field, hint, needed):
    """Returns an allowed value of a field, other than None."""
    names = [field.name, *VALUES]
    if field.name in VALUES:
        return VALUES[names[0]]
    for value in (needed.get(field.name), field.default):
        if value is not None and value is not dataclasses.MISSING:
            return value
    args = typing.get_args(hint) or (hint,)
    return True if bool in args else 2 if int in args else 0.5


def in_numpy(value, number):
    """Returns a value with its numbers made by `number`, such as np.int64."""
    if isinstance(value, dict):
        return {in_numpy(k, np.int64): in_numpy(v, number) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(in_numpy(item, number) for item in value)
    if isinstance(value, bool):
        return np.bool_(value)
    if isinstance(value, int):
        return number(value) if number in INTEGERS and number is not np.uint8 else np.int64(value)
    return number(value) if isinstance(value, float) and number in NUMBERS else value


def exact_type(value):
    """Returns the types of a value and of all that it holds."""
    if isinstance(value, dict):
        return type(value), [(exact_type(k), exact_type(v)) for k, v in value.items()]
    if isinstance(value, list | tuple):
        return type(value), [exact_type(item) for item in value]
    return type(value)


@pytest.mark.parametrize(("cls", "needed", "field", "hint"), numeric_fields())
def test_every_numeric_field_takes_the_numbers_of_other_libraries(cls, needed, field, hint):
    value = plain_value(field, hint, needed)
    for number in {*INTEGERS, *NUMBERS}:
        given = needed | BESIDE.get(field.name, {}) | {field.name: in_numpy(value, number)}
        kept = getattr(cls(**given), field.name)
        wanted = getattr(cls(**(given | {field.name: value})), field.name)
        assert kept == wanted
        assert exact_type(kept) == exact_type(wanted)
        json.dumps(kept)


@pytest.mark.parametrize(("cls", "needed", "field", "hint"), numeric_fields())
def test_a_bool_is_no_number_and_nan_is_refused(cls, needed, field, hint):
    is_nested = isinstance(VALUES.get(field.name), dict | list)
    if bool in (hint, *typing.get_args(hint)) or is_nested or (cls is Request and field.name in UNCHECKED):
        return
    for value in (True, np.True_, np.float32("nan"), np.array([1, 2]), "2"):
        with pytest.raises(ValueError, match=field.name.split("_")[-1]):
            cls(**(needed | {field.name: value}))


@pytest.mark.parametrize("make", [np.array, np.int32, list])
def test_lists_of_token_ids_may_be_arrays(make):
    ids = make([3, 4]) if make is not np.int32 else [np.int32(3), np.int32(4)]
    params = SamplingParams(stop_token_ids=ids, allowed_token_ids=ids, forced_token_ids=ids)
    assert exact_type(params.stop_token_ids) == (list, [int, int])
    assert params.forced_token_ids == [3, 4]


def test_values_that_are_set_later_become_plain_when_they_are_checked(llm):
    params = SamplingParams()
    params.max_tokens, params.temperature, params.ignore_eos = np.int64(5), np.float32(0.5), np.True_
    params.stop_token_ids = [1]
    params.stop_token_ids.append(np.int64(7))
    request = llm.llm_engine.check_request("ab", params, priority=np.int64(0))
    json.dumps(dataclasses.asdict(request.params), default=str)
    assert type(request.params.max_tokens) is int
    assert exact_type(request.params.stop_token_ids) == (list, [int, int])
    assert type(request.request.priority) is int


def test_lists_that_need_no_change_stay_the_callers():
    stops, schema = [3, 4], {"type": "object"}
    assert SamplingParams(stop_token_ids=stops).stop_token_ids is stops
    assert StructuredOutputsParams(json=schema).json is schema


def test_paths_are_taken_where_texts_name_folders(folder):
    assert EngineArgs(Path("a"), Path("b")) == EngineArgs("a", "b")
    assert LoRARequest("a", 1, Path("b")).lora_path == "b"
    assert SpeculativeConfig(model=Path("b")).model == "b"
    options = ServerOptions(ssl_certfile=Path("a"), ssl_keyfile=Path("b"), api_key_file=Path("c"))
    assert (options.ssl_certfile, options.api_key_file) == ("a", "c")


@pytest.mark.parametrize("name", typing.get_args(DTypeName)[1:])
def test_dtypes_are_named_by_whatever_numpy_takes(name):
    makers = [getattr(jnp, name), jnp.dtype(name), jnp.zeros(1, name).dtype]
    makers += [ml_dtypes.bfloat16] if name == "bfloat16" else [np.float32, "f4"]
    for dtype in makers:
        args = EngineArgs(dtype=dtype)
        assert args == EngineArgs(dtype=name)
        assert type(args.dtype) is str
    for dtype, shown in ((jnp.float16, "float16"), (float, "float64"), ("flaot32", "flaot32"), (3, "3")):
        with pytest.raises(ValueError, match=f"dtype.*{shown}"):
            EngineArgs(dtype=dtype)


def test_the_dtype_of_the_cache_may_be_one_of_jax():
    assert EngineArgs(kv_cache_dtype=jnp.int8).kv_cache_dtype == "int8"
    assert EngineArgs(kv_cache_dtype=jnp.float8_e4m3fn).kv_cache_dtype == "fp8_e4m3"


# Misspelt names.


@pytest.mark.parametrize("cls", CLASSES)
def test_every_field_is_suggested_for_a_misspelt_name(cls):
    needed = CLASSES[cls]
    for field in dataclasses.fields(cls):
        for wrong in (field.name + "x", field.name.replace("_", ""), field.name[:-1]):
            # Of names of a letter or two, too little is left.
            if len(field.name) < 4 or wrong in {f.name for f in dataclasses.fields(cls)}:
                continue
            with pytest.raises(TypeError, match=rf"{wrong}'.*did you mean .*'{field.name}'"):
                cls(**(needed | {wrong: 1}))


def test_misspelt_arguments_of_llm():
    for wrong, right in (("max_num_seq", "max_num_seqs"), ("hook", "hooks"), ("modle", "model")):
        with pytest.raises(TypeError, match=rf"LLM.*'{wrong}'.*did you mean '{right}'\?"):
            LLM(**{wrong: 4})
    with pytest.raises(TypeError, match=r"'completely_different'$"):
        LLM(completely_different=1)


def test_misspelt_attributes():
    with pytest.raises(AttributeError, match="did you mean 'max_tokens'"):
        SamplingParams().max_token = 3


def test_misspelt_keys_of_arguments_that_are_dicts():
    for name, value, right in (
        ("speculative_config", {"methd": "ngram"}, "method"),
        ("pooler_config", {"poling_type": "CLS"}, "pooling_type"),
        ("mm_processor_kwargs", {"max_pixel": 3}, "max_pixels"),
    ):
        with pytest.raises(ValueError, match=f"{name}.*did you mean '{right}'"):
            EngineArgs(**{name: value})
    with pytest.raises(ValueError, match="did you mean 'compressed_token_type_ids'"):
        PoolingParams(extra_kwargs={"compressed_token_type_id": 3})


def test_a_misspelt_key_of_a_prompt(llm):
    with pytest.raises(ValueError, match="did you mean 'prompt_token_ids'"):
        llm.generate({"prompt_token_id": [3]})


def test_misspelt_choices():
    with pytest.raises(ValueError, match=r"preemption_mode.*did you mean 'recompute'"):
        EngineArgs(preemption_mode="recompte")
    with pytest.raises(ValueError, match=r"dtype.*did you mean 'bfloat16'"):
        EngineArgs(dtype="bflaot16")


@pytest.mark.parametrize(
    ("words", "right"),
    [
        (["serve", "--max-num-seq", "4"], "--max-num-seqs"),
        (["serve", "pagelet", "--max_num_seqs", "4"], "--max-num-seqs"),
        (["--api-keys=4"], "--api-key"),
        (["serve", "--preemption-mode", "recompte"], "recompute"),
    ],
)
def test_misspelt_options(words, right, capsys):
    with pytest.raises(SystemExit):
        parse_args(words)
    assert f"did you mean '{right}'" in capsys.readouterr().err


def test_misspelt_options_of_a_batch(capsys):
    with pytest.raises(SystemExit):
        make_batch_parser().parse_args(["-i", "a", "-o", "b", "--max-num-seq", "4"])
    assert "did you mean '--max-num-seqs'" in capsys.readouterr().err


# Methods of engines.


def test_methods_take_the_integers_of_numpy(llm):
    engine = llm.llm_engine
    engine.add_request("a", "abcdef", SamplingParams(max_tokens=20), arrival_time=np.float64(0))
    for _ in range(4):
        engine.step()
    lines = []
    count = len(engine._core.requests["a"].group.sequences[0].output_token_ids)
    engine.rollback("a", np.int64(2))
    assert len(engine._core.requests["a"].group.sequences[0].output_token_ids) == count - 2
    engine.fork("a", "b", seed=np.uint32(7))
    engine.abort_request(["a", "b"])
    engine.wait_if_idle()
    engine.record(lines.append)
    params = SamplingParams(
        max_tokens=np.int32(3), logit_bias={np.int64(70): np.float32(5)}, seed=np.int64(1)
    )
    ids = np.array([3, 4, 5], np.int32)
    for prompt in (ids, list(ids), tuple(ids), {"prompt_token_ids": ids}, jnp.asarray(ids)):
        assert llm.generate(prompt, params, priority=np.zeros(1, int))[0].prompt_token_ids == [3, 4, 5]
    engine.record(None)
    assert sum('"add"' in line for line in lines) == 5


def test_values_in_subclasses_of_dict_and_list_become_plain():
    bias = collections.defaultdict(float, {np.int64(5): np.float32(2)})
    assert exact_type(SamplingParams(logit_bias=bias).logit_bias) == (dict, [(int, float)])


def test_values_without_a_plain_equivalent_stay_as_they_are():
    for value in (object(), {1, 2}, len, [len], {"a": len}, b"a", np.dtype("int32")):
        assert plain(value) is value
    nested = {"a": [np.int8(1), (np.bool_(True), ml_dtypes.bfloat16(0.5)), np.str_("b"), Path("c")]}
    assert repr(plain(nested)) == "{'a': [1, (True, 0.5), 'b', 'c']}"


def test_values_that_are_nested_too_deeply_are_refused_by_their_checks():
    schema: dict = {}
    for _ in range(3000):
        schema = {"a": schema}
    endless: dict = {}
    endless["a"] = endless
    for value in (schema, endless):
        with pytest.raises(ValueError, match="the nesting depth of `json` must be at most 60, got 61"):
            StructuredOutputsParams(json=value)
