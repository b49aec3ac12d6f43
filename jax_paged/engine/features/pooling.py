"""Pooling requests (embeddings, classification, scores): their checks, parameters and results."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import numpy as np

from jax_paged.arguments.shown_values import one_of
from jax_paged.config.engine_config import EngineConfig
from jax_paged.engine.prompt_reader import as_prompts
from jax_paged.engine.text.tokenizer import Tokenizer
from jax_paged.errors import ArgumentError, check
from jax_paged.inputs import Prompt
from jax_paged.models.features.pooling import PoolingSpec
from jax_paged.outputs import RequestOutput
from jax_paged.pooling_params import PoolingParams, PoolingTask
from jax_paged.sampling_params import SamplingParams


class PoolingRequests:
    """Checks of pooling requests, and conversion of the engine's outputs into their results.

    Args:
        config: Engine configuration, which specifies the model's pooling, if any.
        tokenizer: The engine's tokenizer; None if prompts are token ids only.
    """

    def __init__(self, config: EngineConfig, tokenizer: Tokenizer | None) -> None:
        self._config = config
        self._tokenizer = tokenizer

    @property
    def _spec(self) -> PoolingSpec:
        assert self._config.pooling is not None, "the model does not support pooling"
        return self._config.pooling

    @property
    def _has_text_limit(self) -> bool:
        """True if texts longer than the checkpoint's max_seq_length are truncated to it.

        If the user has chosen a smaller max_model_len, longer texts are errors instead.
        """
        limit = self._config.pooling.text.max_seq_length if self._config.pooling else None
        return limit is not None and limit <= self._config.max_model_len

    def resolve(self, params: PoolingParams, task: PoolingTask | None = None) -> PoolingParams:
        """Checks parameters against the model, and returns a copy with the task filled in.

        Args:
            params: The user's parameters.
            task: The task of the called method; None for the task in `params`, or else the model's first one.

        Raises:
            ValueError: If the model does not support the task or a parameter. The message names the argument.
        """
        check(isinstance(params, PoolingParams), "pooling_params", params, "PoolingParams")
        spec = self._config.pooling
        if spec is None:
            remedy = ". Pass runner='pooling' to use a generative model for pooling"
            raise ArgumentError("model", self._config.model_name, "a pooling model", remedy=remedy)
        tasks = _tasks_of(spec)
        wanted = task or params.task or tasks[0]
        allowed = f"{one_of(tasks)}, the tasks that {self._config.architecture} supports"
        check(wanted in tasks, "task", wanted, allowed)
        check(params.task in (None, wanted), "pooling_params.task", params.task, f"None or {wanted!r}")
        if params.dimensions is not None:
            sizes = spec.dimensions
            listed = " or ".join(map(str, sizes or ())) or "None"
            allowed = f"at most {spec.embedding_size}" if sizes is None else listed
            ok = not spec.labels and (sizes is None or params.dimensions in sizes)
            if sizes == ():
                allowed += " because the model does not declare support for it (is_matryoshka)"
            check(ok and params.dimensions <= spec.embedding_size, "dimensions", params.dimensions, allowed)
        return dataclasses.replace(params, task=wanted)

    def prepare(self, prompt: Any, params: PoolingParams) -> tuple[Any, bool]:
        """Returns a prompt with the model's default prompt added, and whether it is truncated if too long."""
        default = self._config.pooling.text.prompt if self._config.pooling else ""
        if default and isinstance(prompt, str) and prompt:
            prompt = default + prompt
        elif (
            default
            and isinstance(prompt, dict)
            and prompt.get("prompt_token_ids") is None
            and prompt.get("prompt")
        ):
            prompt = {**prompt, "prompt": default + str(prompt["prompt"])}
        return prompt, self._is_truncated(params)

    def sampling_params(self, params: PoolingParams) -> SamplingParams:
        """Returns the sampling parameters of a pooling request: a prefill, and one token that is ignored.

        Raises:
            ValueError: If the model does not support the parameters, or the prefix cache can't be used as
                requested.
        """
        params = self.resolve(params)
        kind = "ALL" if params.task == "token_embed" else self._spec.type
        skips = params.skip_reading_prefix_cache
        allowed = "None or True unless the last token is pooled, because cached tokens have no hidden states"
        check(skips is not False or kind == "LAST", "skip_reading_prefix_cache", skips, allowed)
        return SamplingParams(
            temperature=0,
            max_tokens=1,
            ignore_eos=True,
            detokenize=False,
            truncate_prompt_tokens=params.truncate_prompt_tokens,
            skip_reading_prefix_cache=kind != "LAST" if skips is None else skips,
            pooling=kind,
            second_text=params.second_text,
        )

    def truncate(self, token_ids: list[int], num_tokens: int | None) -> None:
        """Truncates a prompt in place.

        If texts are truncated to max_seq_length (`_has_text_limit`), None and -1 apply this limit, and the
        checkpoint's settings determine which end is cut off. Otherwise None keeps the whole prompt and -1
        means max_model_len. Encoder-only models then keep the first tokens, and other models the last ones.

        Args:
            token_ids: The prompt.
            num_tokens: truncate_prompt_tokens of the request.
        """
        text, most = self._spec.text, self._config.max_model_len
        added = self._tokenizer.special_tokens_around if self._tokenizer else ([], [])
        if num_tokens in (None, -1) and self._has_text_limit:
            token_ids[:] = truncate_tokens(
                token_ids, text.max_seq_length or most, text.truncation_side, added
            )
        elif num_tokens is not None:
            num_tokens = most if num_tokens == -1 else num_tokens
            if self._spec.is_encoder:
                token_ids[:] = truncate_tokens(token_ids, num_tokens, "right", added)
            else:
                del token_ids[:-num_tokens]

    def pair_prompt(self, pair: tuple[Any, Any], params: PoolingParams) -> tuple[Prompt, PoolingParams]:
        """Returns a prompt that contains two texts, and parameters that specify where the second text begins.

        Args:
            pair: The two texts.
            params: Parameters of the request.

        Raises:
            ValueError: If a text is not a non-empty string, or there is no tokenizer.
        """
        first, second = pair
        for name, text in (("data_1", first), ("data_2", second)):
            check(isinstance(text, str) and bool(text), name, text, "a non-empty string")
        if self._tokenizer is None:
            raise ArgumentError("data_1", first, "token ids because the engine has no tokenizer")
        if self._spec.label_tokens:
            # A model with label tokens reads both texts as one chat, in which a token may contain characters
            # of both.
            return first + second, params
        max_len = None if self._is_truncated(params) else self._config.max_model_len
        token_ids, start = self._tokenizer.encode_pair(first, second, max_model_len=max_len)
        if start is not None:
            params = dataclasses.replace(params, extra_kwargs={"compressed_token_type_ids": start})
        return {"prompt_token_ids": token_ids}, params

    def data_of(self, output: RequestOutput, params: PoolingParams) -> np.ndarray:
        """Returns the result of a pooling request, float32: an embedding, scores, or one embedding per token.

        Args:
            output: The engine's output for the finished request.
            params: Parameters as returned by `resolve`.

        Raises:
            ValueError: If the engine could not compute the result.
        """
        spec, (completion,) = self._spec, output.outputs
        if completion.finish_reason != "length":
            raise ValueError(f"pooling failed: {completion.stop_reason}")
        captured = completion.captured
        data = captured["hidden" if params.task == "token_embed" else "pooled"]
        if not np.isfinite(data).all():
            raise ValueError("pooling failed: the hidden states are not finite")
        activates = params.use_activation if params.normalize is None else params.normalize
        if spec.labels:
            return data if activates is False else _SCORES[spec.activation](data)
        data = data[..., : params.dimensions]
        if not (spec.normalize if activates is None else activates):
            return data
        return data / np.maximum(np.linalg.norm(data, axis=-1, keepdims=True), 1e-12)

    def _is_truncated(self, params: PoolingParams) -> bool:
        """Returns whether a text that is too long is truncated instead of rejected."""
        return params.truncate_prompt_tokens is not None or self._has_text_limit


