"""Names of the supported architectures, and the file that defines each of them.

To add a family, add a file to families/ and a line to one of the tables below. Importing this module does not
import JAX: the front end of the engine only checks names. `get_model_class` imports the file of the family,
and with it JAX.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from jax_paged.arguments.shown_values import shown

if TYPE_CHECKING:
    from jax_paged.models.causal_lm import LanguageModel

# Keys are the names under "architectures" in config.json, which are also the class names. Values are the
# names of the files in families/.
MODELS: dict[str, str] = {
    "ApertusForCausalLM": "apertus",
    "ArceeForCausalLM": "arcee",
    "Cohere2ForCausalLM": "cohere",
    "CohereForCausalLM": "cohere",
    "DeepseekV2ForCausalLM": "deepseek",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "Ernie4_5ForCausalLM": "ernie",
    "Exaone4ForCausalLM": "exaone",
    "Gemma2ForCausalLM": "gemma",
    "Gemma3ForCausalLM": "gemma",
    "Glm4ForCausalLM": "glm",
    "GlmForCausalLM": "glm",
    "Gemma3ForConditionalGeneration": "gemma",
    "Gemma4ForCausalLM": "gemma4",
    "Gemma4ForConditionalGeneration": "gemma4",
    "GPT2LMHeadModel": "gpt2",
    "GptOssForCausalLM": "gpt_oss",
    "GraniteForCausalLM": "granite",
    "HeliumForCausalLM": "helium",
    "HunYuanDenseV1ForCausalLM": "hunyuan",
    "Lfm2ForCausalLM": "lfm2",
    "LlamaForCausalLM": "llama",
    "Ministral3ForCausalLM": "ministral",
    "MinistralForCausalLM": "ministral",
    "MistralForCausalLM": "mistral",
    "MixtralForCausalLM": "mixtral",
    "NemotronForCausalLM": "nemotron",
    "Olmo2ForCausalLM": "olmo",
    "Olmo3ForCausalLM": "olmo",
    "OPTForCausalLM": "opt",
    "Phi3ForCausalLM": "phi3",
    "PhiForCausalLM": "phi",
    "Qwen2ForCausalLM": "qwen",
    "Qwen3ForCausalLM": "qwen",
    "Qwen3MoeForCausalLM": "qwen",
    "Qwen3_5ForCausalLM": "qwen3_5",
    "Qwen3_5ForConditionalGeneration": "qwen3_5",
    "SeedOssForCausalLM": "seed_oss",
    "SmolLM3ForCausalLM": "smollm",
    "StableLmForCausalLM": "stablelm",
    "Starcoder2ForCausalLM": "starcoder",
    "T5ForConditionalGeneration": "t5",
}

# Models that compute embeddings or class scores and generate no tokens.
POOLING_MODELS: dict[str, str] = {
    "LlamaModel": "decoder_poolers",
    "LlamaForSequenceClassification": "decoder_poolers",
    "MistralModel": "decoder_poolers",
    "MistralForSequenceClassification": "decoder_poolers",
    "Qwen2Model": "decoder_poolers",
    "Qwen2ForSequenceClassification": "decoder_poolers",
    "Qwen3Model": "decoder_poolers",
    "Qwen3ForSequenceClassification": "decoder_poolers",
    "BertModel": "encoder",
    "BertForSequenceClassification": "encoder",
    "ModernBertModel": "encoder",
    "ModernBertForSequenceClassification": "encoder",
    "RobertaModel": "encoder",
    "RobertaForSequenceClassification": "encoder",
    "XLMRobertaModel": "encoder",
    "XLMRobertaForSequenceClassification": "encoder",
}

# Models that read images and text.
IMAGE_MODELS: dict[str, str] = {
    "Idefics3ForConditionalGeneration": "idefics3",
    "Qwen3VLForConditionalGeneration": "qwen3_vl",
    "SmolVLMForConditionalGeneration": "idefics3",
}
_ALL = MODELS | POOLING_MODELS | IMAGE_MODELS


def get_architecture(hf_config: dict[str, Any]) -> str:
    """Returns the first supported architecture that a config.json names.

    Args:
        hf_config: The parsed config.json.

    Raises:
        ValueError: If config.json names no supported architecture. The message lists the supported ones.
    """
    architectures = hf_config.get("architectures")
    for name in architectures if isinstance(architectures, list) else []:
        # The scores of such a classifier are logits of tokens, so it has the usual language model head.
        if hf_config.get("classifier_from_token"):
            name = name.replace("ForSequenceClassification", "ForCausalLM")
        if name in _ALL:
            return name
    raise ValueError(
        f"`architectures` of config.json must be a list with one of {', '.join(_ALL)}, got "
        f"{shown(architectures)}"
    )


def get_model_class(hf_config: dict[str, Any]) -> "tuple[str, type[LanguageModel]]":
    """Returns the first supported architecture that a config.json names, and its class.

    Args:
        hf_config: The parsed config.json.

    Raises:
        ValueError: If config.json names no supported architecture. The message lists the supported ones.
    """
    name = get_architecture(hf_config)
    return name, getattr(import_module(f"jax_paged.models.families.{_ALL[name]}"), name)
