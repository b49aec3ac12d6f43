"""Loading of EAGLE-3 heads, and checks that a head fits its target model."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_paged.models.checkpoint import read_json
from jax_paged.models.families.eagle import DraftLogitIndex, EagleConfig, EagleHead, canonical_key
from jax_paged.models.families.llama import LlamaForCausalLM
from jax_paged.models.loading.stored_tensors import StoredTensor, read_headers
from jax_paged.models.loading.weight_reading import check_stored, raise_problems, read_weights, weights_of
from jax_paged.models.parallel.sharding import DeviceGrid
from jax_paged.models.weights import LoadedModel, log_unused

# NumPy's names of the dtypes that d2t may have.
_DTYPES = {"I64": "<i8", "I32": "<i4"}


def load_head(folder: Path, target: LoadedModel, grid: DeviceGrid | None = None) -> EagleHead:
    """Loads an EAGLE-3 head onto the default device, or divides it among several devices.

    The weights get the dtype of the target model.

    Args:
        folder: Holds config.json, and either model.safetensors or shards with their index.
        target: The target model that the head drafts for; not modified.
        grid: The devices that share the weights; None for the default device.

    Raises:
        ValueError: If the folder holds no head for this model. The message lists every problem with
            config.json. If there are none, it lists everything that does not fit the model: sizes,
            vocabulary, tensors, and the type of the model.
    """
    config = EagleConfig.from_hf(read_json(folder / "config.json"))
    stored = {canonical_key(key): tensor for key, tensor in read_headers(folder).items()}
    has_embedding = "embed_tokens.weight" in stored
    options = {"has_embedding": has_embedding, "dtype": target.dtype}
    head = nnx.eval_shape(lambda: EagleHead(config, **options, rngs=nnx.Rngs(0)))
    offsets = stored.pop("d2t", None)
    check = check_stored(stored, weights_of(head), head.weight_table)
    log_unused(folder, check.unused)
    problems = check.problems
    columns, column_problems = _columns(config, offsets)
    problems += [*column_problems, *_misfits(config, target, has_embedding=has_embedding)]
    misfit = f"the EAGLE-3 head in {folder} can't be used with the target model, {target.architecture}"
    raise_problems(misfit, problems)
    read_weights(head, stored, target.dtype, folder, grid)
    head.columns = DraftLogitIndex(jnp.asarray(columns))
    return head


def _misfits(config: EagleConfig, target: LoadedModel, *, has_embedding: bool) -> list[str]:
    """Returns the problems with a head's sizes for a target model, one line each."""
    model, problems = target.model, []
    if not isinstance(model, LlamaForCausalLM) or not model.has_head:
        problems.append(
            f"the target model must be of the Llama family and generate text, got {target.architecture}"
        )
    if config.vocab_size != target.vocab_size:
        problems.append(
            f"`vocab_size` must be {target.vocab_size} as in the target model, got {config.vocab_size}"
        )
    size = target.config.hidden_size
    if config.target_hidden_size != size:
        name = "hidden_size" if config.target_hidden_size == config.hidden_size else "target_hidden_size"
        problems.append(f"`{name}` must be {size} as in the target model, got {config.target_hidden_size}")
    elif config.hidden_size != size and not has_embedding:
        problems.append(
            f"embed_tokens.weight is missing: the embeddings of the target model can't be used because they "
            f"have {size} values, and hidden_size of the head is {config.hidden_size}"
        )
    num_layers = getattr(target.config, "num_hidden_layers", 0)
    if config.feature_layers and max(config.feature_layers) > num_layers:
        problems.append(
            f"each of `eagle_aux_hidden_state_layer_ids` must be at most {num_layers}, the output of the "
            f"target model's last layer, got {config.feature_layers}"
        )
    return problems


def _columns(config: EagleConfig, offsets: StoredTensor | None) -> tuple[np.ndarray, list[str]]:
    """Returns the values of DraftLogitIndex, int32 [vocab_size], and the problems with the tensor d2t.

    d2t holds, for each token id of the draft vocabulary, the offset to its id in the vocabulary of the model.
    The result holds the inverse: the draft id of each token of the model, or draft_vocab_size if the token is
    not in the draft vocabulary.
    """
    n, vocab_size = config.draft_vocab_size, config.vocab_size
    if n == vocab_size:  # in this case d2t is not used
        return np.arange(n, dtype=np.int32), []
    columns = np.full(vocab_size, n, np.int32)
    if offsets is None:
        return columns, [f"d2t is missing; it is required if draft_vocab_size, {n}, is not vocab_size"]
    if offsets.shape != (n,) or offsets.dtype not in _DTYPES:
        return columns, [f"d2t must be I64 or I32 of shape {(n,)}, got {offsets.dtype} {offsets.shape}"]
    ids = np.arange(n) + np.memmap(offsets.file, _DTYPES[offsets.dtype], "r", offsets.offset, offsets.shape)
    is_token = (ids >= 0) & (ids < vocab_size)
    if not is_token.all():
        i = int(np.argmin(is_token))
        return columns, [f"d2t must map draft token {i} to an id in [0, {vocab_size - 1}], got {ids[i]}"]
    columns[ids] = np.arange(n)
    if len(np.unique(ids)) < n:
        return columns, ["d2t must map each draft token to a different id, got the same id for several"]
    return columns, []
