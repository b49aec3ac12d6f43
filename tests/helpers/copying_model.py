"""A model that answers with the text that a test asks for: a Llama whose weights are made by hand.

The chat template writes the last message at the end of the prompt, padded with end tokens to a fixed length.
Queries are rotated back by that length (rotary positions make a score a function of the distance alone), so
every token attends to the one so far before it, which the head makes the likeliest next token by far. Where a
grammar or a ban excludes it, another follows.
"""

import json
from pathlib import Path

import numpy as np
import tokenizers
from safetensors.numpy import save_file
from tokenizers import decoders, models, pre_tokenizers

END = "</s>"
# Tokens between a token and its copy.
DISTANCE = 500
# Control tokens; a message writes one as @name@, as what people write becomes none.
CONTROL = {"TOOL_CALLS": "[TOOL_CALLS]", "ARGS": "[ARGS]", "python_tag": "<|python_tag|>"}
_HEAD_DIM = 64
_GAP = 60.0  # by how much the score of the wanted token leads
TEMPLATE = r"""{{ note }}
{%- for t in tools or [] %}{{ t | tojson }}
{% endfor %}
{%- for m in messages %}{{ m.role }}: {{ m.content }}{% for c in m.tool_calls or [] %} {{ c.function.name }}(
{%- if c.function.arguments is mapping %}
{%- for k, v in c.function.arguments.items() %}{{ k }}={{ v }} {% endfor %}
{%- else %}{{ c.function.arguments }}{% endif %})
{%- endfor %}{{ "\n" }}
{%- endfor %}
{%- set text = namespace(written=messages[-1].content, bare=messages[-1].content) %}
{%- for name, token in CONTROL %}
{%- set text.written = text.written.replace('@' ~ name ~ '@', token) %}
{%- set text.bare = text.bare.replace('@' ~ name ~ '@', '!') %}
{%- endfor %}
{{- text.written }}{{ 'END' * (DISTANCE + 1 - text.bare.encode() | length) }}"""


def write_copying_model(folder: Path) -> Path:
    """Writes the model, a tokenizer of bytes, and the template into a folder, which it returns."""
    pieces = [END, *CONTROL.values(), *sorted(pre_tokenizers.ByteLevel.alphabet())]
    num_tokens, num_heads = len(pieces), 5
    hidden = num_heads * _HEAD_DIM
    assert num_tokens < hidden
    constant = hidden - 1  # the dimension that is the same for all tokens
    scale = np.sqrt(hidden / 2)  # of what has passed the first norm: two ones become this
    frequencies = 10000.0 ** (-np.arange(_HEAD_DIM // 2) / (_HEAD_DIM // 2))
    # Cosines of the distance to the wanted place; this is how much the next best lacks.
    lead = np.min([np.sum(1 - np.cos(i * frequencies)) for i in range(1, 4096)])
    strength = np.sqrt(_GAP / lead * np.sqrt(_HEAD_DIM)) / scale
    query, key = np.zeros((2, hidden, hidden))
    for head in range(num_heads):
        first, second = np.split(np.arange(_HEAD_DIM) + head * _HEAD_DIM, 2)
        query[first, constant] = strength * np.cos(DISTANCE * frequencies)
        query[second, constant] = -strength * np.sin(DISTANCE * frequencies)
        key[first, constant] = strength
    identity = np.eye(hidden)
    tokens = identity[:num_tokens]
    without = identity.copy()
    without[constant, constant] = 0
    layer, ones = "model.layers.0.", np.ones(hidden)
    tensors = {
        "model.embed_tokens.weight": tokens + identity[constant],
        f"{layer}self_attn.q_proj.weight": query,
        f"{layer}self_attn.k_proj.weight": key,
        f"{layer}self_attn.v_proj.weight": without,
        f"{layer}self_attn.o_proj.weight": 20 * identity,
        f"{layer}mlp.gate_proj.weight": np.zeros((64, hidden)),
        f"{layer}mlp.up_proj.weight": np.zeros((64, hidden)),
        f"{layer}mlp.down_proj.weight": np.zeros((hidden, 64)),
        f"{layer}input_layernorm.weight": ones,
        f"{layer}post_attention_layernorm.weight": ones,
        "model.norm.weight": ones,
        "lm_head.weight": 5 * tokens,
    }
    save_file({name: x.astype(np.float32) for name, x in tensors.items()}, folder / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": num_tokens,
        "hidden_size": hidden,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_heads,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "eos_token_id": 0,
        "dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    backend = tokenizers.Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([END, *CONTROL.values()])
    backend.save(str(folder / "tokenizer.json"))
    values = {"CONTROL": repr(list(CONTROL.items())), "END": END, "DISTANCE": str(DISTANCE)}
    template = TEMPLATE
    for name, value in values.items():
        template = template.replace(name, value)
    settings = {"tokenizer_class": "TokenizersBackend", "eos_token": END, "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
