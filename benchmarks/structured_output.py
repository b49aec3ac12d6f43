"""Host time per step for structured output: 64 rows with a JSON schema each, a vocabulary of 131,072.

    python benchmarks/structured_output.py

The tokenizer is synthetic: all single bytes, and random words, of which one in twenty is punctuation. Each
row draws its tokens at random from all tokens that its schema allows. Two times per step are printed:
"matchers" is the time to advance the matchers by the new tokens and to write the masks; "input" is the time
to copy the masks into the input array of the step. The first NUM_COLD steps are reported separately.
"""

import argparse
import json
import random
import string
import time

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jax_paged.core.scheduler_output import Sample, ScheduledSequence, SchedulerOutput
from jax_paged.engine.features.structured_output.grammars import Grammars, token_masks
from jax_paged.structured_outputs import StructuredOutputsParams

NUM_ROWS, VOCAB_SIZE, NUM_STEPS = 64, 131_072, 600
NUM_COLD = 200  # in these first steps, llguidance computes most states of the schemas for the first time
EOS = 0


class MadeUpTokenizer:
    """Synthetic tokenizer with the methods that Grammars uses."""

    def __init__(self) -> None:
        rng = random.Random(0)
        words = dict.fromkeys(sorted(pre_tokenizers.ByteLevel.alphabet()))
        while len(words) < VOCAB_SIZE - 1:
            if rng.random() < 0.05:
                word = "".join(rng.choices(string.punctuation, k=rng.randint(2, 4)))
            else:
                space = "Ġ" * rng.randint(0, 1)  # tokens of real vocabularies often begin with a space
                word = space + "".join(rng.choices(string.ascii_letters, k=rng.randint(2, 9)))
            words[word] = None
        vocab = {"<eos>": EOS} | {word: i for i, word in enumerate(words, 1)}
        self._backend = tokenizers.Tokenizer(models.BPE(vocab, []))
        self._backend.add_special_tokens(["<eos>"])
        self._backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self._backend.decoder = decoders.ByteLevel()

    def to_json(self) -> str:
        """Returns the tokenizer in the format of tokenizer.json."""
        return self._backend.to_str()

    def token_id(self, text: str) -> int | None:
        """Returns the id of a token, or None if the vocabulary does not contain it."""
        return self._backend.token_to_id(text)


def schema(i: int) -> dict:
    """Returns the JSON schema of a record with five fields; names and types depend on `i`."""
    kinds = [
        {"type": "string", "maxLength": 40},
        {"type": "integer", "minimum": 0, "maximum": 10**i % 9973 + 10},
        {"type": "array", "items": {"type": "number"}, "maxItems": 8},
        {"enum": [f"value {j}" for j in range(i % 7 + 2)]},
        {"type": "string", "format": "date-time"},
    ]
    properties = {f"field_{i}_{j}": kinds[(i + j) % len(kinds)] for j in range(5)}
    return {"type": "object", "properties": properties, "required": list(properties)}


def main() -> None:
    """Runs the steps and prints medians and 95th percentiles."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.parse_args()
    grammars = Grammars(MadeUpTokenizer(), VOCAB_SIZE, frozenset({EOS}))  # pyright: ignore[reportArgumentType]
    start = time.perf_counter()
    compiled = [
        grammars.compile(StructuredOutputsParams(json=json.dumps(schema(i)))) for i in range(NUM_ROWS)
    ]
    print(f"compiling the tokenizer and {NUM_ROWS} schemas: {time.perf_counter() - start:.2f} s")
    rng = np.random.default_rng(0)
    matchers = [grammar.matcher([], ignores_eos=False) for grammar in compiled]
    outputs: list[list[int]] = [[] for _ in matchers]
    rows = tuple(ScheduledSequence(i, 0, [1], [], []) for i in range(NUM_ROWS))
    samples = tuple(Sample(i, i) for i in range(NUM_ROWS))
    step = SchedulerOutput(0, rows, samples, (), (), (), (), (), (), (), (), NUM_ROWS, NUM_ROWS)
    times, input_times = [], []
    for _ in range(NUM_STEPS):
        start = time.perf_counter()
        for matcher, output in zip(matchers, outputs, strict=True):
            matcher.follow(output)
        masks = token_masks(step, dict(enumerate(zip(matchers, outputs, strict=True))))
        times.append(time.perf_counter() - start)
        start = time.perf_counter()
        out = np.full((NUM_ROWS, VOCAB_SIZE // 32), -1, np.int32)
        out[list(masks.rows)] &= np.frombuffer(masks.words, "<i4").reshape(NUM_ROWS, -1)
        input_times.append(time.perf_counter() - start)
        allowed = np.unpackbits(out.view(np.uint8), axis=1, bitorder="little")
        for i, bits in enumerate(allowed):
            outputs[i].append(int(rng.choice(np.flatnonzero(bits))))
            # A row whose output is complete starts a new output.
            if matchers[i].copy().follow(outputs[i]) is not None or outputs[i][-1] == EOS:
                matchers[i], outputs[i] = compiled[i].matcher([], ignores_eos=False), []
    for name, values in (("matchers", times), ("input", input_times)):
        ms = np.array(values) * 1e3
        for when, part in ("at first", ms[:NUM_COLD]), ("then", ms[NUM_COLD:]):
            median, most = np.median(part), np.quantile(part, 0.95)
            print(f"{name}, {when}: median {median:.2f} ms, 95% {most:.2f} ms, slowest {part.max():.2f} ms")


if __name__ == "__main__":
    main()
