"""Which model families there are. A new one is a file beside this one, and a line below.

Nothing here imports JAX until a family's class is asked for: the front of the engine checks names only.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jax_paged.models.causal_lm import LanguageModel

# The key is the name under "architectures" in config.json and of the class; the value is the class's file.
MODELS: dict[str, str] = {
    "DeepseekV2ForCausalLM": "deepseek",
    "Gemma2ForCausalLM": "gemma",
    "Gemma3ForCausalLM": "gemma",
    "GPT2LMHeadModel": "gpt2",
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "MixtralForCausalLM": "mixtral",
    "OPTForCausalLM": "opt",
    "Phi3ForCausalLM": "phi3",
    "Qwen2ForCausalLM": "qwen",
    "Qwen3ForCausalLM": "qwen",
    "Qwen3MoeForCausalLM": "qwen",
    "T5ForConditionalGeneration": "t5",
}

# Those that make embeddings or classes of texts, and draw no tokens.
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


def get_architecture(hf_config: dict[str, Any]) -> str:
    """Returns the first supported architecture that a config.json names.

    Raises:
        ValueError: If it names none; the message lists the supported ones.
    """
    architectures = hf_config.get("architectures")
    known = MODELS | POOLING_MODELS
    for name in architectures if isinstance(architectures, list) else []:
        if hf_config.get("classifier_from_token"):  # its classes are tokens, and its head is the usual one
            name = name.replace("ForSequenceClassification", "ForCausalLM")
        if name in known:
            return name
    raise ValueError(
        f"architectures of config.json is {architectures!r}; allowed: a list with one of {', '.join(known)}"
    )


def get_model_class(hf_config: dict[str, Any]) -> "tuple[str, type[LanguageModel]]":
    """Returns the first supported architecture that a config.json names, and its class.

    Raises:
        ValueError: If it names none; the message lists the supported ones.
    """
    name = get_architecture(hf_config)
    return name, getattr(import_module(f"jax_paged.models.{(MODELS | POOLING_MODELS)[name]}"), name)
