"""The end token that a tokenizer names ends outputs beside those of config.json."""

import dataclasses
import json
import shutil

import pytest
from helpers.scripted_engine import EOS, VOCAB_SIZE, ScriptedExecutor

from jax_paged import LLM, EngineArgs, LLMEngine, SamplingParams
from jax_paged.engine.text.tokenizer import Tokenizer

PLAIN, BY_TRANSFORMERS = "TokenizersBackend", "LlamaTokenizerFast"


@pytest.fixture
def folder_with(folder, tmp_path):
    """Makes a copy of the tokenizer with other settings."""

    def make(special_tokens=None, **settings):
        shutil.copytree(folder, tmp_path / "model", dirs_exist_ok=True)
        file = tmp_path / "model" / "tokenizer_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | settings))
        if special_tokens is not None:
            (tmp_path / "model" / "special_tokens_map.json").write_text(json.dumps(special_tokens))
        return str(tmp_path / "model")

    return make


@pytest.mark.parametrize("tokenizer_class", [PLAIN, BY_TRANSFORMERS])
@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, None),
        ({"eos_token": None}, None),
        ({"eos_token": "<s>"}, 1),
        ({"eos_token": "a"}, 67),
        ({"special_tokens": {"eos_token": "<s>"}}, 1),
        ({"special_tokens": {"eos_token": "<s>"}, "eos_token": "a"}, 1),
        ({"eos_token": {"__type": "AddedToken", "content": "<s>", "special": True}}, 1),
    ],
)
def test_end_token_of_a_tokenizer(folder_with, tokenizer_class, settings, expected):
    tokenizer = Tokenizer(folder_with(tokenizer_class=tokenizer_class, **settings))
    assert tokenizer.eos_token_id == tokenizer.hf.eos_token_id
    if tokenizer_class == PLAIN or expected is not None:
        assert tokenizer.eos_token_id == expected


def test_it_ends_outputs_beside_the_models_own(folder_with):
    args = EngineArgs(folder_with(eos_token="<s>"))
    executor = ScriptedExecutor(args)
    with LLM(args.model, executor=executor) as llm:
        assert llm.llm_engine.config.eos_token_ids == {1, EOS}
        assert executor.config.eos_token_ids == {EOS}
        told = []
        executor.during_step = lambda output: told.extend(s.end_token_ids for s in output.new_sequences)
        prompts = [[68, 69, end, 70, 5] for end in (1, EOS)]
        for ignore_eos, num_tokens in ((False, 3), (True, 5)):
            params = SamplingParams(max_tokens=5, ignore_eos=ignore_eos, skip_special_tokens=False)
            for output in llm.generate(prompts, params, use_tqdm=False):
                (completion,) = output.outputs
                assert len(completion.token_ids) == num_tokens
                if not ignore_eos:
                    ends = completion.text, completion.finish_reason, completion.stop_reason
                    assert ends == ("bc", "stop", None)
        assert told == [{1, EOS}] * 2 + [set()] * 2


def test_without_a_tokenizer_or_beyond_the_vocabulary_only_the_models_own_count(folder_with):
    folder = folder_with(eos_token="</s>")
    for settings, vocab_size in (({"skip_tokenizer_init": True}, VOCAB_SIZE), ({}, 2)):
        args = EngineArgs(folder, **settings)
        executor = ScriptedExecutor(args)
        executor.config = dataclasses.replace(
            executor.config, vocab_size=vocab_size, eos_token_ids=frozenset({1})
        )
        with LLMEngine(args, executor) as engine:
            assert engine.config.eos_token_ids == {1}
