"""Time from the start of a process to its first answer, with the built-in model.

    python benchmarks/startup.py                        generate, chat and the server; cold and warm
    python benchmarks/startup.py --baseline FOLDER      alternates with another checkout

A cold start has an empty compilation cache. A warm start has the cache of an engine that has compiled all its
programs. Each start is a new process, and the clock starts before the interpreter, so the times include
importing, loading and compiling. The table has the medians of the rounds in seconds.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WAYS = ("generate", "chat", "server")
PHASES = ("imported", "ready", "answered")
QUESTION = [{"role": "user", "content": "What is a block table?"}]
SCRIPT = """
import json, sys, time
start, way = float(sys.argv[1]), sys.argv[2]
from jax_paged import LLM, SamplingParams
found = [time.time() - start]
llm = LLM()
found.append(time.time() - start)
params = SamplingParams(temperature=0, max_tokens=8)
if way == "chat":
    llm.chat(json.loads(sys.argv[3]), params, use_tqdm=False)
else:
    llm.generate("A block table is", params, use_tqdm=False)
found.append(time.time() - start)
print(json.dumps(found))
if way == "everything":
    llm.llm_engine.executor.wait_until_compiled()
llm.close()
"""


def environment(tree: Path, cache: Path) -> dict[str, str]:
    """Returns the environment variables of a process that uses a checkout and a cache folder."""
    return os.environ | {"XDG_CACHE_HOME": str(cache), "PYTHONPATH": str(tree)}


def start_script(way: str, tree: Path, variables: dict[str, str]) -> list[float]:
    """Runs SCRIPT in a new process and returns the times at which the phases end (seconds).

    Args:
        way: "generate", "chat", or "everything", which fills the compilation cache with all programs.
        tree: Folder of the checkout.
        variables: Environment variables of the process.
    """
    command = [sys.executable, "-c", SCRIPT, str(time.time()), way, json.dumps(QUESTION)]
    done = subprocess.run(command, cwd=tree, env=variables, check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


def start_server(tree: Path, variables: dict[str, str]) -> list[float]:
    """Starts the server and sends it one chat request.

    Returns:
        The times at which the phases end (seconds). "ready" ends when the server prints its address. The time
        of the import is unknown, so it is NaN.
    """
    start = time.time()
    command = [sys.executable, "serve.py", "--port", "0"]
    server = subprocess.Popen(command, cwd=tree, env=variables, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        url = next(line for line in server.stdout if "Serving the OpenAI API at " in line)
        url = url.split(" at ")[1].split(". ")[0]
        ready = time.time() - start
        body = {"model": "pagelet", "messages": QUESTION, "temperature": 0, "max_tokens": 8}
        request = urllib.request.Request(
            f"{url}/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request) as response:
            assert json.loads(response.read())["choices"]
        return [float("nan"), ready, time.time() - start]
    finally:
        server.terminate()
        server.wait()


def main() -> None:
    """Runs the starts and prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="starts of each kind (default: %(default)s)")
    parser.add_argument("--ways", nargs="+", default=WAYS, choices=WAYS, help="what to start (default: all)")
    parser.add_argument("--only", choices=("cold", "warm"), help="run only cold or only warm starts")
    parser.add_argument("--cache", type=Path, help="folder that keeps the compilation caches of warm starts")
    parser.add_argument("--baseline", type=Path, help="another checkout; the two alternate")
    args = parser.parse_args()
    trees = {"here": ROOT} | ({"baseline": args.baseline.resolve()} if args.baseline else {})
    seen: dict[tuple[str, str, str], list[list[float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        caches = args.cache or Path(folder)
        for name, tree in trees.items():
            if args.only != "cold" and not (caches / name).exists():
                start_script("everything", tree, environment(tree, caches / name))
        for i in range(args.rounds):
            for way in args.ways:
                for cache_state in ("cold", "warm") if args.only is None else (args.only,):
                    for name, tree in trees.items():
                        cold = Path(folder) / f"{name}-{way}-{i}"
                        variables = environment(tree, cold if cache_state == "cold" else caches / name)
                        is_server = way == "server"
                        found = (
                            start_server(tree, variables) if is_server else start_script(way, tree, variables)
                        )
                        seen.setdefault((way, cache_state, name), []).append(found)
    print(
        f"\n| start | tree | {' | '.join(PHASES)} | answered, range |\n|---|---|{'---|' * (len(PHASES) + 1)}"
    )
    for (way, cache_state, name), rounds in seen.items():
        medians = [statistics.median(column) for column in zip(*rounds, strict=True)]
        cells = ["" if m != m else f"{m:.2f}" for m in medians]
        answers = [found[2] for found in rounds]
        cells.append(f"{min(answers):.2f} to {max(answers):.2f}")
        print(f"| {way}, {cache_state} | {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
