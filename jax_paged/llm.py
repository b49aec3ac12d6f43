"""LLM, the class for running lists of prompts in notebooks and scripts."""

import functools
import inspect
import os
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, Self, cast

from jax_paged.arguments.ignored import refusal
from jax_paged.arguments.plain_values import plain
from jax_paged.arguments.suggestions import check_keywords, field_names
from jax_paged.config.engine_args import EngineArgs
from jax_paged.config.ignored_args import IGNORED, UNSUPPORTED_BY_REQUESTS
from jax_paged.engine import composition
from jax_paged.engine.executors import ExecutorFactory, check_single_engine
from jax_paged.engine.input_processor import CheckedRequest, RequestParams
from jax_paged.engine.list_runner import ListRunner
from jax_paged.engine.llm_engine import LLMEngine
from jax_paged.engine.prompt_reader import as_prompts
from jax_paged.engine.replicas.placement import make_replicas
from jax_paged.engine.synchronized import unsynchronized
from jax_paged.engine.text.tokenizer import Messages
from jax_paged.errors import ArgumentError, check
from jax_paged.inputs import Prompt
from jax_paged.lora_request import LoRARequest
from jax_paged.outputs import BeamSearchOutput, BeamSearchSequence, RequestOutput
from jax_paged.pooling_llm import PoolingMethods, UseTqdm
from jax_paged.sampling_params import BeamSearchParams, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from jax_paged.engine.features.snapshot import EngineState
    from jax_paged.models.attention import CustomAttention
    from jax_paged.models.causal_lm import LanguageModel
    from jax_paged.models.features.hooks import Hook
    from jax_paged.models.weights import LoadedModel
    from jax_paged.worker.executor import Executor
    from jax_paged.worker.features.user_functions.logits_processors import LogitsProcessor
    from jax_paged.worker.sampling.sampler import Sampler

# Default of num_scheduler_steps in LLM. Multi-step decoding delivers tokens in groups and makes new requests
# wait, which does not matter to a caller that waits for complete outputs.
DEFAULT_NUM_SCHEDULER_STEPS = 8


def _single_engine_method[**P, T](
    method: Callable[Concatenate[LLMEngine, P], T], what: str
) -> Callable[Concatenate["LLM", P], T]:
    """Returns a method of LLM that calls a method of its only engine.

    The method raises ValueError if the LLM has several engines.

    Args:
        method: The method of LLMEngine. The result has the same signature and docstring.
        what: The action as a phrase for the error message, such as "sleep".
    """

    @functools.wraps(method)
    def call(self: "LLM", *args: P.args, **kwargs: P.kwargs) -> T:
        check_single_engine(self.llm_engine.args, f"1 to {what}, which is not supported for several engines")
        return method(self.llm_engine, *args, **kwargs)

    return call


