"""SamplingParams: what is let in, and what the message of a refusal says."""

import copy
import dataclasses
import math
import pickle
import re
from typing import Any

import pytest

from jax_paged.core.features import beam_search
from jax_paged.core.request import Request, RequestFeatures, RequestMetrics, Sequence, SequenceGroup
from jax_paged.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams

GOOD: list[dict[str, Any]] = [
    {},
    {"n": 1, "best_of": 1},
    {"n": 4},
    {"n": 3, "best_of": 5},
    {"temperature": 0},
    {"temperature": 1e6},
    {"top_p": 1e-9},
    {"top_p": 1},
    {"top_k": -1},
    {"top_k": 2**31 - 1},
    {"min_p": 1.0},
    {"presence_penalty": -2, "frequency_penalty": 2.0},
    {"repetition_penalty": 1e-6},
    {"seed": 0},
    {"seed": -1},
    {"seed": 2**63 - 1},
    {"stop": "a"},
    {"stop": []},
    {"stop": ("a", "bc")},
    {"stop_token_ids": [0, 7]},
    {"max_tokens": None, "min_tokens": 10**6},
    {"max_tokens": 5, "min_tokens": 5},
    {"logprobs": 0, "prompt_logprobs": 20},
    {"logit_bias": {}},
    {"logit_bias": {0: -100, 5: 100.0}},
    {"logit_bias": dict.fromkeys(range(300), 1.0)},
    {"ignore_eos": True, "skip_special_tokens": False},
    {"logprobs": -1, "prompt_logprobs": 10**6},  # the engine's max_logprobs is the limit
    {"bad_words": ["a", "b c"], "bad_words_token_ids": [[1], [2, 3]], "allowed_token_ids": [0, 5]},
    {"detokenize": False, "include_stop_str_in_output": True, "stop": []},
    {"output_kind": RequestOutputKind.DELTA, "skip_reading_prefix_cache": True},
    {"truncate_prompt_tokens": -1},
    {"truncate_prompt_tokens": 1},
    {"stop": ["a" * 256] * 16},
    {"stop": ["a" * 64] * 64},
]

NOT_NUMBERS: list[Any] = [None, True, "1", math.nan, math.inf, -math.inf, [1.0]]
NOT_INTEGERS: list[Any] = [True, "1", 1.0, math.nan, [1]]
BAD: dict[str, list[Any]] = {
    "n": [0, -1, None, *NOT_INTEGERS],
    "best_of": [0, -1, *NOT_INTEGERS],
    "temperature": [-1e-9, 1e6 + 1, *NOT_NUMBERS],
    "top_p": [0, -0.1, 1.0001, *NOT_NUMBERS],
    "top_k": [-2, 2**31, None, *NOT_INTEGERS],
    "min_p": [-0.1, 1.1, *NOT_NUMBERS],
    "presence_penalty": [-2.1, 2.1, *NOT_NUMBERS],
    "frequency_penalty": [-2.1, 2.1, *NOT_NUMBERS],
    "repetition_penalty": [0, -1, 1e-7, 1e7, *NOT_NUMBERS],
    "seed": [-2, 2**63, *NOT_INTEGERS],
    "stop": ["", ["a", ""], 5, [5], {"a": 1}, b"a", True],
    "stop_token_ids": [5, "5", {5: 5}, [-1], [True], [1.0], ["1"], [None], True],
    "ignore_eos": [0, 1, None, "yes"],
    "max_tokens": [0, -1, *NOT_INTEGERS],
    "min_tokens": [-1, 17, None, *NOT_INTEGERS],
    "logprobs": [-2, *NOT_INTEGERS],
    "prompt_logprobs": [-2, *NOT_INTEGERS],
    "bad_words": ["word", [""], [5], {"a": 1}, b"a", True],
    "bad_words_token_ids": [5, [5], [[]], [[True]], [[-1]], [["1"]], [[1.0]], True],
    "allowed_token_ids": [[], 5, "5", {5: 5}, [-1], [True], [1.0], ["1"], [None], True],
    "detokenize": [0, 1, None, "yes"],
    "include_stop_str_in_output": [0, 1, None, "yes"],
    "output_kind": [None, 0, "DELTA"],
    "skip_reading_prefix_cache": [0, 1, "yes"],
    "truncate_prompt_tokens": [0, -2, *NOT_INTEGERS],
    "forced_token_ids": [5, "5", {5: 5}, [-1], [True], [1.0], ["1"], [None], True],
    "hook_args": [5, "a", ["a"], [1.0], True],
    "logit_bias": [
        5,
        [(1, 2)],
        {"1": 1.0},
        {True: 1.0},
        {-1: 1.0},
        {1: 100.1},
        {1: math.nan},
        {1: -math.inf},
        {1: None},
        dict.fromkeys(range(513), 1.0),
    ],
    "skip_special_tokens": [0, 1, None, "yes"],
    "logits_processors": [5, [5], print, True],
    "extra_args": [5, "a", ["a"], [1.0], True],
    "structured_outputs": [{"json": {}}, {}, "a+", True],
    "pooling": ["last", "FIRST", True, 0],
    "second_text": [-1, *NOT_INTEGERS],
}


