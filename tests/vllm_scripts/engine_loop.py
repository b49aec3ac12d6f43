"""Adds requests to an engine while it runs, and steps it by hand: python engine_loop.py --model MODEL"""

import argparse

from vllm import EngineArgs, LLMEngine, SamplingParams


def make_requests():
    return [
        ("A robot may not", SamplingParams(temperature=0.0, logprobs=1, prompt_logprobs=1)),
        ("To be or not to be,", SamplingParams(temperature=0.8, top_k=5, presence_penalty=0.2, seed=1)),
        ("What is the meaning", SamplingParams(n=2, temperature=0.8, top_p=0.95, seed=2)),
        ({"prompt": "It is only"}, SamplingParams(temperature=0.8, seed=3, max_tokens=1000)),
    ]


def run(engine, requests):
    request_id = 0
    while requests or engine.has_unfinished_requests():
        if requests:
            prompt, params = requests.pop(0)
            engine.add_request(str(request_id), prompt, params)
            request_id += 1
            if request_id == 4:
                engine.abort_request(["3"])
        for output in engine.step():
            if output.finished:
                texts = [completion.text for completion in output.outputs]
                print(f"{output.request_id}: {output.prompt!r} {texts}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Uses LLMEngine directly.")
    parser = EngineArgs.add_cli_args(parser)
    engine_args = EngineArgs.from_cli_args(parser.parse_args())
    run(LLMEngine.from_engine_args(engine_args), make_requests())
