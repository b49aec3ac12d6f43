"""What a request's form allows after each token: grammars compiled by llguidance, and masks of tokens.

llguidance is imported when a request first asks for a form.
"""

import collections
import enum
import functools
import itertools
import json
import logging
import re
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from jax_paged.checks import check
from jax_paged.core.scheduler_output import SchedulerOutput, TokenMasks
from jax_paged.engine.features.structured_output.compile_sandbox import CompileSandbox, compiled
from jax_paged.engine.features.structured_output.json_schema import RelaxedSchema
from jax_paged.engine.text.tokenizer import Tokenizer
from jax_paged.structured_outputs import JSON_WRITING, StructuredOutputsParams

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_LOGGER = logging.getLogger(__name__)
# Seconds of a processor. Most schemas of the largest size that is allowed take a tenth.
MAX_COMPILE_S = 5.0
MAX_CACHED = 64
_DEAD_END = "NoExtensionBias"  # an error of llguidance
# Tokens of whitespace that a chat template may put behind what closes the thinking that it has left out.
_MAX_BEHIND = 4
# How llguidance names the keywords that it ignores with "lenient".
_IGNORED_KEYWORDS = re.compile(r"Unimplemented keys: (\[.*\])")
_IGNORED_FORMAT = re.compile(r"Unknown format: (.*)", re.DOTALL)
# To ignore these would leave a part of the value open, instead of a condition on it.
_STRUCTURAL = ("$dynamicRef", "$recursiveRef")


class Grammar:
    """A form, compiled; shared by the requests that ask for it.

    Args:
        root: Before the first token; only copied.
        end_token_ids: Tokens that end an output.
        num_words: Of a mask, each of 32 tokens; those behind the model's vocabulary mean nothing.
        params: Text that the form follows, and the tag of outputs that have this text.
        tokenizer: Of the model.
        ll_tokenizer: The same, for llguidance.
        warnings: A sentence for each constraint of its JSON schemas that is not enforced.

    Attributes:
        tag_ids: Tokens of the tag; empty if there is none.
    """

    def __init__(
        self,
        root: "LLMatcher",
        end_token_ids: frozenset[int],
        num_words: int,
        params: StructuredOutputsParams,
        tokenizer: Tokenizer,
        ll_tokenizer: "LLTokenizer",
        warnings: tuple[str, ...] = (),
    ) -> None:
        self.warnings = warnings
        self._root = root
        self.end_token_ids = end_token_ids
        self.num_words = num_words
        self._starts_after = params.starts_after or ""
        self._tag = params.reasoning_tag or ""
        self.tag_ids = tokenizer.encode(self._tag, add_special_tokens=False) if self._tag else []
        self._tokenizer = tokenizer
        self._ll_tokenizer = ll_tokenizer

    def matcher(self, prompt_token_ids: list[int], *, ignores_eos: bool) -> "Matcher":
        """Returns what follows one output of the form, from its first token on.

        Args:
            prompt_token_ids: The text that the form begins behind may stand at its end.
            ignores_eos: Whether the request goes on after an end token: then none is allowed.
        """
        behind = (
            self._behind(prompt_token_ids, len(prompt_token_ids), _MAX_BEHIND) if self._starts_after else ""
        )
        if behind is not None and not behind.strip():
            phase = _Phase.GRAMMAR
        else:
            phase = (
                _Phase.OPEN if self.tag_ids and not self._is_tagged(prompt_token_ids) else _Phase.REASONING
            )
        return Matcher(self, self._root.deep_copy(), phase, ignores_eos=ignores_eos)

    def begun(self, token_ids: list[int], stop: int) -> "LLMatcher | None":
        """Returns the state behind the text that the form begins behind; None if no text ends with it.

        Args:
            token_ids: Of a text.
            stop: How many of them there are yet. The last one may hold the beginning of the form as well, or
                white space, which belongs to neither.
        """
        behind = self._behind(token_ids, stop)
        for text in () if behind is None else (behind, behind.lstrip()):
            state, begin = self._root.deep_copy(), self._ll_tokenizer.greedy_tokenize(text)
            if not begin or state.validate_tokens(begin) == len(begin):
                state.consume_tokens(begin)
                return state
        return None

    def is_space(self, token_id: int) -> bool:
        """Returns whether a token is white space."""
        return not self._tokenizer.decode([token_id], skip_special_tokens=False).strip()

    def _is_tagged(self, token_ids: list[int]) -> bool:
        """Returns whether a prompt ends with the tag, and maybe white space."""
        num_tokens = len(self._tag.encode()) + _MAX_BEHIND
        text = self._tokenizer.decode(token_ids[-num_tokens:], skip_special_tokens=False)
        return text.rstrip().endswith(self._tag)

    def _behind(self, token_ids: list[int], stop: int, num_more: int = 0) -> str | None:
        """Returns what stands behind the text that the form begins behind; None if that is not there.

        Args:
            token_ids: Of a text.
            stop: How many of them there are yet.
            num_more: How many tokens may follow.
        """
        num_tokens = len(self._starts_after.encode()) + num_more  # each of at least a byte
        text = self._tokenizer.decode(token_ids[max(0, stop - num_tokens) : stop], skip_special_tokens=False)
        _, tag, behind = text.rpartition(self._starts_after)
        return behind if tag else None


