"""InputProcessor: forms of prompts and parameters, what the engine's own copies hold, and no JAX."""

import dataclasses
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jax_paged.config.engine_config import EngineConfig
from jax_paged.core.kv_cache.cache_group import CacheGroup
from jax_paged.engine.composition import make_input_processor
from jax_paged.engine.input_processor import InputProcessor, _Inputs
from jax_paged.engine.prompt_reader import TokenizedPrompt
from jax_paged.engine.text.tokenizer import Tokenizer
from jax_paged.sampling_params import MAX_BAD_WORDS, BeamSearchParams, SamplingParams

START = 3  # the decoder's start token
CONFIG = EngineConfig(
    model_name="m",
    architecture="none",
    dtype="float32",
    attention_backend="xla",
    matmul_backend="xla",
    vocab_size=300,
    max_model_len=40,
    block_size=4,
    num_blocks=100,
    num_swap_blocks=0,
    cache_groups=(CacheGroup(),),
    kv_cache_bytes=1,
    weight_bytes=1,
    max_num_seqs=8,
    max_num_batched_tokens=64,
    max_logprobs=20,
    eos_token_ids=frozenset({2}),
    sampling_defaults={"temperature": 0.5},
)


@pytest.fixture
def tokenizer(folder: str) -> Tokenizer:
    return Tokenizer(folder)


@pytest.fixture
def processor(tokenizer: Tokenizer) -> InputProcessor:
    return make_input_processor(CONFIG, tokenizer)


@pytest.fixture
def encoding(tokenizer: Tokenizer) -> InputProcessor:
    groups = (CacheGroup(), CacheGroup(is_cross=True))
    config = dataclasses.replace(CONFIG, cache_groups=groups, decoder_start_token_id=START)
    return make_input_processor(config, tokenizer)


