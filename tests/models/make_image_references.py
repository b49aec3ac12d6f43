"""Makes image_fixtures: tiny random checkpoints that read images, and transformers' outputs for them.

By the name "positions" it makes siglip_positions.json: for images of 1, 2, ... patches on a side, the row of
the table of positions for the patches of the first row and of the first column.

It runs in the environment that make_references.py describes, with Pillow. Every folder then holds a
checkpoint with its tokenizer, preprocessor_config.json, and reference.json: {"cases": [{"text", "pictures",
"prompt_token_ids", "token_ids", "logprobs"}]}, where pictures are the arguments of helpers.pictures.drawn,
and the text has an <image> for each.
"""

import itertools
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from PIL import Image
from safetensors.torch import save_file
from tokenizers import decoders, models, pre_tokenizers
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.idefics3.modeling_idefics3 import Idefics3VisionEmbeddings
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

sys.path.insert(0, str(Path(__file__).parents[1]))
from helpers.pictures import drawn

FIXTURES = Path(__file__).parent / "image_fixtures"
POSITIONS = Path(__file__).parent / "siglip_positions.json"
MAX_SIDE = 64
NUM_NEW_TOKENS = 24
MIN_MARGIN = 2e-3
# Different tokens of an output: fewer hide mistakes.
MIN_TOKENS = 4
SPECIAL = ["<|im_start|>", "<end_of_utterance>", "<fake_token_around_image>", "<image>", "<global-img>"]
MARKS = [f"<row_{r}_col_{c}>" for r in (1, 2) for c in (1, 2)]
TEMPLATE = (
    "<|im_start|>{% for message in messages %}{{ message['role'] | capitalize }}"
    "{% if message['content'][0]['type'] == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n"
    "{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
TEXT = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.15,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
VISION = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
# The second one's last pixels belong to no patch, and its vectors are of three patches squared.
KINDS: dict[str, tuple[str, dict[str, Any], int, bool]] = {
    "idefics3": ("Idefics3", VISION | {"image_size": 32, "patch_size": 4}, 2, False),
    "smolvlm_tied": ("SmolVLM", VISION | {"image_size": 38, "patch_size": 4}, 3, True),
}
# Text, and the width, height and seed of each picture.
CASES: list[tuple[str, list[tuple[int, int, int]]]] = [
    ("What is this?<image>", [(50, 40, 1)]),
    ("<image>", [(64, 64, 2)]),
    ("<|im_start|>User:<image>one and<image> two<end_of_utterance>\nAssistant:", [(30, 60, 3), (200, 20, 4)]),
    ("<image><image>which?", [(40, 40, 5), (40, 40, 6)]),
    ("No image at all, only a text that is longer than a block.", []),
    ("a<image>b", [(7, 9, 7)]),
]


def write_tokenizer(folder: Path) -> int:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [*alphabet, "ĊĊ"]  # as in the tokenizers of the hub, two ends of lines are one token
    backend = tokenizers.Tokenizer(models.BPE({p: i for i, p in enumerate(pieces)}, [("Ċ", "Ċ")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL + MARKS)
    backend.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "TokenizersBackend", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    return backend.get_vocab_size()


def make(name: str) -> None:
    kind, vision, factor, is_tied = KINDS[name]
    folder = FIXTURES / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    vocab_size = write_tokenizer(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    size = vision["image_size"]
    processor_class = SmolVLMImageProcessorPil if kind == "SmolVLM" else Idefics3ImageProcessorPil
    images = processor_class(size={"longest_edge": 2 * size}, max_image_size={"longest_edge": size})
    images.save_pretrained(folder)
    num_tokens = (size // vision["patch_size"]) ** 2 // factor**2
    processor = transformers.Idefics3Processor(images, tokenizer, image_seq_len=num_tokens)
    config = getattr(transformers, f"{kind}Config")(
        text_config=TEXT | {"vocab_size": vocab_size, "tie_word_embeddings": is_tied},
        vision_config=vision,
        scale_factor=factor,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        tie_word_embeddings=is_tied,
        architectures=[f"{kind}ForConditionalGeneration"],
    )
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config).eval()
    for seed in itertools.count():
        draw_weights(model, seed)
        cases = [run(model, processor, *case) for case in CASES]
        # So that the greedy tokens depend on the model alone, and not on the order of float32 sums.
        if all(cases):
            break
    config.save_pretrained(folder)
    state = {k: v for k, v in model.state_dict().items() if not (is_tied and k == "lm_head.weight")}
    save_file({k: v.contiguous() for k, v in state.items()}, folder / "model.safetensors", {"format": "pt"})
    (folder / "reference.json").write_text(json.dumps({"cases": cases}) + "\n")
    print(name, [len(c["prompt_token_ids"]) for c in cases], [len(set(c["token_ids"])) for c in cases])


@torch.no_grad()
def draw_weights(model: Any, seed: int) -> None:
    torch.manual_seed(seed)
    for key, weight in model.named_parameters():
        noise = torch.randn_like(weight)
        is_norm = "norm" in key and key.endswith("weight")
        weight.copy_(1 + 0.2 * noise if is_norm else noise * (0.15 if weight.ndim == 1 else 0.25))


@torch.no_grad()
def run(model: Any, processor: Any, text: str, pictures: list[tuple[int, int, int]]) -> dict[str, Any] | None:
    images = [Image.fromarray(drawn(*p)) for p in pictures]
    if images:
        inputs = dict(processor(text=[text], images=[images], return_tensors="pt"))
    else:
        inputs = dict(processor(text=[text], return_tensors="pt"))
    inputs.pop("attention_mask")
    ids, chosen, logprobs = inputs.pop("input_ids"), [], []
    prompt = ids[0].tolist()
    for _ in range(NUM_NEW_TOKENS):
        row = model(input_ids=ids, use_cache=False, **inputs).logits[0, -1].log_softmax(-1)
        best, second = row.topk(2).values.tolist()
        chosen.append(int(row.argmax()))
        # transformers would look for an image of such a token.
        if best - second < MIN_MARGIN or chosen[-1] == model.config.image_token_id:
            return None
        logprobs.append(best)
        ids = torch.cat([ids, torch.tensor([[chosen[-1]]])], 1)
    case = {"text": text, "pictures": pictures, "prompt_token_ids": prompt}
    return case | {"token_ids": chosen, "logprobs": logprobs}


@torch.no_grad()
def make_positions() -> None:
    """Writes which rows of the table of positions the first row and the first column of patches get."""
    table = {}
    for side in range(1, MAX_SIDE + 1):
        config = transformers.Idefics3VisionConfig(
            hidden_size=1, num_attention_heads=1, image_size=side, patch_size=1
        )
        embeddings = Idefics3VisionEmbeddings(config)
        embeddings.patch_embedding.weight.zero_()
        embeddings.patch_embedding.bias.zero_()
        embeddings.position_embedding.weight.copy_(torch.arange(float(side**2))[:, None])
        found = embeddings(torch.zeros(1, 3, side, side), torch.ones(1, side, side, dtype=torch.bool))
        rows = found.int().reshape(side, side)
        assert (rows == rows[:1] + rows[:, :1] - rows[0, 0]).all()
        table[side] = {"row": rows[0].tolist(), "column": rows[:, 0].tolist()}
    lines = (f'"{side}": {json.dumps(entry)}' for side, entry in table.items())
    POSITIONS.write_text("{" + ",\n".join(lines) + "}\n")


if __name__ == "__main__":
    for name in sys.argv[1:] or [*KINDS, "positions"]:
        if name == "positions":
            make_positions()
        else:
            make(name)