def _tasks_of(spec: PoolingSpec) -> tuple[PoolingTask, ...]:
    """Returns the tasks that a model supports. The first one is the default."""
    if not spec.labels:
        return ("embed", "score", "token_embed")
    return ("classify", "score") if len(spec.labels) == 1 else ("classify",)


def truncate_tokens(
    token_ids: list[int], num_tokens: int, side: Literal["left", "right"], added: tuple[list[int], list[int]]
) -> list[int]:
    """Truncates a text to at most `num_tokens` tokens, in the same way as transformers.

    Args:
        token_ids: Tokens of the text.
        num_tokens: Maximum number of tokens.
        side: The end of the text that is cut off.
        added: The special tokens before and after a text, which are kept; see
            Tokenizer.special_tokens_around.
    """
    if len(token_ids) <= num_tokens:
        return token_ids
    before, after = added
    num_before = len(before) if token_ids[: len(before)] == before else 0
    end = len(token_ids) - len(after)
    end = end if token_ids[end:] == after else len(token_ids)
    room = max(0, num_tokens - num_before - (len(token_ids) - end))
    kept = slice(num_before, num_before + room) if side == "right" else slice(end - room, end)
    return (token_ids[:num_before] + token_ids[kept] + token_ids[end:])[:num_tokens]


def distinct(texts: Sequence[Any]) -> tuple[list[Any], list[int]]:
    """Returns the distinct texts in order of first occurrence, and for each text its index among them."""
    places: dict[str, int] = {}
    which = [places.setdefault(repr(text), len(places)) for text in texts]
    first = dict(zip(reversed(which), reversed(texts), strict=True))
    return [first[i] for i in range(len(places))], which


def similarity(a: np.ndarray, b: np.ndarray) -> float:
    """Returns the cosine similarity of two embeddings."""
    norms = np.linalg.norm(a.astype(np.float64)) * np.linalg.norm(b.astype(np.float64))
    return float(a.astype(np.float64) @ b.astype(np.float64) / max(norms, 1e-24))


def _softmax(x: np.ndarray) -> np.ndarray:
    exp = np.exp(x - x.max())
    return exp / exp.sum()


_SCORES: dict[str, Callable[[np.ndarray], Any]] = {
    "softmax": _softmax,
    "sigmoid": lambda x: np.exp(-np.logaddexp(0, -x)),
    "identity": lambda x: x,
}


def pairs_of(data_1: Any, data_2: Any, names: Iterable[str] = ("data_1", "data_2")) -> list[tuple[Any, Any]]:
    """Returns pairs of texts from two arguments, each a text or a list of texts.

    A single first text is paired with every second text. Otherwise the lists are paired item by item.

    Args:
        data_1: The first argument.
        data_2: The second argument.
        names: Names of the two arguments, for error messages.

    Raises:
        ValueError: If an argument has no texts, or the lengths of the lists do not match.
    """
    first, second = as_prompts(data_1), as_prompts(data_2)
    name, name_2 = names
    check(bool(first), name, data_1, "at least one text")
    check(bool(second), name_2, data_2, "at least one text")
    if len(first) == 1:
        first *= len(second)
    aspect = "the number of texts in"
    check(len(first) == len(second), name, len(first), f"1 or {len(second)}", aspect=aspect)
    return list(zip(first, second, strict=True))
