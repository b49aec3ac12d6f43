"""Makes the pooling fixtures: tiny random checkpoints that pool, and what transformers makes of texts.

The tests need no torch; this script does, in the environment of make_references.py:

    python tests/models/make_pooling_references.py      # or with names of fixtures, to make only those

Every folder under tests/models/pooling_fixtures then holds config.json, model.safetensors, the files of
sentence-transformers or a tokenizer where its tests read them, and reference.json: {"cases": [{"token_ids",
"second_text", "pooled"}]}, where "pooled" is the unscaled embedding of a text, or the logits of its classes,
computed of the text alone in float32.
"""

import json
import shutil
import sys
import zlib
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from tokenizers import models, pre_tokenizers, processors

FIXTURES = Path(__file__).parent / "pooling_fixtures"
LENS = (1, 2, 3, 7, 16, 31, 32, 33, 60)
VOCAB_SIZE = 128
LAYER_SCALE = 2.0
_TEXT = "what is a block table who holds page cache query key value cat dog sleeps on the mat red car fast"
WORDS = _TEXT.split()
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.15,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
DECODER = COMMON | {"num_key_value_heads": 2}
ENCODER = COMMON | {"pad_token_id": 0, "type_vocab_size": 2}
# RoBERTa's positions begin behind the padding token.
ROBERTA = COMMON | {"pad_token_id": 1, "type_vocab_size": 1, "max_position_embeddings": 66}
MODERN = COMMON | {
    "pad_token_id": 0,
    "num_hidden_layers": 3,
    "global_attn_every_n_layers": 2,
    "local_attention": 16,
    "cls_token_id": 1,
    "sep_token_id": 2,
}
# A fixture: the model's class, its config's, the pooling, and the values of the config.
CONFIGS: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "qwen3_embedder": (
        "Qwen3Model",
        "Qwen3Config",
        "LAST",
        DECODER | {"head_dim": 8, "tie_word_embeddings": True},
    ),
    "llama_mean": ("LlamaModel", "LlamaConfig", "MEAN", DECODER),
    "llama_classifier": (
        "LlamaForSequenceClassification",
        "LlamaConfig",
        "LAST",
        DECODER | {"num_labels": 3},
    ),
    "mistral_classifier": (
        "MistralForSequenceClassification",
        "MistralConfig",
        "LAST",
        DECODER | {"num_labels": 2, "sliding_window": 24},
    ),
    "qwen2_classifier": (
        "Qwen2ForSequenceClassification",
        "Qwen2Config",
        "LAST",
        DECODER | {"num_labels": 1},
    ),
    "qwen3_reranker": (
        "Qwen3ForCausalLM",
        "Qwen3Config",
        "LAST",
        DECODER | {"head_dim": 8, "tie_word_embeddings": True},
    ),
    "bert_embedder": ("BertModel", "BertConfig", "MEAN", ENCODER),
    "bert_reranker": ("BertForSequenceClassification", "BertConfig", "CLS", ENCODER | {"num_labels": 1}),
    "roberta_classifier": (
        "RobertaForSequenceClassification",
        "RobertaConfig",
        "CLS",
        ROBERTA | {"num_labels": 3},
    ),
    "xlm_roberta_embedder": ("XLMRobertaModel", "XLMRobertaConfig", "CLS", ROBERTA),
    "xlm_roberta_reranker": (
        "XLMRobertaForSequenceClassification",
        "XLMRobertaConfig",
        "CLS",
        ROBERTA | {"num_labels": 1},
    ),
    "modernbert_embedder": ("ModernBertModel", "ModernBertConfig", "MEAN", MODERN),
    "modernbert_reranker": (
        "ModernBertForSequenceClassification",
        "ModernBertConfig",
        "CLS",
        MODERN | {"num_labels": 1, "classifier_pooling": "mean"},
    ),
}
# The files of sentence-transformers, in the older layout and in the newer one.
LAYOUTS: dict[str, tuple[dict[str, Any], bool]] = {
    "qwen3_embedder": (
        {"embedding_dimension": 32, "pooling_mode": "lasttoken", "include_prompt": True},
        True,
    ),
    "llama_mean": (
        {"word_embedding_dimension": 32, "pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True},
        False,
    ),
    "xlm_roberta_embedder": (
        {"word_embedding_dimension": 32, "pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False},
        True,
    ),
    "modernbert_embedder": (
        {"embedding_dimension": 32, "pooling_mode": "mean", "include_prompt": True},
        True,
    ),
}


def make_model(name: str) -> Any:
    """Returns a random model whose biases and norms are random too: zeros and ones would hide mistakes."""
    kind, config_class, _, values = CONFIGS[name]
    config = getattr(transformers, config_class)(**values)
    config._attn_implementation = "eager"
    model = getattr(transformers, kind)(config).to(torch.float32).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.normal_(parameter.mean().item(), 0.2)
            elif "layer" in key:
                parameter.mul_(LAYER_SCALE)
    return model


@torch.no_grad()
def run(
    model: Any, pooling: str, token_ids: list[int], second_text: int | None, yes_no: list[int]
) -> list[float]:
    inputs: dict[str, Any] = {"input_ids": torch.tensor([token_ids])}
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    if second_text is not None:
        inputs["token_type_ids"] = (torch.arange(len(token_ids)) >= second_text).long()[None]
    out = model(**inputs)
    if "last_hidden_state" not in out:
        logits = out.logits[0]
        if logits.ndim == 1:
            return logits.tolist()
        return [(logits[-1, yes_no[1]] - logits[-1, yes_no[0]]).item()]
    hidden = out.last_hidden_state[0]
    pooled = {"LAST": hidden[-1], "CLS": hidden[0], "MEAN": hidden.mean(0)}[pooling]
    return pooled.tolist()


def make_tokenizer(folder: Path, name: str) -> tokenizers.Tokenizer:
    """Writes a tokenizer of whole words; an encoder's puts special tokens around a text, or two."""
    special = ["<s>", "<pad>", "</s>", "<unk>"] if "roberta" in name else ["[PAD]", "[CLS]", "[SEP]", "[UNK]"]
    words = [*special, "no", "yes", *WORDS]
    backend = tokenizers.Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=special[3])
    )
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    if "roberta" in name:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
        )
    elif "bert" in name:
        second = 1 if name.startswith("bert") else 0
        backend.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]",
            pair=f"[CLS] $A [SEP] $B:{second} [SEP]:{second}",
            special_tokens=[("[CLS]", 1), ("[SEP]", 2)],
        )
    backend.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": special["roberta" in name]}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return backend


