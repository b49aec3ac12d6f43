"""A small random Gemma 2: every other layer attends to a window of the latest tokens."""

from pathlib import Path

from jax_paged.models.weights import random_checkpoint

WINDOWED_VOCAB_SIZE = 199


def write_windowed_checkpoint(folder: Path, window: int) -> None:
    """Writes a model of four layers, the first and the third with a window of so many tokens."""
    config = {
        "architectures": ["Gemma2ForCausalLM"],
        "vocab_size": WINDOWED_VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "query_pre_attn_scalar": 8,
        "sliding_window": window,
        "max_position_embeddings": 512,
        "hidden_activation": "gelu_pytorch_tanh",
        "initializer_range": 0.3,
        "tie_word_embeddings": True,
        "eos_token_id": 1,
        "bos_token_id": 2,
        "pad_token_id": 0,
    }
    random_checkpoint(folder, config, "float32", seed=3)