def test_forms_of_prompts(processor: InputProcessor, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("abc")
    forms: list[tuple[Any, str | None, str]] = [
        ("abc", "abc", ""),
        ({"prompt": "abc"}, "abc", ""),
        ({"prompt": "abc", "cache_salt": "s"}, "abc", "s"),
        ({"prompt_token_ids": ids}, None, ""),
        ({"prompt_token_ids": ids, "prompt": "other"}, "other", ""),
        ({"prompt_token_ids": np.array(ids), "cache_salt": "s"}, None, "s"),
        ({"prompt": "abc", "multi_modal_data": None, "mm_processor_kwargs": {}}, "abc", ""),
        (ids, None, ""),
        (tuple(ids), None, ""),
        (np.array(ids, np.uint16), None, ""),
        ([np.int64(i) for i in ids], None, ""),
    ]
    for prompt, text, salt in forms:
        request = processor.check(prompt, None)
        assert (request.prompt, request.prompt_token_ids, request.request.cache_salt) == (text, ids, salt)
        assert all(type(i) is int for i in request.prompt_token_ids)
        assert (request.encoder_prompt, request.request.encoder_token_ids) == (None, [])
    assert processor.check(ids, None).prompt_token_ids is not ids


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ({}, '`prompt` must be a dict with "prompt", "prompt_token_ids" or both, and'),
        ({"cache_salt": "s"}, '`prompt` must be a dict with "prompt", "prompt_token_ids" or both, and'),
        (
            {"prompt": "a", "multi_modal_data": {"image": 1}},
            '`prompt` must be a dict with "prompt", "prompt_token_ids" or both, and',
        ),
        ({"prompt_embeds": [[1.0]]}, "without enable_prompt_embeds=True"),
        ({"prompt": 5}, "`prompt` must be a string, got 5"),
        ({"prompt": "a", "cache_salt": 5}, "`cache_salt` must be a string, got 5"),
        ({"prompt": ["a"]}, r"`prompt` must be a string, got \['a'\]"),
        (
            {"encoder_prompt": "a", "decoder_prompt": "b"},
            r"`prompt` must be a prompt for a decoder-only model \(no encoder_prompt\), got",
        ),
        (np.array(5), r"`prompt` must be a string, a list of token ids, .*got array\(5\)"),
    ],
)
def test_bad_prompts(processor: InputProcessor, prompt: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        processor.check(prompt, None)


def test_salts_must_agree(processor: InputProcessor) -> None:
    assert processor.check({"prompt": "a", "cache_salt": "s"}, None, "s").request.cache_salt == "s"
    with pytest.raises(ValueError, match=r"`cache_salt` must be .*got \['s', 't'\]"):
        processor.check({"prompt": "a", "cache_salt": "s"}, None, "t")


def test_prompts_for_encoders(encoding: InputProcessor, tokenizer: Tokenizer) -> None:
    ab, c = tokenizer.encode("ab"), tokenizer.encode("c")
    forms: list[tuple[Any, str | None, str | None, list[int]]] = [
        ("ab", "ab", None, [START]),
        ({"prompt_token_ids": ab}, None, None, [START]),
        ({"encoder_prompt": "ab", "decoder_prompt": None}, "ab", None, [START]),
        ({"encoder_prompt": "ab", "decoder_prompt": "c"}, "ab", "c", [START, *c]),
        ({"encoder_prompt": ab, "decoder_prompt": [START, *c]}, None, None, [START, *c]),
        (
            {"encoder_prompt": {"prompt": "ab"}, "decoder_prompt": c, "mm_processor_kwargs": {}},
            "ab",
            None,
            [START, *c],
        ),
    ]
    for prompt, encoder_text, text, token_ids in forms:
        request = encoding.check(prompt, None)
        assert (request.encoder_prompt, request.request.encoder_token_ids) == (encoder_text, ab)
        assert (request.prompt, request.prompt_token_ids) == (text, token_ids)
    with pytest.raises(
        ValueError,
        match=r"`prompt` must be a dict with exactly the keys \['decoder_prompt', 'encoder_prompt'\]",
    ):
        encoding.check({"encoder_prompt": "ab"}, None)  # pyright: ignore


def test_max_tokens_is_cut_to_the_room_that_is_left(processor: InputProcessor) -> None:
    for given, expected in ((1, 1), (30, 30), (31, 30), (10**9, 30), (None, 30)):
        params = SamplingParams(max_tokens=given, min_tokens=0)
        assert processor.check([5] * 10, params).params.max_tokens == expected
        assert params.max_tokens == given
    cut = processor.check([5] * 35, SamplingParams(max_tokens=20, min_tokens=10)).params
    assert (cut.max_tokens, cut.min_tokens) == (5, 5)
    beams = processor.check([5] * 35, BeamSearchParams(2, max_tokens=20))
    assert beams.request.beam_params is not None
    assert (beams.request.beam_params.max_tokens, beams.params.max_tokens) == (5, 5)
    for params in (SamplingParams(max_tokens=1), SamplingParams(max_tokens=None), BeamSearchParams(2)):
        with pytest.raises(ValueError, match=r"must be at most 39 \(max_model_len - 1\), got 40"):
            processor.check([5] * 40, params)


def test_the_engine_works_on_its_own_copy(processor: InputProcessor) -> None:
    params = SamplingParams(stop=["x"], logit_bias={5: 1.0})
    request = processor.check("abc", params)
    params.max_tokens, params.temperature = 1, -1
    assert isinstance(params.stop, list)
    params.stop.append("y")
    assert request.params.stop == ["x"]
    assert (request.params.max_tokens, request.params.temperature) == (16, 1.0)
    with pytest.raises(ValueError, match=r"`temperature` must be .*got -1"):
        processor.check("abc", params)
    beams = BeamSearchParams(2)
    request = processor.check("abc", beams)
    beams.beam_width = 0
    assert request.request.beam_params == BeamSearchParams(2)
    with pytest.raises(ValueError, match=r"`beam_width` must be .*got 0"):
        processor.check("abc", beams)


def test_defaults_are_the_models_and_nobody_can_change_them(processor: InputProcessor) -> None:
    processor.default_params.temperature = 7
    assert processor.check("abc", None).params.temperature == 0.5
    bad = dataclasses.replace(CONFIG, sampling_defaults={"temperature": -1})
    with pytest.raises(
        ValueError, match=r"generation_config.json of 'm': `temperature` must be a finite number in \[0,"
    ):
        make_input_processor(bad, None)


def test_minus_one_is_the_vocabulary(tokenizer: Tokenizer, processor: InputProcessor) -> None:
    params = SamplingParams(logprobs=-1, prompt_logprobs=-1)
    message = (
        r"logprobs` must be at most 20 \(max_logprobs\), got -1, which means all 300 tokens of the vocabulary"
    )
    with pytest.raises(ValueError, match=f"^`{message}\n`prompt_{message}$"):
        processor.check("abc", params)
    everything = make_input_processor(dataclasses.replace(CONFIG, max_logprobs=300), tokenizer)
    checked = everything.check("abc", params).params
    assert (checked.logprobs, checked.prompt_logprobs, params.logprobs) == (300, 300, -1)
    with pytest.raises(ValueError, match=r"`logprobs` must be an integer in \[0, 20\].*got 21"):
        processor.check("abc", SamplingParams(logprobs=21))


def test_stop_strings_are_prepared_with_the_check(processor: InputProcessor) -> None:
    """The engine's thread must not wait for it."""
    prepared = processor.check("abc", SamplingParams(stop=["bc", "x"])).stop
    assert prepared is not None
    assert prepared.feed(prepared.start, "abc")[1] == (1, "bc")
    assert processor.check("abc", SamplingParams()).stop is None
    assert processor.check("abc", BeamSearchParams(2)).stop is None


def test_bad_words_become_token_ids(processor: InputProcessor, tokenizer: Tokenizer) -> None:
    def ids(*words: str) -> list[list[int]] | None:
        return processor.check("abc", SamplingParams(bad_words=list(words))).params.bad_words_token_ids

    # A byte tokenizer has no token for a word with its space: the word alone covers both places.
    assert ids("ab", " c") == [tokenizer.encode("ab"), tokenizer.encode("c")]
    given = SamplingParams(bad_words=["ab"], bad_words_token_ids=[[9, 8]])
    assert processor.check("a", given).params.bad_words_token_ids == [[9, 8], tokenizer.encode("ab")]
    assert given.bad_words_token_ids == [[9, 8]]
    no_tokenizer = make_input_processor(CONFIG, None)
    assert no_tokenizer.check([5], SamplingParams(bad_words_token_ids=[[9]])).params.bad_words_token_ids == [
        [9]
    ]
    with pytest.raises(
        ValueError, match=r"`bad_words` must be None because the engine has no tokenizer, got"
    ):
        no_tokenizer.check([5], SamplingParams(bad_words=["ab"]))
    with pytest.raises(ValueError, match=r"`bad_words` must be words of at least one token.*got ' '"):
        ids("a", " ")


def test_bad_words_of_a_tokenizer_with_spaces_in_its_tokens() -> None:
    tokenizer = Tokenizer("jax_paged/models/pagelet")
    config = dataclasses.replace(CONFIG, vocab_size=2048)
    request = make_input_processor(config, tokenizer).check("abc", SamplingParams(bad_words=["the"]))
    alone, inside = tokenizer.encode("the"), tokenizer.encode(" the")
    assert len(alone) == len(inside) == 1
    assert request.params.bad_words_token_ids == [alone, inside]


# Merges of a tokenizer with "▁" for spaces, each in order, and the tokens that ban "word".
WORD_MERGES = {
    # "▁word" is one token, and "word" at the start of a text is two.
    "fewer tokens after a space": (["w o", "r d", "▁ wo", "▁wo rd"], [["wo", "rd"], ["▁word"]]),
    # The reverse: the form after a space has more tokens and is covered by the word alone.
    "more tokens after a space": (["w o", "r d", "wo rd"], [["word"]]),
    # "▁w" takes the first letter, so that the form after a space has as many tokens, but others.
    "other tokens after a space": (["r d", "▁ w", "▁w o"], [["w", "o", "rd"], ["▁wo", "rd"]]),
}


@pytest.mark.parametrize("case", WORD_MERGES)
@pytest.mark.parametrize("prepend", ["always", "never"])
def test_bad_words_are_banned_in_all_tokenizations(tmp_path: Path, case: str, prepend: str) -> None:
    merges, expected = WORD_MERGES[case]
    pieces = ["<unk>", *"▁word()\nab", *(merge.replace(" ", "") for merge in merges)]
    pairs = [tuple(merge.split()) for merge in merges]
    backend = tokenizers.Tokenizer(models.BPE({p: i for i, p in enumerate(pieces)}, pairs))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend)
    backend.decoder = decoders.Metaspace(prepend_scheme=prepend)
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "TokenizersBackend"}')
    tokenizer = Tokenizer(str(tmp_path))
    config = dataclasses.replace(CONFIG, vocab_size=len(pieces))
    request = make_input_processor(config, tokenizer).check([5], SamplingParams(bad_words=["word"]))
    banned = request.params.bad_words_token_ids or []
    assert sorted([pieces[i] for i in ids] for ids in banned) == sorted(expected)
    # Whatever precedes the word, its tokens end with a banned sequence.
    for text in ("word", " word", "a word", "a\nword", "(word", "a (word", "  word"):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert any(ids[-len(x) :] == x for x in banned), text


