"""What a folder of sentence-transformers says of texts: truncation, lower case, a prompt in front."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from jax_paged import LLMEngine, PoolingParams
from jax_paged.config.engine_config import EngineConfig
from jax_paged.engine.composition import make_input_processor
from jax_paged.engine.input_processor import InputProcessor
from jax_paged.engine.text.tokenizer import Tokenizer
from jax_paged.models.features.pooling import PoolingSpec, read_pooling

FIXTURES = Path(__file__).parent.parent / "models" / "pooling_fixtures"
MODULES = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
]
POOLING = {"word_embedding_dimension": 32, "pooling_mode_mean_tokens": True}
TEXT = "the quick brown fox jumps over the lazy dog " * 3


def write_folder(folder: Path, name: str = "bert_embedder", **files: dict[str, Any]) -> Path:
    """Makes a folder of sentence-transformers from a fixture; files are changes of its JSON files."""
    shutil.copytree(FIXTURES / name, folder)
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(POOLING))
    (folder / "modules.json").write_text(json.dumps(MODULES))
    for stem, values in files.items():
        file = folder / f"{stem}.json"
        old = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps(old | values))
    return folder


def read(folder: Path) -> PoolingSpec:
    hf_config = json.loads((folder / "config.json").read_text())
    (name,) = hf_config["architectures"]
    spec = read_pooling(folder, hf_config, name, hf_config["hidden_size"], pools=None)
    assert spec is not None
    return spec


def processor(config: EngineConfig, folder: Path, **settings: Any) -> InputProcessor:
    """Returns the input processor of an engine that serves a folder, without its model."""
    spec, tokenizer = read(folder), Tokenizer(str(folder))
    if spec.text.lower_case:
        tokenizer.lowercase_input()
    vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
    sizes = {"max_model_len": 64, "vocab_size": vocab_size, "num_blocks": 1000} | settings
    return make_input_processor(dataclasses.replace(config, pooling=spec, **sizes), tokenizer)


def ids_of(
    inputs: InputProcessor, prompt: Any = TEXT, truncate_prompt_tokens: int | None = None
) -> list[int]:
    params = PoolingParams(truncate_prompt_tokens=truncate_prompt_tokens)
    return inputs.check(prompt, params).prompt_token_ids


def truncated(folder: Path, text: str, length: int, direction: str = "right") -> list[int]:
    """Returns what the tokenizers library makes of a text, which is what sentence-transformers calls."""
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.enable_truncation(length, direction=direction)
    return backend.encode(text).ids


@pytest.fixture
def config(scripted) -> EngineConfig:
    return scripted()[1].config


@pytest.mark.parametrize("name", ["bert_embedder", "xlm_roberta_embedder", "qwen3_embedder", "llama_mean"])
def test_long_texts_are_truncated_as_by_transformers(config: EngineConfig, tmp_path: Path, name: str) -> None:
    folder = write_folder(tmp_path / "m", name, sentence_bert_config={"max_seq_length": 12})
    inputs = processor(config, folder)
    whole = truncated(folder, TEXT, 10**6)
    assert len(whole) > 20
    assert ids_of(inputs) == truncated(folder, TEXT, 12)
    assert ids_of(inputs, {"prompt_token_ids": whole}) == truncated(folder, TEXT, 12)
    assert ids_of(inputs, truncate_prompt_tokens=-1) == truncated(folder, TEXT, 12)
    assert ids_of(inputs, TEXT[:9]) == truncated(folder, TEXT[:9], 12)
    # A request that says how many tokens are kept takes as many.
    assert len(ids_of(inputs, truncate_prompt_tokens=15)) == 15
    left = write_folder(
        tmp_path / "left",
        name,
        sentence_bert_config={"max_seq_length": 12},
        tokenizer_config={"truncation_side": "left"},
    )
    assert ids_of(processor(config, left)) == truncated(folder, TEXT, 12, "left")


@pytest.mark.parametrize(
    ("files", "length"),
    [
        ({"sentence_bert_config": {"max_seq_length": 9}, "tokenizer_config": {"model_max_length": 7}}, 9),
        ({"sentence_roberta_config": {"max_seq_length": 9}}, 9),
        ({"tokenizer_config": {"model_max_length": 7}}, 7),
        ({"sentence_bert_config": {"max_seq_length": None}, "tokenizer_config": {"model_max_length": 7}}, 7),
        ({"sentence_bert_config": {"max_seq_length": 9, "tokenizer_args": {"model_max_length": 8}}}, 8),
        (
            {"sentence_bert_config": {"max_seq_length": 9, "processing_kwargs": {"text": {"max_length": 6}}}},
            6,
        ),
        ({"sentence_bert_config": {"processing_kwargs": {"text": {"truncation": False}}}}, None),
        ({}, None),
    ],
)
def test_where_the_length_is_written(tmp_path: Path, files: dict[str, Any], length: int | None) -> None:
    assert read(write_folder(tmp_path / "m", **files)).text.max_seq_length == length


def test_texts_beyond_the_model_stay_errors(config: EngineConfig, tmp_path: Path) -> None:
    unlimited = {"model_max_length": 1000000000000000019884624838656}
    for i, length in enumerate((None, 100)):
        folder = write_folder(
            tmp_path / f"{i}", sentence_bert_config={"max_seq_length": length}, tokenizer_config=unlimited
        )
        with pytest.raises(
            ValueError, match=r"the number of tokens of `prompt` must be at most \d+ \(max_model_len\)"
        ):
            ids_of(processor(config, folder, max_model_len=20))
    folder = write_folder(tmp_path / "short", sentence_bert_config={"max_seq_length": 12})
    with pytest.raises(
        ValueError, match=r"the number of tokens of `prompt` must be at most \d+ \(max_model_len\)"
    ):
        ids_of(processor(config, folder, max_model_len=10))


def test_lower_case_and_a_prompt_in_front(config: EngineConfig, tmp_path: Path) -> None:
    prompts = {"prompts": {"query": "find: ", "": None}, "default_prompt_name": "query"}
    folder = write_folder(
        tmp_path / "m",
        "qwen3_embedder",
        sentence_bert_config={"do_lower_case": True, "max_seq_length": 30},
        config_sentence_transformers=prompts,
    )
    inputs = processor(config, folder)
    want = truncated(folder, "find: the Quick fox".lower(), 30)
    assert ids_of(inputs, "The Quick FOX") == want
    assert ids_of(inputs, {"prompt": "the quick fox"}) == want
    assert ids_of(inputs, {"prompt_token_ids": [5, 6]}) == [5, 6]
    with pytest.raises(ValueError, match=r"`prompt` must be a non-empty string.*got ''"):
        ids_of(inputs, "")
    other = write_folder(
        tmp_path / "other", config_sentence_transformers=prompts | {"default_prompt_name": "document"}
    )
    with pytest.raises(ValueError, match=r"`default_prompt_name` of .* must be one of .*got 'document'"):
        read(other)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_seq_length": 0}, "`max_seq_length` of .* must be null or an integer of at least 1, got 0"),
        (
            {"transformer_task": "fill-mask"},
            "`transformer_task` must be 'feature-extraction', got 'fill-mask'",
        ),
        (
            {"modality_config": {"message": {"method": "forward"}}},
            "`modality_config` must have .* for 'text', got",
        ),
        (
            {"processing_kwargs": {"text": {"add_special_tokens": False}}},
            "each of `processing_kwargs` must be padding, .*got add_special_tokens=False",
        ),
        (
            {"config_args": {"hidden_act": "relu"}},
            "`config_kwargs.hidden_act` must be .*, the value in config.json.*got 'relu'",
        ),
    ],
)
def test_what_is_not_supported_is_named(tmp_path: Path, values: dict[str, Any], message: str) -> None:
    folder = write_folder(tmp_path / "m", sentence_bert_config=values)
    with pytest.raises(ValueError, match=message):
        read(folder)


def test_an_engine_reads_texts_like_that(scripted, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", sentence_bert_config={"do_lower_case": True, "max_seq_length": 12})
    args, executor = scripted(tokenizer=str(folder))
    executor.config = dataclasses.replace(executor.config, pooling=read(folder))
    with LLMEngine(args, executor) as engine:
        request = engine.check_request(TEXT.upper(), PoolingParams())
        assert request.prompt_token_ids == truncated(folder, TEXT, 12)