def test_good_values() -> None:
    for values in GOOD:
        SamplingParams(**values)


@pytest.mark.parametrize("name", BAD)
def test_bad_values(name: str) -> None:
    for value in BAD[name]:
        with pytest.raises(ValueError, match=f"`{name}.*` must be ..*got .*") as error:
            SamplingParams(**{name: value})
        shown = str(error.value)
        if not isinstance(value, list | dict):
            assert re.search(rf"`{name}` must be .*, got {re.escape(repr(value))}", shown)


def test_every_field_is_checked() -> None:
    assert set(BAD) == {field.name for field in dataclasses.fields(SamplingParams)}


def test_messages() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"n": 0}, "`n` must be an integer of at least 1, got 0"),
        ({"n": 3, "best_of": 2}, "`best_of` must be an integer of at least 3 (n), got 2"),
        ({"temperature": math.nan}, "`temperature` must be a finite number in [0, 1000000.0], got nan"),
        ({"top_p": 0}, "`top_p` must be a finite number in (0, 1], got 0"),
        ({"min_tokens": 9, "max_tokens": 8}, "`min_tokens` must be an integer in [0, 8], got 9"),
        ({"logit_bias": {7: 200}}, "`logit_bias[7]` must be a finite number in [-100, 100], got 200"),
        (
            {"logit_bias": dict.fromkeys(range(900), -100) | dict.fromkeys(range(513), 0)},
            "the number of values other than -100 in `logit_bias` must be at most 512, got 513",
        ),
    ]
    for values, message in cases:
        with pytest.raises(ValueError) as error:
            SamplingParams(**values)
        assert str(error.value) == message


def test_all_problems_are_listed() -> None:
    with pytest.raises(ValueError) as error:
        SamplingParams(
            n="1", best_of=0, top_p=2, max_tokens=0, min_tokens=-1, stop=[""], logit_bias={"a": None}
        )
    lines = str(error.value).splitlines()
    assert [line.split("`")[1] for line in lines] == [
        "n",
        "best_of",
        "top_p",
        "max_tokens",
        "min_tokens",
        "stop",
        "logit_bias",
        "logit_bias[a]",
    ]
    with pytest.raises(ValueError) as error:
        BeamSearchParams(0, max_tokens=0)
    assert len(str(error.value).splitlines()) == 2
    params = SamplingParams(stop_token_ids=[9], allowed_token_ids=[9, 1])
    with pytest.raises(
        ValueError, match=r"`stop_token_ids` must be .*, got 9\n.*`allowed_token_ids` must be .*, got 9"
    ):
        params.validate_for_vocab(9)