def main() -> None:
    torch.set_num_threads(1)
    for name in sys.argv[1:] or CONFIGS:
        torch.manual_seed(zlib.crc32(name.encode()))
        kind, _, pooling, _ = CONFIGS[name]
        model = make_model(name)
        folder = FIXTURES / name
        shutil.rmtree(folder, ignore_errors=True)
        model.save_pretrained(folder)
        backend = make_tokenizer(folder, name)
        cases = []
        for length in LENS:
            token_ids = torch.randint(4, VOCAB_SIZE, (length,)).tolist()
            second = length // 2 if name.startswith("bert") and length > 1 else None
            pooled = run(model, pooling, token_ids, second, [4, 5])
            cases.append({"token_ids": token_ids, "second_text": second, "pooled": pooled})
        if "reranker" in name:
            for document in ("the cat sleeps on the mat", "a red car is fast", "who holds a page", "table"):
                query = "what is a block table"
                # The chat of a language model, which is read as one text.
                texts = (query + " " + document,) if kind.endswith("LM") else (query, document)
                encoding = backend.encode(*texts)
                second = encoding.type_ids.index(1) if 1 in encoding.type_ids else None
                pooled = run(model, pooling, encoding.ids, second, [4, 5])
                case = {"token_ids": encoding.ids, "second_text": second, "pooled": pooled}
                cases.append(case | {"query": query, "document": document})
        lines = ",\n".join(json.dumps(case) for case in cases)
        (folder / "reference.json").write_text('{"cases": [\n' + lines + "\n]}\n")
        config = json.loads((folder / "config.json").read_text())
        if name in LAYOUTS:
            values, normalizes = LAYOUTS[name]
            kinds = ["Transformer", "Pooling", *(["Normalize"] if normalizes else [])]
            paths = ["", "1_Pooling", "2_Normalize"]
            (folder / "1_Pooling").mkdir()
            (folder / "1_Pooling" / "config.json").write_text(json.dumps(values) + "\n")
            modules = [
                {"idx": i, "name": str(i), "path": paths[i], "type": f"sentence_transformers.models.{kind}"}
                for i, kind in enumerate(kinds)
            ]
            (folder / "modules.json").write_text(json.dumps(modules) + "\n")
        if name == "qwen3_embedder":  # as the hub's Qwen3-Embedding: a language model's name, and no prefix
            config["architectures"] = ["Qwen3ForCausalLM"]
            (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        for extra in ("generation_config.json",):
            (folder / extra).unlink(missing_ok=True)
        size = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())
        print(f"{name}: {size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
