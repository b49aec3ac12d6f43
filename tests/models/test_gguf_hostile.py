"""Truncated, damaged and hostile GGUF files are errors that name the file, in little time and memory."""

import contextlib
import resource
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter
from helpers.gguf_files import write_gguf

from jax_paged.engine.text.gguf_tokenizer import read_tokenizer
from jax_paged.models.checkpoint import read_config, read_generation_config, resolve_model_dir
from jax_paged.models.loading.gguf.header import read_header, select_files, shards_of
from jax_paged.models.weights import load_model, outline, random_checkpoint

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}
TOKENS = ["a", "b", "ab", "<|im_end|>", *(f"<0x{i:02X}>" for i in range(60))]


def vocabulary(writer: GGUFWriter) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([1, 1, 1, 3, *[1] * 60])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(3)
    writer.add_chat_template("{{ messages }}")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("model")
    random_checkpoint(folder, CONFIG, "float32")
    write_gguf(folder / "model.gguf", folder, lambda name, value: "Q8_0", metadata=vocabulary)
    return (folder / "model.gguf").read_bytes()


def read_everything(file: Path) -> None:
    """Reads all that an engine reads, except the weights."""
    model = resolve_model_dir(str(file))
    read_config(model, {})
    read_generation_config(model)
    outline(model, "float32", None)
    read_tokenizer(model)


def header_len(data: bytes, file: Path) -> int:
    file.write_bytes(data)
    return min(tensor.offset for tensor in read_header(file).tensors.values())


@contextlib.contextmanager
def little_memory() -> Iterator[None]:
    """Fails if the process needs more than 256 MiB in addition to its largest size so far."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 256 * 1024


def test_whole_file_is_read(data: bytes, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(data)
    read_everything(file)
    load_model(file)


def test_truncated_files(data: bytes, tmp_path: Path) -> None:
    file, rng = tmp_path / "model.gguf", np.random.default_rng(0)
    header = header_len(data, file)
    lengths = {
        0,
        3,
        4,
        8,
        len(data) - 1,
        header,
        *rng.integers(0, header, 300),
        *rng.integers(0, len(data), 50),
    }
    for length in lengths:
        file.write_bytes(data[:length])
        with pytest.raises(ValueError, match=r"model.gguf is not a readable GGUF file: "):
            read_everything(file)


def test_changed_bytes(data: bytes, tmp_path: Path) -> None:
    file, rng = tmp_path / "model.gguf", np.random.default_rng(1)
    header, num_errors = header_len(data, file), 0
    with little_memory():
        for _ in range(600):
            changed = bytearray(data)
            for at in rng.integers(0, header, rng.integers(1, 4)):
                changed[at] = rng.integers(0, 256)
            file.write_bytes(changed)
            start = time.monotonic()
            try:
                read_everything(file)
            except ValueError:
                num_errors += 1
            assert time.monotonic() - start < 20
    assert num_errors > 200


@pytest.mark.parametrize("value", [2**31, 2**32 - 1, 2**62, 2**63, 2**64 - 1])
def test_huge_counts(data: bytes, tmp_path: Path, value: int) -> None:
    """Replaces each 8 bytes of the header in turn, which are the counts and lengths among other values."""
    file = tmp_path / "model.gguf"
    header = header_len(data, file)
    keys = (b"tokenizer.ggml.tokens", b"tokenizer.ggml.token_type", b"tokenizer.ggml.merges")
    places = {8, 16, 24, *(data.index(key) + len(key) + 8 for key in keys)}
    places |= {data.index(b"token_embd.weight") + len("token_embd.weight") + 4}
    places |= {int(at) for at in np.random.default_rng(2).integers(0, header - 8, 20)}
    with little_memory():
        for at in sorted(places):
            file.write_bytes(data[:at] + struct.pack("<Q", value) + data[at + 8 :])
            start = time.monotonic()
            with contextlib.suppress(ValueError):
                read_everything(file)
            assert time.monotonic() - start < 20


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("block_count", 2**31 - 1),
        ("attention.head_count", 2**31 - 1),
        ("attention.head_count_kv", 2**31 - 1),
        ("attention.key_length", 2**31 - 2),
        ("embedding_length", 2**31 - 1),
        ("feed_forward_length", 2**31 - 1),
        ("rope.dimension_count", 2**31 - 2),
        ("context_length", 0),
    ],
)
def test_absurd_sizes(data: bytes, tmp_path: Path, key: str, value: int) -> None:
    file, name = tmp_path / "model.gguf", f"llama.{key}".encode()
    at = data.index(name) + len(name) + 4
    file.write_bytes(data[:at] + struct.pack("<I", value) + data[at + 4 :])
    start = time.monotonic()
    with little_memory(), pytest.raises(ValueError):
        load_model(file)
    assert time.monotonic() - start < 20


def test_messages_name_the_problem(data: bytes, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    for start, text in (
        (b"GGML", "it does not begin with 'GGUF'"),
        (b"GGUF\x01\x00\x00\x00", "it has version 1, and versions 2 and 3 are supported"),
        (b"GGUF\x00\x00\x00\x03", r"big-endian files are not supported"),
        (b"GGUF\x03\x00\x00\x00" + b"\xff" * 16, "it cannot have 18446744073709551615 tensors"),
    ):
        file.write_bytes(start + data[len(start) :])
        with pytest.raises(ValueError, match=text):
            resolve_model_dir(str(file))
    file.write_bytes(data.replace(b"blk.0.attn_k.weight", b"blk.0.attn_q.weight"))
    with pytest.raises(ValueError, match=r"it has the tensor 'blk.0.attn_q.weight' twice"):
        resolve_model_dir(str(file))
    with pytest.raises(ValueError, match=r"`model` must be an existing GGUF file.*got '/no/such.gguf'"):
        resolve_model_dir("/no/such.gguf")


def test_names_of_split_files() -> None:
    assert shards_of(Path("/a/b.gguf")) == [Path("/a/b.gguf")]
    names = [f"/a/b-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    assert shards_of(Path(names[1])) == [Path(name) for name in names]
    with pytest.raises(ValueError, match="must have a number from 1 to 3 in its name, got 4"):
        shards_of(Path("b-00004-of-00003.gguf"))
    found = [
        "m-Q4_K_M.gguf",
        "m.q4_k_m-00001-of-00002.gguf",
        "m.q4_k_m-00002-of-00002.gguf",
        "mmproj-Q4_K_M.gguf",
    ]
    assert select_files([*found, "m-Q4_K.gguf", "README.md"], "q4_K_M") == found[:2]
    assert select_files(["m-IQ4_K.gguf"], "Q4_K") == []
