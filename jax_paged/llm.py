"""LLM: prompts in, outputs out, for notebooks and scripts."""

import functools
import inspect
import os
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, Self, cast

from jax_paged.arguments.ignored import refused
from jax_paged.arguments.plain_values import plain
from jax_paged.arguments.suggestions import check_keywords, field_names
from jax_paged.config.engine_args import EngineArgs
from jax_paged.config.ignored_args import IGNORED, UNSUPPORTED_BY_REQUESTS
from jax_paged.engine import composition
from jax_paged.engine.executors import Executors, check_single_engine
from jax_paged.engine.input_processor import CheckedRequest, RequestParams
from jax_paged.engine.list_runner import ListRunner
from jax_paged.engine.llm_engine import LLMEngine
from jax_paged.engine.prompt_reader import as_prompts
from jax_paged.engine.replicas.placement import make_replicas
from jax_paged.engine.serialized import any_thread
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
    from jax_paged.models.attention import Attend
    from jax_paged.models.causal_lm import LanguageModel
    from jax_paged.models.features.hooks import Hook
    from jax_paged.models.weights import LoadedModel
    from jax_paged.worker.executor import Executor
    from jax_paged.worker.features.user_functions.logits_processors import LogitsProcessor
    from jax_paged.worker.sampling.sampler import Sampler

# Decode steps in one: whoever waits for whole outputs minds neither tokens in bursts nor late newcomers.
NUM_SCHEDULER_STEPS = 8


def _of_the_only_engine[**P, T](
    method: Callable[Concatenate[LLMEngine, P], T], what: str
) -> Callable[Concatenate["LLM", P], T]:
    """Returns a method of LLM that calls a method of its engine.

    Args:
        method: The method of LLMEngine; its signature and its documentation are those of the result.
        what: What it does, for the error that is raised if there are several engines.
    """

    @functools.wraps(method)
    def call(self: "LLM", *args: P.args, **kwargs: P.kwargs) -> T:
        check_single_engine(self.llm_engine.args, f"1 to {what}, which is done to one engine at a time")
        return method(self.llm_engine, *args, **kwargs)

    return call