def test_the_limit_of_bad_words_counts_words(processor: InputProcessor) -> None:
    words = [f"w{i}" for i in range(MAX_BAD_WORDS)]
    processor.check("abc", SamplingParams(bad_words=words))
    with pytest.raises(ValueError, match=f"the number of `bad_words` must be .*got {MAX_BAD_WORDS + 1}"):
        processor.check("abc", SamplingParams(bad_words=[*words, "x"]))


def test_prompts_are_truncated_from_the_left(processor: InputProcessor, encoding: InputProcessor) -> None:
    ids = list(range(10, 70))
    for given, expected in ((3, ids[-3:]), (-1, ids[-39:])):
        params = SamplingParams(truncate_prompt_tokens=given, max_tokens=1)
        assert processor.check(ids, params).prompt_token_ids == expected
    assert len(ids) == 60
    request = encoding.check(ids, SamplingParams(truncate_prompt_tokens=5))
    assert (request.request.encoder_token_ids, request.prompt_token_ids) == (ids[-5:], [START])


def test_all_problems_of_a_request_are_listed(processor: InputProcessor) -> None:
    params = SamplingParams(logprobs=21, stop_token_ids=[300], n=9)
    with pytest.raises(ValueError) as error:
        processor.check([5, -1], params, cache_salt=5, priority=1)  # pyright: ignore
    starts = [
        "`cache_salt` must be",
        "`priority` must be",
        "each token id in `stop_token_ids` must be",
        "`n` must be",
        "`logprobs` must be",
    ]
    lines = str(error.value).splitlines()
    assert [line.startswith(start) for line, start in zip(lines, starts, strict=False)] == [True] * 5
    assert lines[5:] == ["`prompt_token_ids[1]` must be an integer in [0, 299], got -1"]


