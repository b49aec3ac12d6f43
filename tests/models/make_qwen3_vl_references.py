"""Makes the fixtures of Qwen3-VL among image_fixtures, as make_image_references.py makes the others.

Placeholders are written here: transformers does that in a class that wants a processor of videos, too. A case
has "positions" as well, those of M-RoPE along the three axes.
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
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

sys.path.insert(0, str(Path(__file__).parents[1]))
from helpers.pictures import drawn

FIXTURES = Path(__file__).parent / "image_fixtures"
NUM_NEW_TOKENS = 24
MIN_MARGIN = 2e-3
# Different tokens of an output: fewer hide mistakes.
MIN_TOKENS = 4
PLACEHOLDER = "<|image_pad|>"
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", PLACEHOLDER, "<|video_pad|>"]
# The parts of the published one that chats with images use.
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for content in message.content %}"
    "{% if content.type == 'image' or 'image' in content or 'image_url' in content %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% elif 'text' in content %}{{ content.text }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TEXT = {
    "hidden_size": 24,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
VISION = {"hidden_size": 8, "intermediate_size": 12, "depth": 3, "patch_size": 4, "out_hidden_size": 24}
# Text, vision, pixels of an image, and whether the config has the form of the published ones.
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[int, int], bool]] = {
    "qwen3_vl": (
        {
            "num_hidden_layers": 2,
            "head_dim": 16,
            "intermediate_size": 24,
            "tie_word_embeddings": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0, "mrope_section": [4, 2, 2]},
        },
        {"num_heads": 2, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 2]},
        (256, 2304),
        False,
    ),
    # Its sections differ, and its largest images take a larger program.
    "qwen3_vl_tied": (
        {
            "num_hidden_layers": 3,
            "head_dim": 24,
            "intermediate_size": 16,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "mrope_section": [3, 5, 4]},
        },
        {"num_heads": 1, "num_position_embeddings": 25, "deepstack_visual_indexes": [0, 1, 2]},
        (256, 6400),
        True,
    ),
    # Its tokens stand for nine patches: no power of two holds whole ones.
    "qwen3_vl_merge3": (
        {
            "num_hidden_layers": 1,
            "head_dim": 16,
            "intermediate_size": 16,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0, "mrope_section": [4, 2, 2]},
        },
        {
            "num_heads": 2,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0],
            "depth": 1,
            "spatial_merge_size": 3,
        },
        (576, 6400),
        False,
    ),
}
IMAGE = f"<|vision_start|>{PLACEHOLDER}<|vision_end|>"
# Text, and the width, height and seed of each picture.
CASES: list[tuple[str, list[tuple[int, int, int]]]] = [
    (f"What is this?{IMAGE}", [(50, 40, 1)]),
    (IMAGE, [(64, 16, 2)]),
    (f"<|im_start|>user\n{IMAGE}one and{IMAGE} two<|im_end|>\n", [(20, 70, 3), (60, 20, 4)]),
    (f"{IMAGE}{IMAGE}which?", [(40, 40, 5), (40, 40, 6)]),
    ("No image at all, only a text that is longer than a block.", []),
    (f"a{IMAGE}b", [(7, 9, 7)]),
    (f"large{IMAGE}", [(200, 90, 8)]),
]


def write_tokenizer(folder: Path) -> int:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({piece: i for i, piece in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL)
    backend.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "TokenizersBackend", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    return backend.get_vocab_size()


def make(name: str) -> None:
    text, vision, (least, most), is_published = KINDS[name]
    folder = FIXTURES / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    vocab_size = write_tokenizer(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    images = Qwen2VLImageProcessorPil(
        size={"shortest_edge": least, "longest_edge": most},
        patch_size=4,
        merge_size=vision.get("spatial_merge_size", 2),
        image_mean=[0.5, 0.4, 0.3],
        image_std=[0.5, 0.6, 0.7],
    )
    images.save_pretrained(folder)
    is_tied = text["tie_word_embeddings"]
    config = transformers.Qwen3VLConfig(
        text_config=TEXT | text | {"vocab_size": vocab_size},
        vision_config=VISION | vision,
        image_token_id=tokenizer.convert_tokens_to_ids(PLACEHOLDER),
        video_token_id=tokenizer.convert_tokens_to_ids("<|video_pad|>"),
        vision_start_token_id=tokenizer.convert_tokens_to_ids("<|vision_start|>"),
        vision_end_token_id=tokenizer.convert_tokens_to_ids("<|vision_end|>"),
        tie_word_embeddings=is_tied,
        architectures=["Qwen3VLForConditionalGeneration"],
    )
    model = transformers.Qwen3VLForConditionalGeneration(config).eval()
    for seed in itertools.count():
        draw_weights(model, seed)
        found = (run(model, images, tokenizer, *case) for case in CASES)
        cases = list(itertools.takewhile(lambda case: case is not None, found))
        # So that the greedy tokens depend on the model alone, and not on the order of float32 sums.
        if len(cases) == len(CASES):
            break
    config.save_pretrained(folder)
    if is_published:
        as_published(folder)
    state = {k: v for k, v in model.state_dict().items() if not (is_tied and k == "lm_head.weight")}
    save_file({k: v.contiguous() for k, v in state.items()}, folder / "model.safetensors", {"format": "pt"})
    (folder / "reference.json").write_text(json.dumps({"cases": cases}) + "\n")
    print(name, seed, [len(c["prompt_token_ids"]) for c in cases], [len(set(c["token_ids"])) for c in cases])


def as_published(folder: Path) -> None:
    """Writes the values in the form of the files on the hub."""
    config = json.loads((folder / "config.json").read_text())
    rope = config["text_config"].pop("rope_parameters")
    config["text_config"]["rope_theta"] = rope.pop("rope_theta")
    config["text_config"]["rope_scaling"] = rope | {"mrope_interleaved": True}
    config["vision_config"].pop("rope_parameters")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    images = json.loads((folder / "preprocessor_config.json").read_text())
    images["image_processor_type"] = "Qwen2VLImageProcessorFast"
    (folder / "preprocessor_config.json").write_text(json.dumps(images, indent=2) + "\n")


@torch.no_grad()
def draw_weights(model: Any, seed: int) -> None:
    torch.manual_seed(seed)
    for key, weight in model.named_parameters():
        noise = torch.randn_like(weight)
        is_norm = "norm" in key and key.endswith("weight")
        # A tied table outweighs the layers otherwise, and repeats the token before.
        scale = 0.15 if weight.ndim == 1 or "embed_tokens" in key else 0.5
        weight.copy_(1 + 0.2 * noise if is_norm else noise * scale)


@torch.no_grad()
def run(
    model: Any, images: Any, tokenizer: Any, text: str, pictures: list[tuple[int, int, int]]
) -> dict[str, Any] | None:
    model.model.rope_deltas = None
    inputs = {}
    if pictures:
        inputs = dict(images([Image.fromarray(drawn(*p)) for p in pictures], return_tensors="pt"))
        first, *rest = text.split(PLACEHOLDER)
        pairs = zip(inputs["image_grid_thw"], rest, strict=True)
        square = model.config.vision_config.spatial_merge_size**2
        full = first + "".join(PLACEHOLDER * int(grid.prod() // square) + part for grid, part in pairs)
    else:
        full = text
    ids, chosen, logprobs = torch.tensor([tokenizer.encode(full)]), [], []
    prompt = ids[0].tolist()
    image_id = model.config.image_token_id
    for _ in range(NUM_NEW_TOKENS):
        is_image = (ids == image_id).int()
        row = model(input_ids=ids, mm_token_type_ids=is_image, use_cache=False, **inputs).logits[0, -1]
        row = row.log_softmax(-1)
        best, second = row.topk(2).values.tolist()
        chosen.append(int(row.argmax()))
        # transformers would look for an image of such a token.
        if best - second < MIN_MARGIN or chosen[-1] == image_id:
            return None
        logprobs.append(best)
        ids = torch.cat([ids, torch.tensor([[chosen[-1]]])], 1)
    if len(set(chosen)) < MIN_TOKENS:
        return None
    case = {"text": text, "pictures": pictures, "prompt_token_ids": prompt}
    if pictures:
        grids = inputs["image_grid_thw"]
        positions, _ = model.model.get_rope_index(ids, (ids == image_id).int(), grids)
        case["positions"] = positions[:, 0].tolist()  # of prompt and output
    return case | {"token_ids": chosen, "logprobs": logprobs}


if __name__ == "__main__":
    for name in sys.argv[1:] or KINDS:
        make(name)