class LLM(PoolingMethods):
    """A model with its engine, or several; `close` it, or use it in a `with` block, to free the memory.

    Any thread may call any method: a call waits until those of other threads have returned.

    Args:
        model: "pagelet" (built in), a local folder in Hugging Face layout, or a hub id.
        tokenizer: Folder or hub id of the tokenizer; None takes the model's own.
        loaded: A model in memory to serve in place of the weights of `model`, such as one in training. They
            stay the caller's; see from_module.
        executor: As LLMEngine takes it; only without `loaded` and those of the next ones that change steps.
        hooks: What requests may ask for by name, with SamplingParams.hook_args.
        scheduler: One of your own, as LLMEngine takes it.
        attend: Attention of your own, in JAX, in place of attention_backend: see models/attention.Attend.
        sampler: A choice of tokens of your own, in JAX: see worker/sampler.Sampler.
        logits_processors: What requests may ask for by name, with SamplingParams.extra_args.
        **engine_args: The other fields of EngineArgs; num_scheduler_steps is 8 unless it is given, or
            batch_invariant is True, or there is a pipeline. With pipeline_parallel_size or data_parallel_size
            there are several engines, over which lists are spread; what concerns one alone is an error then.

    Attributes:
        llm_engine: The engine, or the first of several.

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
        attend: "Attend | None" = None,
        sampler: "Sampler | None" = None,
        logits_processors: "Sequence[LogitsProcessor]" = (),
        **engine_args: Any,
    ) -> None:
        check_keywords(
            "LLM", engine_args, [*inspect.signature(LLM).parameters, *field_names(EngineArgs), *IGNORED]
        )
        is_single = engine_args.get("batch_invariant") or engine_args.get("pipeline_parallel_size", 1) != 1
        num_steps = 1 if is_single else NUM_SCHEDULER_STEPS
        engine_args = {"num_scheduler_steps": num_steps, **engine_args}
        args = EngineArgs(model=plain(model), tokenizer=plain(tokenizer), **engine_args)
        parts: dict[str, Any] = {"loaded": loaded, "attend": attend, "sampler": sampler}
        parts |= {"hooks": hooks or None, "logits_processors": logits_processors or None}
        custom_parts = {name: part for name, part in parts.items() if part is not None}
        if custom_parts:
            own = "`loaded`, `hooks`, `attend`, `sampler` and `logits_processors`"
            check(executor is None, "executor", executor, f"None if {own} are given")
        if executor is not None or loaded is not None:
            allowed = "1 with `executor` or `loaded`"
            check_single_engine(args, allowed)
        self._replicas = _make_engines(args, executor, Executors(**custom_parts), scheduler)
        self.llm_engine = self._replicas[0]
        self._runner = ListRunner(self._replicas)

    @classmethod
    def restore(cls, state: "EngineState | str | os.PathLike[str]", **changes: Any) -> Self:
        """Makes an LLM that goes on where the engine of a state was; step its llm_engine.

        Args:
            state: What LLMEngine.state returned, or the folder that it was saved to.
            **changes: Arguments in place of those of the state, such as `loaded` or another backend.

        Raises:
            ValueError: If the state is of another version, or the model or the pool is another one.
        """
        loaded = composition.EngineState.of(state)
        args = loaded.values["args"] | changes
        for name in ("data_parallel_size", "pipeline_parallel_size"):
            check(args.get(name, 1) == 1, name, args.get(name), "1 to restore the state of one engine")
        llm = cls(**args)
        try:
            llm.llm_engine.load_state(loaded)
        except BaseException:
            llm.close()
            raise
        return llm

    @classmethod
    def from_module(cls, module: "LanguageModel", tokenizer: str | None = None, **engine_args: Any) -> Self:
        """Serves a Flax NNX model in memory, such as one in training; its weights are shared, not copied.

        When the module gets other weights, the next request or step is an error until they are handed over
        by `update_weights`.

        Args:
            module: One of the families of models/.
            tokenizer: Folder or hub id of the tokenizer; generation_config.json in a folder names end tokens
                and sampling defaults. None for token ids only.
            **engine_args: As LLM takes them.

        Raises:
            ValueError: If the model or a setting can't be used.
        """
        engine_args = {"skip_tokenizer_init": tokenizer is None, **engine_args}
        return cls(type(module).__name__, tokenizer, loaded=module, **engine_args)

    update_weights = _of_the_only_engine(LLMEngine.update_weights, "update weights")
    sleep = _of_the_only_engine(LLMEngine.sleep, "sleep")
    wake_up = _of_the_only_engine(LLMEngine.wake_up, "wake up")
    pin_prefix = _of_the_only_engine(LLMEngine.pin_prefix, "pin prefixes")
    unpin_prefix = _of_the_only_engine(LLMEngine.unpin_prefix, "pin prefixes")
    pool_map = _of_the_only_engine(LLMEngine.pool_map, "draw its pool")

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: UseTqdm = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Completes prompts, all of them together.

        Requests that were added to llm_engine by hand go on meanwhile, and the last output of one that ends
        is lost, as only LLMEngine.step returns it. The same is true of `chat` and `beam_search`.

        Args:
            prompts: A prompt or a list of them; each is text, a list or array of token ids, or one of the
                dicts of inputs.py, such as {"prompt": text} or {"prompt_token_ids": ids}.
            sampling_params: For all prompts, or a list with one per prompt; None takes the defaults.
            use_tqdm: Whether to show a progress bar, or what makes one, called as tqdm is.
            lora_request: The adapter of all prompts, or a list with one, or None, per prompt.
            priority: One integer per prompt, where lower is served earlier. All are 0, as with None, unless
                scheduling_policy is "priority".

        Returns:
            One output per prompt, in their order.

        Raises:
            ValueError: If the engine can't run one of the prompts; then none has run.
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
        adapters = _one_each("lora_request", lora_request, len(listed))
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
        """Answers a conversation, or a list of them, through the tokenizer's chat template.

        Args:
            messages: dicts with "role" and "content", or a list of such lists. Of a model that reads images,
                content may be a list of parts, some of them images (docs/pictures.md).
            sampling_params: As `generate` takes them.
            use_tqdm: As `generate` takes it.
            lora_request: As `generate` takes it.
            chat_template: A Jinja template in place of the tokenizer's own.
            chat_template_content_format: How the template gets "content": as a string ("auto", "string"), or
                as a list of parts ("openai").
            add_generation_prompt: Whether to append what an answer starts with.
            continue_final_message: Whether the answer continues the last message instead of following it;
                needs add_generation_prompt=False.
            tools: JSON schemas of functions, for templates that use them.
            chat_template_kwargs: Further variables of the template. They take precedence over the
                arguments chat_template, add_generation_prompt, continue_final_message and tools, which they
                may also name.
            mm_processor_kwargs: None or empty; EngineArgs has those for all images.

        Returns:
            One output per conversation, in their order.

        Raises:
            ValueError: As `generate`; also if the tokenizer has no chat template.
        """
        allowed = UNSUPPORTED_BY_REQUESTS["mm_processor_kwargs"]
        check(
            refused(mm_processor_kwargs, allowed) is None,
            "mm_processor_kwargs",
            mm_processor_kwargs,
            "None or {} because EngineArgs.mm_processor_kwargs applies to all images",
        )
        tokenizer = self.llm_engine.tokenizer
        if tokenizer is None:
            raise ArgumentError("skip_tokenizer_init", True, "False for chats, which need a tokenizer")
        ok = isinstance(messages, list | tuple) and bool(messages)
        check(ok, "messages", messages, "a list of messages")
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
        """Searches the likeliest continuations of prompts, all of them together.

        Args:
            prompts: As `generate` takes them.
            params: What is searched.
            lora_request: As `generate` takes it.
            use_tqdm: As `generate` takes it.

        Returns:
            One output per prompt, in their order; its sequences, best first, begin with the prompt.

        Raises:
            ValueError: If the engine can't run one of the prompts; then none has run.
        """
        engine, listed = self.llm_engine, as_prompts(prompts)
        adapters = _one_each("lora_request", lora_request, len(listed))
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

    @any_thread
    def get_tokenizer(self) -> "PreTrainedTokenizerBase":
        """Returns the tokenizer as transformers loads it.

        Raises:
            ValueError: If the engine has none.
        """
        return self.llm_engine.get_tokenizer()

    @any_thread
    def get_default_sampling_params(self) -> SamplingParams:
        """Returns a copy of the parameters of prompts that bring none: the model's generation_config.json."""
        return self.llm_engine.input_processor.default_params

    def compile_plan(self) -> str:
        """Returns a table of what is compiled, as LLMEngine.compile_plan does."""
        return self.llm_engine.compile_plan()

    @any_thread
    def close(self) -> None:
        """Frees weights and pool; a second call does nothing.

        A call that runs in another thread ends after its step, with EngineDeadError, and is waited for.
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
            allowed = f"1 for all prompts, or {num_prompts}"
            raise ArgumentError("sampling_params", len(params), allowed, aspect="the length of")
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
    executors: Executors,
    scheduler: composition.CustomScheduler | None,
) -> tuple[LLMEngine, ...]:
    """Makes the engines of an LLM.

    Args:
        args: Model and limits; say how many.
        executor: The executor of a single engine; None for those that `executors` makes.
        executors: Makes the executors.
        scheduler: As LLMEngine takes it.
    """

    def make(index: int) -> LLMEngine:
        nonlocal args
        engine = LLMEngine(args, executor or functools.partial(executors.make, index), scheduler=scheduler)
        args = engine.args  # with the backends that the first engine has chosen
        return engine

    return make_replicas(args.num_engines, make)


def _one_each(name: str, given: Any, num: int) -> Sequence[Any]:
    """Returns one value per prompt, of one for all or a list of them."""
    given = given if isinstance(given, list | tuple) else [given] * num
    check(len(given) == num, name, len(given), f"{num}, one per prompt", aspect="the length of")
    return given