CHECKS_A_REQUEST = f"""
import sys
from jax_paged.config.engine_config import EngineConfig
from jax_paged.core.kv_cache.cache_group import CacheGroup
from jax_paged.engine.composition import make_input_processor
from jax_paged.engine.input_processor import InputProcessor
from jax_paged.engine.text.tokenizer import Tokenizer
from jax_paged.sampling_params import SamplingParams

processor = make_input_processor({CONFIG!r}, Tokenizer(sys.argv[1]))
assert processor.check("abc", SamplingParams(bad_words=["x"])).prompt == "abc"
loaded = {{name.partition(".")[0] for name in sys.modules}}
assert not loaded & {{"jax", "jaxlib", "flax", "transformers"}}, loaded
"""


def test_requests_are_checked_without_jax(folder: str) -> None:
    root = Path(__file__).parent.parent.parent
    subprocess.run([sys.executable, "-c", CHECKS_A_REQUEST, folder], cwd=root, check=True, timeout=60)


def test_a_soft_prompt_is_refused_with_images(processor: InputProcessor) -> None:
    image, soft = TokenizedPrompt("x", [1], placeholder_data=(object(),)), np.ones((2, 4), np.float32)  # type: ignore
    inputs = _Inputs(SamplingParams(), None, image, SimpleNamespace(prompt=soft))  # type: ignore
    with pytest.raises(
        ValueError, match="`lora_request` must be a LoRA adapter or None with images, got a soft prompt"
    ):
        processor._check_combination(SamplingParams(), inputs)
