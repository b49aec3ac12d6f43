"""Output tokens per second with and without speculative decoding: python benchmarks/speculation.py.

Both engines are `LLM` with its default of several decode steps per dispatch. Both run each workload in each
round. The table has the median rates, the median and the range of the rounds' ratios (with / without), and
the number of accepted draft tokens. Draft tokens help if a text repeats itself. Otherwise, the engine
proposes fewer draft tokens, which should keep their cost low.
"""

import argparse
import statistics
import time
from pathlib import Path

from jax_paged import LLM, SamplingParams, StructuredOutputsParams

SOURCE = (Path(__file__).parents[1] / "jax_paged/core/features/multi_step.py").read_text(encoding="utf-8")
LINES = "import os\nimport sys\n" * 20
NUMBERS = "0, 1, 2, 3, " * 30
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 8},
        "population": {"enum": [1000, 2000]},
        "country_of_the_city": {"enum": ["France", "Germany"]},
    },
    "required": ["city", "population", "country_of_the_city"],
    "additionalProperties": False,
}


def workloads() -> dict[str, tuple[list[str], SamplingParams]]:
    """Returns prompts and sampling parameters, by the name of the workload."""
    greedy = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    drawn = SamplingParams(temperature=1.0, seed=1, max_tokens=200, ignore_eos=True)
    structured = SamplingParams(
        temperature=0.8, seed=3, max_tokens=60, structured_outputs=StructuredOutputsParams(json=SCHEMA)
    )
    questions = ["A block table is", "What is a page?", "import os\n\ndef ", "The scheduler "]
    return {
        "1 x repeated lines": ([LINES], greedy),
        "1 x repeated numbers": ([NUMBERS], greedy),
        "1 x source code": ([SOURCE[:2000]], greedy),
        "1 x question": (["What is a block table?"], greedy),
        "1 x sampled": (["A block table is"], drawn),
        "1 x JSON schema": (["A place: "], structured),
        "8 x repeated lines": ([LINES[10 * i :] for i in range(8)], greedy),
        "8 x question": (questions * 2, greedy),
        "8 x sampled": ([f"{i} {q}" for i in range(2) for q in questions], drawn),
        "64 x question": ([f"{i} {q}" for i in range(16) for q in questions], greedy),
        "64 x sampled": ([f"{i} {q}" for i in range(16) for q in questions], drawn),
    }


def main() -> None:
    """Runs the workloads and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="pagelet")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="run only the workloads whose names contain this text")
    parser.add_argument("--draft-model", help="draft model (default: n-gram drafts)")
    args = parser.parse_args()
    config = {"method": "ngram"} if args.draft_model is None else {"model": args.draft_model}
    common = {"model": args.model, "dtype": args.dtype}
    with LLM(**common) as plain, LLM(**common, speculative_config=config) as drafting:
        for llm in (plain, drafting):
            llm.llm_engine.executor.wait_until_compiled()
        print(plain)
        print("| workload | without | with | ratio | range | drafts accepted |\n|---|---|---|---|---|---|")
        chosen = {name: of for name, of in workloads().items() if args.only in name}
        for name, (prompts, params) in chosen.items():
            speeds: dict[str, list[float]] = {"without": [], "with": []}
            drafts = drafting.llm_engine.scheduler.drafts
            before = drafts.num_drafts, sum(drafts.num_accepted)
            for i in range(args.rounds + 1):
                for kind, llm in (("without", plain), ("with", drafting))[:: 1 if i % 2 else -1]:
                    start = time.perf_counter()
                    outputs = llm.generate(prompts, params, use_tqdm=False)
                    seconds = time.perf_counter() - start
                    num_tokens = sum(len(x.token_ids) for output in outputs for x in output.outputs)
                    if i:  # the first round fills the prefix caches
                        speeds[kind].append(num_tokens / seconds)
            ratios = [b / a for a, b in zip(*speeds.values(), strict=True)]
            medians = [statistics.median(x) for x in speeds.values()]
            accepted = sum(drafts.num_accepted) - before[1], drafts.num_drafts - before[0]
            print(
                f"| {name} | {medians[0]:.0f} | {medians[1]:.0f} | {statistics.median(ratios):.2f} | "
                f"{min(ratios):.2f} to {max(ratios):.2f} | {accepted[0]} of {accepted[1]} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