class _Phase(enum.Enum):
    """The part of an output that the next token belongs to, as far as its tokens tell."""

    OPEN = enum.auto()  # the reasoning tag or the form: the output is a beginning of the tag, maybe empty
    REASONING = enum.auto()  # text that nothing constrains
    GRAMMAR = enum.auto()


class Matcher:
    """Follows the tokens of one output. Its state is a function of these tokens and the prompt.

    Args:
        grammar: What it follows.
        state: Of the grammar, before the first token.
        phase: Of the first token.
        ignores_eos: Whether the request goes on after an end token.
    """

    def __init__(self, grammar: Grammar, state: "LLMatcher", phase: _Phase, *, ignores_eos: bool) -> None:
        self.grammar = grammar
        # The state of the form. Before the phase GRAMMAR, that of an output which is the form from the start.
        self._state = state
        self._phase = phase
        self._fits = True  # whether all tokens fit `_state`; some may not before the phase GRAMMAR
        self._ignores_eos = ignores_eos
        self._num_tokens = 0  # followed
        self._num_when_complete: int | None = None

    def copy(self) -> "Matcher":
        """Returns one that goes on from here by itself."""
        copy = Matcher(self.grammar, self._state.deep_copy(), self._phase, ignores_eos=self._ignores_eos)
        copy._fits = self._fits
        copy._num_tokens, copy._num_when_complete = self._num_tokens, self._num_when_complete
        return copy

    def follow(self, token_ids: list[int]) -> int | None:
        """Takes in what an output has got since the last call.

        Args:
            token_ids: The whole output; it begins with what was given before.

        Returns:
            After how many tokens it was complete, so that nothing can follow; None if it is not.
        """
        for n in range(self._num_tokens, len(token_ids)):
            if self._phase is _Phase.OPEN and token_ids[n] != self.grammar.tag_ids[n]:
                # Masks allow no token that does not fit. One that was drawn without them begins reasoning.
                fits = self._fits and self._state.validate_tokens([token_ids[n]]) == 1
                self._phase = _Phase.GRAMMAR if fits else _Phase.REASONING
            if self._phase is not _Phase.GRAMMAR:
                self._follow_both(token_ids, n)
            elif self._num_when_complete is None and self._state.consume_token(token_ids[n]):
                self._num_when_complete = n + 1 if self._state.is_stopped() else None
        self._num_tokens = len(token_ids)
        return self._num_when_complete

    def _follow_both(self, token_ids: list[int], n: int) -> None:
        """Takes in token `n` of an output that may have reasoning first, or be the form from the start."""
        token_id = token_ids[n]
        if self._fits and self._state.validate_tokens([token_id]):
            self._state.consume_token(token_id)
        elif self._fits and not all(map(self.grammar.is_space, token_ids[: n + 1])):
            self._fits = False  # white space before the form is no part of it
        if self._phase is _Phase.OPEN:
            if n + 1 == len(self.grammar.tag_ids):
                self._phase = _Phase.REASONING
                self._fits = False
            return
        begun = self.grammar.begun(token_ids, n + 1)
        if begun is not None:
            self._state, self._phase, self._fits = begun, _Phase.GRAMMAR, True
            self._num_when_complete = n + 1 if begun.is_stopped() and begun.is_accepting() else None

    @property
    def problem(self) -> str:
        """Why llguidance has given up; "" if it has not, or has come to a dead end."""
        error = self._state.get_error().partition("<non-verbose/>")[0].strip()
        return "" if error == _DEAD_END else error

    def forced(self) -> list[int]:
        """Returns the next tokens where the form leaves one text, as the tokenizer writes it."""
        if self._phase is not _Phase.GRAMMAR or self._num_when_complete is not None:
            return []
        return self._state.compute_ff_tokens()

    def fill(self, row: np.ndarray) -> None:
        """Writes the mask of the next token: none is allowed where the form has a dead end.

        Args:
            row: int32 [num_words]; bit j % 32 of word j // 32 is token j.
        """
        state = self._state
        if self._num_when_complete is not None:
            row[:] = -1
            return
        bits = row.view(np.uint32)
        if self._phase is _Phase.REASONING:
            row[:] = -1
        elif not self._fits:
            row[:] = 0
        else:
            state.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
            # In both of these llguidance would allow an end token.
            if state.is_error() or (state.is_stopped() and not state.is_accepting()):
                row[:] = 0
        may_end = self._fits and state.is_accepting() and not self._ignores_eos
        if not may_end:  # an end token may be a piece of text, too
            for token_id in self.grammar.end_token_ids:
                bits[token_id // 32] &= np.uint32(0xFFFFFFFF ^ (1 << token_id % 32))
        if self._phase is _Phase.OPEN:
            tag_id = self.grammar.tag_ids[self._num_tokens]
            bits[tag_id // 32] |= np.uint32(1 << tag_id % 32)


class Grammars:
    """Compiles forms, after a trial in a process of its own; may be called from any thread.

    Args:
        tokenizer: Of the model.
        vocab_size: Of the model.
        end_token_ids: That end an output.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_token_ids: frozenset[int]) -> None:
        self._tokenizer, self._vocab_size, self._end_token_ids = tokenizer, vocab_size, end_token_ids
        self._compiled: collections.OrderedDict[str, Grammar] = collections.OrderedDict()
        self._lock = threading.Lock()
        self._sandbox = CompileSandbox(self._settings)

    def compile(self, params: StructuredOutputsParams) -> Grammar:
        """Returns a form, compiled or found.

        Raises:
            ValueError: If it is not valid, can't be met, has a reference that is not supported, or takes too
                long; the message names the argument and what is wrong. Other keywords of a JSON schema that
                are not supported are warnings of the grammar, which are also logged.
        """
        value = getattr(params, params.kind)
        key = json.dumps([params.kind, value, params.starts_after, params.reasoning_tag])
        with self._lock:
            found = self._compiled.get(key)
            if found is not None:
                self._compiled.move_to_end(key)
                return found
        try:
            source, warnings = self._source(params.kind, value)
            self._sandbox.try_compile(source, MAX_COMPILE_S)
            root = compiled(self._ll_tokenizer, source)
            warnings += _warnings_of(root)
        except ValueError as error:
            raise ValueError(f"structured_outputs.{params.kind} can't be used: {error}") from error
        tokenizer, num_words = self._ll_tokenizer, -(-self._ll_tokenizer.vocab_size // 32)
        end_ids = self._end_token_ids
        grammar = Grammar(root, end_ids, num_words, params, self._tokenizer, tokenizer, warnings)
        for warning in warnings:
            _LOGGER.warning("structured_outputs.%s: %s", params.kind, warning)
        with self._lock:
            self._compiled[key] = grammar
            if len(self._compiled) > MAX_CACHED:
                self._compiled.popitem(last=False)
        return grammar

    def close(self) -> None:
        """Ends what is still being compiled."""
        self._sandbox.close()

    def _settings(self) -> dict[str, Any]:
        """Returns the arguments of LLTokenizer."""
        from llguidance import LLTokenizer

        check(bool(self._end_token_ids), "structured_outputs", "given", "None, as the model has no end token")
        source = self._tokenizer.to_json()
        size = max(LLTokenizer(source).vocab_size, self._vocab_size)
        return {"tokenizer": source, "n_vocab": size, "eos_token": sorted(self._end_token_ids)}

    @functools.cached_property
    def _ll_tokenizer(self) -> "LLTokenizer":  # takes a second with a large vocabulary
        from llguidance import LLTokenizer

        return LLTokenizer(**self._settings())

    def _source(self, kind: str, value: Any) -> tuple[str, tuple[str, ...]]:
        """Returns a form in llguidance's terms, and warnings of what was removed from its schemas."""
        from llguidance import LLMatcher

        if kind in ("json", "structural_tag"):
            relaxed = RelaxedSchema(json.loads(value) if isinstance(value, str) else value)
            schema, warnings = relaxed.schema, relaxed.warnings
            return _json(schema) if kind == "json" else _tags(schema, self._is_special), warnings
        match kind:
            case "json_object":
                source = _json({"type": "object"})
            case "regex":
                source = LLMatcher.grammar_from_regex(value)
            case "choice":
                texts = [json.dumps(text, ensure_ascii=False).replace("\x7f", r"\u007f") for text in value]
                source = LLMatcher.grammar_from_lark(f"start: {' | '.join(texts)}")
            case _:
                source = LLMatcher.grammar_from_lark(value)
        return source, ()

    def _is_special(self, text: str) -> bool:
        token_id = self._tokenizer.token_id(text)
        return token_id is not None and self._ll_tokenizer.is_special_token(token_id)


def token_masks(output: SchedulerOutput, matchers: dict[int, tuple[Matcher, list[int]]]) -> TokenMasks:
    """Returns the masks of a step.

    Args:
        output: The step.
        matchers: Of samples with a form, by index in output.samples; and the output tokens of each.
    """
    firsts = [0, *itertools.accumulate(sample.num_logits for sample in output.samples)]
    rows = [row for i in matchers for row in range(firsts[i], firsts[i + 1])]
    num_words = next(matcher for matcher, _ in matchers.values()).grammar.num_words
    words = np.full((len(rows), num_words), -1, np.int32)
    j = 0
    for i, (matcher, token_ids) in matchers.items():
        matcher.follow(token_ids)
        matcher.fill(words[j])
        sample = output.samples[i]
        if sample.num_logits > 1:  # each of the others comes behind one draft more
            ahead, text = matcher.copy(), list(token_ids)
            for k, token_id in enumerate(output.scheduled[sample.row].token_ids[1 - sample.num_logits :], 1):
                text.append(token_id)
                ahead.follow(text)
                ahead.fill(words[j + k])
        j += sample.num_logits
    return TokenMasks(tuple(rows), words.tobytes())


def _json(value: Any) -> str:
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_json_schema(value, overrides={**JSON_WRITING})


def _warnings_of(root: "LLMatcher") -> tuple[str, ...]:
    """Returns a sentence for each constraint that llguidance ignores.

    Raises:
        ValueError: If one of them is a reference.
    """
    found: dict[str, None] = {}
    for warning in root.get_grammar_warnings():
        if ignored := _IGNORED_KEYWORDS.match(warning):
            names = json.loads(ignored[1])
            for name in set(names) & set(_STRUCTURAL):
                raise ValueError(f"the schema has {name}; allowed: $ref within the schema")
            found |= dict.fromkeys(f"{name} is not enforced" for name in names)
        elif ignored := _IGNORED_FORMAT.match(warning):
            found[f"format {ignored[1]} is not enforced"] = None
        else:
            found[warning] = None
    return tuple(found)


def _tags(given: Any, is_special: Callable[[str], bool]) -> str:
    """Returns the grammar of a structural tag."""
    from llguidance import LLMatcher, StructTag

    triggers, structures = given.get("triggers"), given.get("structures")
    ok = isinstance(triggers, list) and all(isinstance(text, str) and text for text in triggers)
    check(ok and bool(triggers), "triggers", triggers, "a list of texts that are not empty")
    check(isinstance(structures, list) and bool(structures), "structures", structures, "a list of objects")
    tags = []
    for item in structures:
        ok = isinstance(item, dict) and {"begin", "schema", "end"} <= item.keys()
        ok = ok and isinstance(item["begin"], str) and isinstance(item["end"], str)
        ok = ok and isinstance(item["schema"], dict)
        check(ok, "structures", item, 'objects with the texts "begin" and "end" and the JSON schema "schema"')
        trigger = next((text for text in triggers if item["begin"].startswith(text)), None)
        check(trigger is not None, "begin", item["begin"], f"text that starts with one of {triggers}")
        assert trigger is not None, "just checked"
        schema = item["schema"] | {"x-guidance": {**JSON_WRITING}}
        tags.append(StructTag(trigger=trigger, begin=item["begin"], grammar=schema, end=item["end"]))
    # llguidance takes a trigger in angle brackets for a token of its own.
    bracketed = {tag.trigger for tag in tags if tag.trigger[0] == "<" and tag.trigger[-1] == ">"}
    special = {text for text in bracketed if is_special(text)}
    if special and special != bracketed:
        raise ValueError(
            f"triggers {sorted(special)} are tokens of their own, {sorted(bracketed - special)} not"
        )
    return LLMatcher.grammar_from_lark(StructTag.to_grammar(tags, assume_special=bool(special)))
