"""Grammars for structured output, compiled by llguidance, and the token masks that they imply.

StructuredOutputsParams specifies the constraint, the text `starts_after` (such as the closing tag of the
reasoning) and the reasoning tag, which opens the reasoning. Each output has a Matcher, which is always in one
of three phases:

    OPEN        The output so far is a prefix of the reasoning tag. It may become reasoning, or it may be the
                structured output itself.
    REASONING   Unconstrained text, up to the text `starts_after`. The output may end in this phase only if it
                is structured output from its first token on.
    GRAMMAR     The grammar constrains all further tokens.

The phase is GRAMMAR from the start if the request has no `starts_after` or its prompt ends with this text.
Before the phase GRAMMAR, the matcher also tracks whether the output so far could itself be structured output.

llguidance is imported when the first request uses structured output.
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

from jax_paged.arguments.shown_values import Text, shown
from jax_paged.core.scheduler_output import SchedulerOutput, TokenMasks
from jax_paged.engine.features.structured_output.compile_sandbox import CompileSandbox, compile_grammar
from jax_paged.engine.features.structured_output.json_schema import RelaxedSchema
from jax_paged.engine.text.tokenizer import Tokenizer
from jax_paged.errors import ArgumentError, check
from jax_paged.structured_outputs import JSON_OPTIONS, StructuredOutputsParams

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_LOGGER = logging.getLogger(__name__)
# CPU time limit for compiling a grammar (seconds). Most schemas of the maximum size take a tenth of it.
MAX_COMPILE_S = 5.0
MAX_CACHED = 64
_DEAD_END = "NoExtensionBias"  # llguidance's error for a state in which no token is allowed
# Maximum number of whitespace tokens that a chat template may put after a reasoning tag at the end of a
# prompt.
_MAX_SPACES = 4
# Warnings of llguidance about schema keywords and formats that it ignores because of the option "lenient".
_IGNORED_KEYWORDS = re.compile(r"Unimplemented keys: (\[.*\])")
_IGNORED_FORMAT = re.compile(r"Unknown format: (.*)", re.DOTALL)
# Keywords that are errors instead of warnings: if llguidance ignores one of these references, a part of the
# value is not constrained at all.
_STRUCTURAL = ("$dynamicRef", "$recursiveRef")


class Grammar:
    """A compiled grammar, shared by all requests that use it.

    Args:
        root: llguidance's matcher before the first token. It is only copied, never advanced.
        end_token_ids: Tokens that end an output.
        num_words: int32 words of a token mask, for 32 tokens each. Bits beyond the model's vocabulary are
            ignored.
        params: The request's constraint, which specifies `starts_after` and `reasoning_tag`.
        tokenizer: The model's tokenizer.
        ll_tokenizer: llguidance's version of the tokenizer.
        warnings: One sentence for each constraint of a JSON schema that is not enforced.

    Attributes:
        tag_ids: Tokens of the reasoning tag; empty if there is none.
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
        """Returns a matcher for a new output.

        Args:
            prompt_token_ids: The prompt. If it ends with `starts_after`, the grammar applies from the first
                token on.
            ignores_eos: Whether the request continues after an end token. End tokens are not allowed then.
        """
        text_after, num_tokens = "", len(prompt_token_ids)
        if self._starts_after:
            text_after = self._text_after_marker(prompt_token_ids, num_tokens, _MAX_SPACES)
        if text_after is not None and not text_after.strip():
            phase = _Phase.GRAMMAR
        else:
            phase = (
                _Phase.OPEN if self.tag_ids and not self._is_tagged(prompt_token_ids) else _Phase.REASONING
            )
        return Matcher(self, self._root.deep_copy(), phase, ignores_eos=ignores_eos)

    def state_after_reasoning(self, token_ids: list[int], stop: int) -> "LLMatcher | None":
        """Returns the grammar's state if the grammar applies after the given tokens, or None.

        It applies if the text `starts_after` ends in the last token. Further characters of this token must be
        the beginning of the structured output, or whitespace, which is ignored.

        Args:
            token_ids: Tokens of an output.
            stop: Number of tokens to consider.
        """
        text_after = self._text_after_marker(token_ids, stop)
        for text in () if text_after is None else (text_after, text_after.lstrip()):
            state, begin = self._root.deep_copy(), self._ll_tokenizer.greedy_tokenize(text)
            if not begin or state.validate_tokens(begin) == len(begin):
                state.consume_tokens(begin)
                return state
        return None

    def is_space(self, token_id: int) -> bool:
        """Returns whether a token consists of whitespace only."""
        return not self._tokenizer.decode([token_id], skip_special_tokens=False).strip()

    def _is_tagged(self, token_ids: list[int]) -> bool:
        """Returns whether a prompt ends with the reasoning tag, optionally followed by whitespace."""
        num_tokens = len(self._tag.encode()) + _MAX_SPACES
        text = self._tokenizer.decode(token_ids[-num_tokens:], skip_special_tokens=False)
        return text.rstrip().endswith(self._tag)

    def _text_after_marker(self, token_ids: list[int], stop: int, num_more: int = 0) -> str | None:
        """Returns the text after the last occurrence of `starts_after`; None if there is none near the end.

        Args:
            token_ids: Tokens of a text.
            stop: Number of tokens to consider.
            num_more: Maximum number of whole tokens after `starts_after`.
        """
        num_tokens = len(self._starts_after.encode()) + num_more  # a token has at least one byte
        text = self._tokenizer.decode(token_ids[max(0, stop - num_tokens) : stop], skip_special_tokens=False)
        _, marker, text_after = text.rpartition(self._starts_after)
        return text_after if marker else None