def test_limits_of_stop_strings() -> None:
    with pytest.raises(
        ValueError, match=r"the number of strings in `stop` must be an integer in \[0, 64\], got 65"
    ):
        SamplingParams(stop=["a"] * 65)
    with pytest.raises(
        ValueError, match=r"the length of each string in `stop` must be an integer in \[0, 256\], got 257"
    ):
        SamplingParams(stop="a" * 257)
    with pytest.raises(
        ValueError,
        match=r"the total length of the strings in `stop` must be an integer in \[0, 4096\], got 4097",
    ):
        SamplingParams(stop=["a" * 256] * 16 + ["b"])
    with pytest.raises(ValueError, match="`stop` must be None with detokenize=False, got 'a'"):
        SamplingParams(stop="a", detokenize=False)


def test_parameters_may_be_changed_and_are_checked_again() -> None:
    for params, bad in ((SamplingParams(stop=["a"]), "top_p"), (BeamSearchParams(2), "temperature")):
        params.max_tokens = 5
        params.validate()
        setattr(params, bad, -1)
        with pytest.raises(ValueError, match=f"`{bad}` must be .*got -1"):
            params.validate()


@pytest.mark.parametrize("params", [SamplingParams(), BeamSearchParams(2)])
def test_an_attribute_that_is_no_field_is_an_error(params: Any) -> None:
    kind = type(params).__name__
    for name in ("max_token", "stop_token"):
        with pytest.raises(AttributeError, match=f"{kind} has no field {name!r}, only .*max_tokens"):
            setattr(params, name, 1)
    with pytest.raises(AttributeError):
        params.stop_strings = ("a",)


def test_attributes_that_are_not_built_are_as_in_the_constructor() -> None:
    params: Any = SamplingParams()
    for name in ("guided_decoding",):
        with pytest.raises(ValueError, match=rf"`{name}` must be None.*got \['x'\]"):
            setattr(params, name, ["x"])
        with pytest.warns(UserWarning, match=f"ignores {name}, which has no meaning") as caught:
            setattr(params, name, None)
        assert caught[0].filename == __file__
    beams: Any = BeamSearchParams(2)
    with pytest.raises(ValueError, match=r"`include_stop_str_in_output` must be False.*got True"):
        beams.include_stop_str_in_output = True
    assert (params, beams) == (SamplingParams(), BeamSearchParams(2))


class Tagged(SamplingParams):
    """Parameters of a user who has something to add."""

    tag = ""

    def __init__(self, **values: Any) -> None:
        super().__init__(**values)
        self.tag = "mine"


@pytest.mark.parametrize("params", [SamplingParams(n=3, stop=["a"]), Tagged(n=3), BeamSearchParams(3)])
def test_parameters_can_be_copied(params: Any) -> None:
    copies = [copy.copy(params), copy.deepcopy(params), pickle.loads(pickle.dumps(params))]
    for copied in copies:
        assert type(copied) is type(params)
        assert vars(copied) == vars(params)
        copied.max_tokens = 3
        with pytest.raises(AttributeError, match="max_token'"):
            copied.max_token = 3
    assert dataclasses.replace(params, max_tokens=3) == copies[0]


def test_clone_is_deep() -> None:
    params = SamplingParams(stop=["a"], logit_bias={1: 2.0}, n=2)
    clone = params.clone()
    assert clone == params
    assert clone.stop is not params.stop
    assert clone.logit_bias is not params.logit_bias


def test_who_reads_the_prefix_cache() -> None:
    cases: list[tuple[dict[str, Any], bool]] = [
        ({}, True),
        ({"prompt_logprobs": 0}, False),
        ({"prompt_logprobs": 0, "skip_reading_prefix_cache": True}, False),
        ({"skip_reading_prefix_cache": False}, True),
        ({"skip_reading_prefix_cache": True}, False),
    ]
    for values, reads in cases:
        assert SamplingParams(**values).reads_prefix_cache == reads
    with pytest.raises(
        ValueError, match="`skip_reading_prefix_cache` must be None or True with prompt_logprobs, got False"
    ):
        SamplingParams(prompt_logprobs=0, skip_reading_prefix_cache=False)