class LLM(PoolingMethods):
    """A model and its engine, for running lists of prompts.

    With data_parallel_size or pipeline_parallel_size above 1 there are several engines (a pipeline has as
    many engines as stages), and each list of prompts is distributed among them. Methods that act on a single
    engine, such as `sleep`, then raise an error.

    Call `close`, or use the LLM in a `with` block, to free the memory of weights and KV cache. Any thread may
    call any method; a call waits until calls from other threads have returned.

    Example:
        >>> from jax_paged import LLM, SamplingParams
        >>> with LLM("pagelet", max_model_len=512) as llm:
        ...     params = SamplingParams(temperature=0, max_tokens=16)
        ...     for output in llm.generate(["A block table is", "import os"], params):
        ...         print(output.outputs[0].text)

    Args:
        model: "pagelet" (built in), "smollm2" (a model of 135 million parameters that is downloaded at its
            first use), a local folder in Hugging Face format, a GGUF file, or a model id on the Hugging Face
            Hub.
        tokenizer: Local folder or Hub id of the tokenizer; None uses the model's own.
        loaded: A model in memory to serve instead of the weights of `model`, such as a model in training. The
            weights are shared with the caller; see `from_module`.
        executor: A custom executor, as in LLMEngine. It can't be combined with `loaded`, `hooks`, `attend`,
            `sampler` or `logits_processors`.
        hooks: Hooks that read or change activations. A request selects them by name with
            SamplingParams.hook_args.
        scheduler: A custom scheduler, as in LLMEngine.
        attend: A custom attention function in JAX, used instead of attention_backend; see
            models/attention.CustomAttention.
        sampler: A custom sampler in JAX; see worker/sampling/sampler.Sampler.
        logits_processors: Functions that change logits. A request selects them by name with
            SamplingParams.extra_args.
        **engine_args: Further fields of EngineArgs. The default of num_scheduler_steps is 8, or 1 with
            batch_invariant or pipeline_parallel_size above 1.

    Attributes:
        llm_engine: The engine, or the first of several engines.

    Raises:
        ValueError: If the model or a setting can't be used.
    """

    def __init__(
        self,
        model: "str | os.PathLike[str]" = "pagelet",
        tokenizer: "str | os.PathLike[str] | None" = None,
        *,
        loaded: "LoadedModel | LanguageModel | None" = None,
        executor: "Executor | None" = None,
        hooks: "Sequence[Hook]" = (),
        scheduler: composition.CustomScheduler | None = None,
        attend: "CustomAttention | None" = None,
        sampler: "Sampler | None" = None,
        logits_processors: "Sequence[LogitsProcessor]" = (),
        **engine_args: Any,
    ) -> None:
        check_keywords(
            "LLM", engine_args, [*inspect.signature(LLM).parameters, *field_names(EngineArgs), *IGNORED]
        )
        one_step = engine_args.get("batch_invariant") or engine_args.get("pipeline_parallel_size", 1) != 1
        num_steps = 1 if one_step else DEFAULT_NUM_SCHEDULER_STEPS
        engine_args = {"num_scheduler_steps": num_steps, **engine_args}
        args = EngineArgs(model=plain(model), tokenizer=plain(tokenizer), **engine_args)
        parts: dict[str, Any] = {"loaded": loaded, "attend": attend, "sampler": sampler}
        parts |= {"hooks": hooks or None, "logits_processors": logits_processors or None}
        custom_parts = {name: part for name, part in parts.items() if part is not None}
        if custom_parts:
            allowed = "None with `loaded`, `hooks`, `attend`, `sampler` or `logits_processors`"
            check(executor is None, "executor", executor, allowed)
        if executor is not None or loaded is not None:
            allowed = "1 with `executor` or `loaded`"
            check_single_engine(args, allowed)
        self._replicas = _make_engines(args, executor, ExecutorFactory(**custom_parts), scheduler)
        self.llm_engine = self._replicas[0]
        self._runner = ListRunner(self._replicas)

    @classmethod
    def restore(cls, state: "EngineState | str | os.PathLike[str]", **changes: Any) -> Self:
        """Creates an LLM from the saved state of an engine.

        If the state contains unfinished requests, call `llm_engine.step()` to continue them.

        Example:
            >>> llm.llm_engine.state().save("saved-engine")
            >>> llm = LLM.restore("saved-engine")

        Args:
            state: The result of LLMEngine.state, or the folder to which it was saved.
            **changes: Arguments of LLM that replace those in the state, such as `loaded` or
                attention_backend.

        Raises:
            ValueError: If the state has another version, or does not fit the model or the KV cache.
        """
        saved = composition.EngineState.of(state)
        args = saved.values["args"] | changes
        for name in ("data_parallel_size", "pipeline_parallel_size"):
            check(
                args.get(name, 1) == 1,
                name,
                args.get(name),
                "1 because a saved state belongs to a single engine",
            )
        llm = cls(**args)
        try:
            llm.llm_engine.load_state(saved)
        except BaseException:
            llm.close()
            raise
        return llm

    @classmethod
    def from_module(cls, module: "LanguageModel", tokenizer: str | None = None, **engine_args: Any) -> Self:
        """Creates an LLM for a Flax NNX model in memory, such as a model in training.

        The weights are shared with the module, not copied. If the module's weights are replaced, the next
        request or step raises an error until `update_weights` passes the new weights to the engine.

        Example:
            >>> llm = LLM.from_module(model, tokenizer="path/to/tokenizer")
            >>> llm.update_weights(model)  # after each training step

        Args:
            module: A model of one of the families in models/.
            tokenizer: Local folder or Hub id of the tokenizer. A generation_config.json in the folder sets
                the end tokens and the default sampling parameters. None means that prompts are token ids
                only.
            **engine_args: Other arguments of LLM.

        Raises:
            ValueError: If the model or a setting can't be used.
        """
        engine_args = {"skip_tokenizer_init": tokenizer is None, **engine_args}
        return cls(type(module).__name__, tokenizer, loaded=module, **engine_args)

    update_weights = _single_engine_method(LLMEngine.update_weights, "update weights")
    sleep = _single_engine_method(LLMEngine.sleep, "sleep")
    wake_up = _single_engine_method(LLMEngine.wake_up, "wake up")
    pin_prefix = _single_engine_method(LLMEngine.pin_prefix, "pin prefixes")
    unpin_prefix = _single_engine_method(LLMEngine.unpin_prefix, "pin prefixes")
    pool_map = _single_engine_method(LLMEngine.pool_map, "draw the KV cache")

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: UseTqdm = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Generates completions for prompts; all prompts run together in batches.

        Requests that were added directly to `llm_engine` also advance during this call, but their outputs are
        not returned. If such a request finishes meanwhile, its final output is lost. The same applies to
        `chat` and `beam_search`.

        Example:
            >>> outputs = llm.generate(["A block table is", [1, 2, 3]], SamplingParams(max_tokens=8))
            >>> [output.outputs[0].text for output in outputs]

        Args:
            prompts: A prompt or a list of prompts. A prompt is text, a list or array of token ids, or a dict
                from inputs.py, such as {"prompt": text} or {"prompt_token_ids": ids}.
            sampling_params: Parameters for all prompts, or a list with one item per prompt. None uses the
                model's defaults; see `get_default_sampling_params`.
            use_tqdm: Whether to show a progress bar, or a function that creates one and has tqdm's arguments.
            lora_request: The adapter for all prompts, or a list with one adapter or None per prompt.
            priority: One integer per prompt; lower values run earlier. None means 0 for all prompts. Other
                values than 0 need scheduling_policy="priority".

        Returns:
            One output per prompt, in the order of the prompts.

        Raises:
            ValueError: If the engine can't run one of the prompts. No prompt has run then.
        """
        listed = as_prompts(prompts)
        params = self._params_of(sampling_params, len(listed))
        priorities = [0] * len(listed) if priority is None else plain(priority)
        is_list = isinstance(priorities, list | tuple)
        check(
            is_list and len(priorities) == len(listed),
            "priority",
            priority,
            f"a list of {len(listed)} integers, one per prompt",
        )
        adapters = _per_prompt("lora_request", lora_request, len(listed))
        rows = range(len(listed))
        requests = [self._check(i, listed[i], params[i], priorities[i], adapters[i]) for i in rows]
        return self._run(requests, use_tqdm)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: UseTqdm = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Generates answers to one or several conversations, using the tokenizer's chat template.

        Example:
            >>> messages = [{"role": "user", "content": "What is 17 + 25?"}]
            >>> llm.chat(messages, SamplingParams(temperature=0))[0].outputs[0].text

        Args:
            messages: A conversation, which is a list of dicts with "role" and "content", or a list of
                conversations. For a model that reads images, content may be a list of parts that includes
                images (docs/pictures.md).
            sampling_params: Parameters, as in `generate`.
            use_tqdm: The progress bar, as in `generate`.
            lora_request: The adapter, as in `generate`.
            chat_template: A Jinja template that replaces the tokenizer's template.
            chat_template_content_format: The form in which the template receives "content": "string", or
                "openai" for a list of parts. "auto" selects "openai" if the template handles images.
            add_generation_prompt: Whether to append the tokens that start an answer.
            continue_final_message: Whether the answer continues the last message instead of following it;
                needs add_generation_prompt=False.
            tools: JSON schemas of functions, for templates that support tools.
            chat_template_kwargs: Further variables for the template. They may include chat_template,
                add_generation_prompt, continue_final_message and tools, and then take precedence over these
                arguments.
            mm_processor_kwargs: Must be None or empty; EngineArgs.mm_processor_kwargs applies to all images.

        Returns:
            One output per conversation, in the order of the conversations.

        Raises:
            ValueError: If the engine can't run one of the conversations, or the tokenizer has no chat
                template.
        """
        allowed = UNSUPPORTED_BY_REQUESTS["mm_processor_kwargs"]
        check(
            refusal(mm_processor_kwargs, allowed) is None,
            "mm_processor_kwargs",
            mm_processor_kwargs,
            "None or {} because EngineArgs.mm_processor_kwargs applies to all images",
        )
        tokenizer = self.llm_engine.tokenizer
        if tokenizer is None:
            raise ArgumentError("skip_tokenizer_init", True, "False for chats, which need a tokenizer")
        ok = isinstance(messages, list | tuple) and bool(messages)
        check(ok, "messages", messages, "a non-empty list of messages or conversations")
        conversations = [messages] if isinstance(messages[0], dict) else messages
        settings: dict[str, Any] = {
            "chat_template": chat_template,
            "content_format": chat_template_content_format,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "tools": tools,
            "template_kwargs": chat_template_kwargs,
        }
        chats = [composition.extract_images(cast(Messages, x), self.llm_engine.config) for x in conversations]
        prompts = [chat.prompt(tokenizer.encode_chat(chat.messages, **settings)) for chat in chats]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm, lora_request=lora_request)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        use_tqdm: UseTqdm = True,
    ) -> list[BeamSearchOutput]:
        """Finds the most likely continuations of prompts by beam search; all prompts run together.

        Example:
            >>> (output,) = llm.beam_search("A block table is", BeamSearchParams(beam_width=4))
            >>> output.sequences[0].text, output.sequences[0].cum_logprob

        Args:
            prompts: A prompt or a list of prompts, as in `generate`.
            params: Parameters of the beam search.
            lora_request: The adapter, as in `generate`.
            use_tqdm: The progress bar, as in `generate`.

        Returns:
            One output per prompt, in the order of the prompts. Its sequences start with the prompt and are
            sorted from best to worst.

        Raises:
            ValueError: If the engine can't run one of the prompts. No prompt has run then.
        """
        engine, listed = self.llm_engine, as_prompts(prompts)
        adapters = _per_prompt("lora_request", lora_request, len(listed))
        rows = enumerate(zip(listed, adapters, strict=True))
        requests = [self._check(i, prompt, params, 0, adapter) for i, (prompt, adapter) in rows]
        outputs = []
        for request, output in zip(requests, self._run(requests, use_tqdm), strict=True):
            beams = []
            for beam in output.outputs:
                tokens = [*request.prompt_token_ids, *beam.token_ids]
                text = str(engine.tokenizer.hf.decode(tokens)) if engine.tokenizer else None
                score, reason = beam.cumulative_logprob, beam.finish_reason
                beams.append(BeamSearchSequence(tokens, score, text, reason, beam.stop_reason))
            outputs.append(BeamSearchOutput(beams))
        return outputs

    @unsynchronized
    def get_tokenizer(self) -> "PreTrainedTokenizerBase":
        """Returns the tokenizer as an object of the transformers library.

        Raises:
            ValueError: If the engine has no tokenizer.
        """
        return self.llm_engine.get_tokenizer()

    @unsynchronized
    def get_default_sampling_params(self) -> SamplingParams:
        """Returns a copy of the default sampling parameters, from the model's generation_config.json."""
        return self.llm_engine.input_processor.default_params

    def compile_plan(self) -> str:
        """Returns a table of the compiled programs, as LLMEngine.compile_plan does."""
        return self.llm_engine.compile_plan()

    @unsynchronized
    def close(self) -> None:
        """Frees the memory of weights and KV cache; a second call does nothing.

        If a call is running in another thread, it ends after its current step with EngineDeadError, and
        `close` waits for it.
        """
        for engine in self._replicas:
            engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return "".join(["LLM", *map(repr, self._replicas)])

    def _params_of(
        self, params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
    ) -> Sequence[SamplingParams | None]:
        if not isinstance(params, list | tuple):
            return [params] * num_prompts  # pyright: ignore[reportReturnType]
        if len(params) != num_prompts:
            raise ArgumentError(
                "sampling_params", len(params), f"{num_prompts}, one per prompt", aspect="the length of"
            )
        return params

    def _check(
        self,
        index: int,
        prompt: Prompt,
        params: RequestParams,
        priority: int = 0,
        adapter: LoRARequest | None = None,
    ) -> CheckedRequest:
        try:
            return self.llm_engine.check_request(prompt, params, priority=priority, lora_request=adapter)
        except ValueError as error:
            raise ValueError(f"prompts[{index}]: {error}") from error

    def _run(self, requests: list[CheckedRequest], use_tqdm: UseTqdm) -> list[RequestOutput]:
        return self._runner.run(requests, use_tqdm)


def _make_engines(
    args: EngineArgs,
    executor: "Executor | None",
    executors: ExecutorFactory,
    scheduler: composition.CustomScheduler | None,
) -> tuple[LLMEngine, ...]:
    """Creates the engines of an LLM.

    Args:
        args: Arguments of the engines, including their number.
        executor: The executor of a single engine; None if `executors` makes the executors.
        executors: Factory of executors.
        scheduler: A custom scheduler, as in LLMEngine.
    """

    def make(index: int) -> LLMEngine:
        nonlocal args
        engine = LLMEngine(args, executor or functools.partial(executors.make, index), scheduler=scheduler)
        args = engine.args  # now with the backends that the first engine selected
        return engine

    return make_replicas(args.num_engines, make)


def _per_prompt(name: str, given: Any, num: int) -> Sequence[Any]:
    """Returns one value per prompt, from one value for all prompts or a list of values."""
    given = given if isinstance(given, list | tuple) else [given] * num
    check(len(given) == num, name, len(given), f"{num}, one per prompt", aspect="the length of")
    return given
