"""An engine with a GGUF file answers as one with the same model in safetensors files."""

from pathlib import Path

import gguf
import pytest
from helpers.gguf_files import write_gguf

from jax_paged import LLM, SamplingParams
from jax_paged.models.checkpoint import read_json, resolve_model_dir

SMALL = {"max_model_len": 64, "max_num_seqs": 2, "num_gpu_blocks_override": 32, "max_compile_s": 0}
PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the built-in model as a GGUF file, with its tokenizer."""
    folder = resolve_model_dir("pagelet")
    content, settings = read_json(folder / "tokenizer.json"), read_json(folder / "tokenizer_config.json")
    added = {token["content"]: token for token in content["added_tokens"]}
    vocab = content["model"]["vocab"] | {text: token["id"] for text, token in added.items()}
    tokens = sorted(vocab, key=vocab.__getitem__)

    def metadata(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list(tokens)
        writer.add_token_types([(3 if added[t]["special"] else 4) if t in added else 1 for t in tokens])
        writer.add_token_merges([" ".join(pair) for pair in content["model"]["merges"]])
        writer.add_eos_token_id(vocab[settings["eos_token"]])
        writer.add_chat_template((folder / "chat_template.jinja").read_text())

    made = tmp_path_factory.mktemp("gguf") / "pagelet.gguf"
    write_gguf(made, folder, metadata=metadata)
    return made


def test_same_answers_as_with_safetensors(file: Path) -> None:
    chats = [[{"role": "user", "content": text}] for text in ("Hello!", "What is a page?")]
    found, want = (
        LLM(str(model), dtype="float32", **SMALL).chat(chats, PARAMS, use_tqdm=False)
        for model in (file, "pagelet")
    )
    for a, b in zip(found, want, strict=True):
        assert a.prompt_token_ids == b.prompt_token_ids
        assert a.outputs[0].token_ids == b.outputs[0].token_ids
        assert a.outputs[0].text == b.outputs[0].text


def test_end_tokens_are_those_of_the_file(file: Path) -> None:
    engine = LLM(str(file.parent), dtype="float32", **SMALL).llm_engine
    folder = resolve_model_dir("pagelet")
    name = read_json(folder / "tokenizer_config.json")["eos_token"]
    assert engine.tokenizer is not None
    assert engine.tokenizer.token_id(name) in engine.config.eos_token_ids