def test_names_of_what_is_not_built() -> None:
    with pytest.warns(
        UserWarning, match="SamplingParams ignores guided_decoding, spaces_between_special_tokens"
    ):
        SamplingParams(guided_decoding=None, spaces_between_special_tokens=True, n=2)  # pyright: ignore
    for name in ("guided_decoding",):
        with pytest.raises(ValueError, match=f"`{name}` must be None.*got .*"):
            SamplingParams(**{name: ["x"]})
    with pytest.raises(TypeError, match="nonsense"):
        SamplingParams(nonsense=1)  # pyright: ignore


def test_stop_strings() -> None:
    for stop, expected in ((None, ()), ("ab", ("ab",)), (["ab", "c"], ("ab", "c")), ([], ())):
        assert SamplingParams(stop=stop).stop_strings == expected


def test_validate_for_vocab() -> None:
    params = SamplingParams(stop_token_ids=[0, 99], logit_bias={99: 1.0})
    params.validate_for_vocab(100)
    SamplingParams().validate_for_vocab(1)
    with pytest.raises(
        ValueError, match=r"each token id in `stop_token_ids` must be an integer in \[0, 98\].*got 99"
    ):
        params.validate_for_vocab(99)
    with pytest.raises(ValueError, match=r"`logit_bias` must be an integer in \[0, 49\].*got 99"):
        SamplingParams(logit_bias={3: 1.0, 99: 1.0}).validate_for_vocab(50)
    with pytest.raises(ValueError, match=r"`stop_token_ids` must be .*got 4294967297"):
        SamplingParams(stop_token_ids=[2**32 + 1]).validate_for_vocab(50)


def test_seeds_of_samples() -> None:
    params = SamplingParams(n=4, seed=7)
    seeds = [params.seed_of(i) for i in range(100)]
    assert seeds[0] == 7  # the first sample is the request's own
    assert len(set(seeds)) == 100
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert seeds == [SamplingParams(seed=7).seed_of(i) for i in range(100)]  # of seed and index alone
    assert not set(seeds) & {SamplingParams(seed=8).seed_of(i) for i in range(100)}
    # "1" + "23" is not "12" + "3".
    assert SamplingParams(seed=1).seed_of(23) != SamplingParams(seed=12).seed_of(3)
    # A request of its own with a derived seed begins with it.
    assert SamplingParams(seed=seeds[3]).seed_of(0) == seeds[3]


BAD_BEAMS: dict[str, list[Any]] = {
    "beam_width": [0, -1, None, *NOT_INTEGERS],
    "max_tokens": [0, -1, None, *NOT_INTEGERS],
    "ignore_eos": [0, 1, None, "yes"],
    "length_penalty": [-10.1, 10.1, *NOT_NUMBERS],
    "temperature": [-0.1, 1e7, *NOT_NUMBERS],
}


@pytest.mark.parametrize("name", BAD_BEAMS)
def test_bad_beam_search_params(name: str) -> None:
    for value in BAD_BEAMS[name]:
        with pytest.raises(ValueError, match=f"`{name}` must be ..*got {re.escape(repr(value))}"):
            BeamSearchParams(**({"beam_width": 2} | {name: value}))


def test_good_beam_search_params() -> None:
    assert set(BAD_BEAMS) == {field.name for field in dataclasses.fields(BeamSearchParams)}
    for values in (
        {},
        {"max_tokens": 1},
        {"length_penalty": -10},
        {"length_penalty": 0},
        {"temperature": 0},
    ):
        BeamSearchParams(beam_width=1, **values)


@pytest.mark.parametrize("penalty", [-10.0, 10.0])
def test_scores_of_long_hypotheses_neither_overflow_nor_vanish(penalty):
    params = BeamSearchParams(2, length_penalty=penalty)
    seqs = [Sequence([0] * 2**20, output_token_ids=[1], cumulative_logprobs=[-x]) for x in (1.0, 2.0)]
    request = Request("r", [0] * 2**20, SamplingParams(), features=RequestFeatures(params))
    group = SequenceGroup(request, seqs[:1], RequestMetrics(0.0))
    best, other = (beam_search.score(group, seq, frozenset()) for seq in seqs)
    assert -math.inf < other < best < 0