class _Phase(enum.Enum):
    """The part of an output to which its next token belongs."""

    OPEN = enum.auto()  # undecided: all tokens so far, if any, are a prefix of the reasoning tag
    REASONING = enum.auto()  # unconstrained text
    GRAMMAR = enum.auto()


class Matcher:
    """Grammar state of one output. It depends only on the prompt and the tokens of the output.

    Args:
        grammar: The grammar.
        state: llguidance's state before the first token.
        phase: Phase of the first token.
        ignores_eos: Whether the request continues after an end token.
    """

    def __init__(self, grammar: Grammar, state: "LLMatcher", phase: _Phase, *, ignores_eos: bool) -> None:
        self.grammar = grammar
        # llguidance's state. Before the phase GRAMMAR, it follows the output as if the structured output had
        # begun with its first token.
        self._state = state
        self._phase = phase
        # Whether `_state` has accepted all tokens. It may be False before the phase GRAMMAR.
        self._could_be_structured = True
        self._ignores_eos = ignores_eos
        self._num_tokens = 0  # number of tokens followed so far
        self._num_when_complete: int | None = None

    def copy(self) -> "Matcher":
        """Returns an independent copy."""
        copy = Matcher(self.grammar, self._state.deep_copy(), self._phase, ignores_eos=self._ignores_eos)
        copy._could_be_structured = self._could_be_structured
        copy._num_tokens, copy._num_when_complete = self._num_tokens, self._num_when_complete
        return copy

    def follow(self, token_ids: list[int]) -> int | None:
        """Advances the matcher by the tokens that are new since the last call.

        Args:
            token_ids: All tokens of the output so far.

        Returns:
            The number of tokens after which the output was complete, so that no token can follow; None if it
            is not complete.
        """
        for n in range(self._num_tokens, len(token_ids)):
            if self._phase is _Phase.OPEN and token_ids[n] != self.grammar.tag_ids[n]:
                # Masks only allow tokens of the tag or the grammar here. Any other token was drawn without a
                # mask and begins reasoning.
                fits = self._could_be_structured and self._state.validate_tokens([token_ids[n]]) == 1
                self._phase = _Phase.GRAMMAR if fits else _Phase.REASONING
            if self._phase is not _Phase.GRAMMAR:
                self._follow_before_grammar(token_ids, n)
            elif self._num_when_complete is None and self._state.consume_token(token_ids[n]):
                self._num_when_complete = n + 1 if self._state.is_stopped() else None
        self._num_tokens = len(token_ids)
        return self._num_when_complete

    def _follow_before_grammar(self, token_ids: list[int], n: int) -> None:
        """Follows token `n` in the phase OPEN or REASONING.

        If possible, the token is also followed as a part of structured output that began with the first
        token. Whitespace at the start of the output is ignored for that.
        """
        token_id = token_ids[n]
        if self._could_be_structured and self._state.validate_tokens([token_id]):
            self._state.consume_token(token_id)
        elif self._could_be_structured and not all(map(self.grammar.is_space, token_ids[: n + 1])):
            self._could_be_structured = False
        if self._phase is _Phase.OPEN:
            if n + 1 == len(self.grammar.tag_ids):
                self._phase = _Phase.REASONING
                self._could_be_structured = False
            return
        state = self.grammar.state_after_reasoning(token_ids, n + 1)
        if state is not None:
            self._state, self._phase, self._could_be_structured = state, _Phase.GRAMMAR, True
            self._num_when_complete = n + 1 if state.is_stopped() and state.is_accepting() else None

    @property
    def problem(self) -> str:
        """The error that llguidance has reported; "" if there is none, or if no token is allowed any more."""
        error = self._state.get_error().partition("<non-verbose/>")[0].strip()
        return "" if error == _DEAD_END else error

    def forced(self) -> list[int]:
        """Returns the next tokens if the grammar allows only one text, as the tokenizer would encode it."""
        if self._phase is not _Phase.GRAMMAR or self._num_when_complete is not None:
            return []
        return self._state.compute_ff_tokens()

    def fill(self, row: np.ndarray) -> None:
        """Writes the mask of the next token. No token is allowed if the grammar has reached a dead end.

        Args:
            row: int32 [num_words]. Bit j % 32 of word j // 32 is 1 if token j is allowed.
        """
        state = self._state
        if self._num_when_complete is not None:
            row[:] = -1  # tokens after the end of the output are discarded
            return
        bits = row.view(np.uint32)
        if self._phase is _Phase.REASONING:
            row[:] = -1
        elif not self._could_be_structured:
            row[:] = 0
        else:
            state.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
            # In both cases llguidance would allow an end token.
            if state.is_error() or (state.is_stopped() and not state.is_accepting()):
                row[:] = 0
        may_end = self._could_be_structured and state.is_accepting() and not self._ignores_eos
        if not may_end:  # the grammar may also allow an end token as part of the text
            for token_id in self.grammar.end_token_ids:
                bits[token_id // 32] &= np.uint32(0xFFFFFFFF ^ (1 << token_id % 32))
        if self._phase is _Phase.OPEN:
            tag_id = self.grammar.tag_ids[self._num_tokens]
            bits[tag_id // 32] |= np.uint32(1 << tag_id % 32)


class Grammars:
    """Compiler and cache of grammars. Thread-safe.

    Args:
        tokenizer: The model's tokenizer.
        vocab_size: Vocabulary size of the model.
        end_token_ids: Tokens that end an output.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_token_ids: frozenset[int]) -> None:
        self._tokenizer, self._vocab_size, self._end_token_ids = tokenizer, vocab_size, end_token_ids
        self._compiled: collections.OrderedDict[str, Grammar] = collections.OrderedDict()
        self._lock = threading.Lock()
        self._sandbox = CompileSandbox(self._settings)

    def compile(self, params: StructuredOutputsParams) -> Grammar:
        """Returns the grammar of a constraint, newly compiled or cached.

        Unsupported keywords of a JSON schema become warnings of the grammar, which are also logged.
        Unsupported references are errors.

        Raises:
            ValueError: If the constraint is not valid, nothing matches it, it contains an unsupported
                reference, or it takes too long to compile. The message names the argument and the problem.
        """
        value = getattr(params, params.constraint_name)
        key = json.dumps([params.constraint_name, value, params.starts_after, params.reasoning_tag])
        with self._lock:
            found = self._compiled.get(key)
            if found is not None:
                self._compiled.move_to_end(key)
                return found
        try:
            source, warnings = self._source(params.constraint_name, value)
            self._sandbox.try_compile(source, MAX_COMPILE_S)
            root = compile_grammar(self._ll_tokenizer, source)
            warnings += _warnings_of(root)
        except ValueError as error:
            allowed = f"compilable ({error})"
            raise ArgumentError(f"structured_outputs.{params.constraint_name}", value, allowed) from error
        tokenizer, num_words = self._ll_tokenizer, -(-self._ll_tokenizer.vocab_size // 32)
        end_ids = self._end_token_ids
        grammar = Grammar(root, end_ids, num_words, params, self._tokenizer, tokenizer, warnings)
        for warning in warnings:
            _LOGGER.warning("structured_outputs.%s: %s", params.constraint_name, warning)
        with self._lock:
            self._compiled[key] = grammar
            if len(self._compiled) > MAX_CACHED:
                self._compiled.popitem(last=False)
        return grammar

    def close(self) -> None:
        """Ends running trial compilations."""
        self._sandbox.close()

    def _settings(self) -> dict[str, Any]:
        """Returns the arguments of LLTokenizer."""
        from llguidance import LLTokenizer

        check(
            bool(self._end_token_ids),
            "structured_outputs",
            Text("a constraint"),
            "None because the model has no end token",
        )
        source = self._tokenizer.to_json()
        size = max(LLTokenizer(source).vocab_size, self._vocab_size)
        return {"tokenizer": source, "n_vocab": size, "eos_token": sorted(self._end_token_ids)}

    @functools.cached_property
    def _ll_tokenizer(self) -> "LLTokenizer":
        """The tokenizer for llguidance. With a large vocabulary, its first use takes about a second."""
        from llguidance import LLTokenizer

        return LLTokenizer(**self._settings())

    def _source(self, kind: str, value: Any) -> tuple[str, tuple[str, ...]]:
        """Returns a constraint in llguidance's format, and warnings about constraints that were removed."""
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
        """Returns whether a text is a special token."""
        token_id = self._tokenizer.token_id(text)
        return token_id is not None and self._ll_tokenizer.is_special_token(token_id)


def token_masks(output: SchedulerOutput, matchers: dict[int, tuple[Matcher, list[int]]]) -> TokenMasks:
    """Returns the token masks of a step.

    Args:
        output: The step.
        matchers: Matcher and output tokens of each sample with structured output, by index in output.samples.
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
        if sample.num_logits > 1:  # one mask per draft prefix
            ahead, text = matcher.copy(), list(token_ids)
            drafts = output.scheduled[sample.scheduled_index].token_ids[1 - sample.num_logits :]
            for k, token_id in enumerate(drafts, 1):
                text.append(token_id)
                ahead.follow(text)
                ahead.fill(words[j + k])
        j += sample.num_logits
    return TokenMasks(tuple(rows), words.tobytes())


def _json(value: Any) -> str:
    """Returns the grammar of a JSON schema."""
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_json_schema(value, overrides={**JSON_OPTIONS})


def _warnings_of(root: "LLMatcher") -> tuple[str, ...]:
    """Returns one sentence for each constraint that llguidance ignores.

    Raises:
        ValueError: If an ignored keyword is a reference.
    """
    found: dict[str, None] = {}
    for warning in root.get_grammar_warnings():
        if ignored := _IGNORED_KEYWORDS.match(warning):
            names = json.loads(ignored[1])
            for name in set(names) & set(_STRUCTURAL):
                raise ValueError(f"the schema contains {name}; only $ref within the schema is supported")
            found |= dict.fromkeys(f"{name} is not enforced" for name in names)
        elif ignored := _IGNORED_FORMAT.match(warning):
            found[f"format {ignored[1]} is not enforced"] = None
        else:
            found[warning] = None
    return tuple(found)


def _tags(given: Any, is_special: Callable[[str], bool]) -> str:
    """Returns the grammar of a structural tag.

    Args:
        given: The structural tag, as in StructuredOutputsParams.
        is_special: Returns whether a text is a special token.

    Raises:
        ValueError: If the structural tag is malformed.
    """
    from llguidance import LLMatcher, StructTag

    triggers, structures = given.get("triggers"), given.get("structures")
    ok = isinstance(triggers, list) and all(isinstance(text, str) and text for text in triggers)
    check(ok and bool(triggers), "triggers", triggers, "a list of non-empty strings")
    check(isinstance(structures, list) and bool(structures), "structures", structures, "a list of objects")
    tags = []
    for item in structures:
        ok = isinstance(item, dict) and {"begin", "schema", "end"} <= item.keys()
        ok = ok and isinstance(item["begin"], str) and isinstance(item["end"], str)
        ok = ok and isinstance(item["schema"], dict)
        check(
            ok, "structures", item, 'objects with "begin" (string), "schema" (JSON schema) and "end" (string)'
        )
        trigger = next((text for text in triggers if item["begin"].startswith(text)), None)
        check(
            trigger is not None, "begin", item["begin"], f"a string that begins with one of {shown(triggers)}"
        )
        assert trigger is not None, "the structure has no trigger"
        schema = item["schema"] | {"x-guidance": {**JSON_OPTIONS}}
        tags.append(StructTag(trigger=trigger, begin=item["begin"], grammar=schema, end=item["end"]))
    # llguidance interprets a trigger in angle brackets as a special token.
    bracketed = {tag.trigger for tag in tags if tag.trigger[0] == "<" and tag.trigger[-1] == ">"}
    special = {text for text in bracketed if is_special(text)}
    if special and special != bracketed:
        allowed = f"either all or none special tokens ({shown(sorted(special))} are special tokens)"
        raise ArgumentError("triggers", triggers, allowed)
    return LLMatcher.grammar_from_lark(StructTag.to_grammar(tags, assume_special=bool(special)))
