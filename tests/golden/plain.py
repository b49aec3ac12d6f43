"""The scenario that needs no feature: greedy requests of the built-in model."""

from golden.corpus import Golden, Request, make_engine, run

from jax_paged import SamplingParams

PROMPTS = [
    *("Once upon a time", "Tim has a red ball.", "The cat", "Anna went to the park and", "Where is the dog?"),
    *("It was a sunny day, and the birds were singing in the trees.", "One", "Mum said:"),
]


def plain(golden: Golden) -> None:
    """Runs prompts of different lengths, of which some wait until others have ended."""
    with make_engine("pagelet", max_num_seqs=4) as engine:
        requests = {}
        for i, prompt in enumerate(PROMPTS):
            params = SamplingParams(temperature=0, max_tokens=8 + 4 * (i % 3))
            requests[f"plain {i}"] = Request(prompt, params)
        run(golden, engine, requests)
