"""Scripts written for vLLM run with this package in their import lines, and print what they should."""

import ast
import contextlib
import gc
import io
import json
import re
import shutil
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers
from helpers.real_model import largest_buckets
from tokenizers import models, pre_tokenizers

from jax_paged.engine.text.tokenizer import Tokenizer
from jax_paged.worker.compilation import plan_steps

SCRIPTS = Path(__file__).parent.parent / "vllm_scripts"
T5 = Path(__file__).parent.parent / "models" / "fixtures" / "t5_tied"
PAGELET = Path(__file__).parent.parent.parent / "models" / "pagelet"
BUDGET = ("--max-num-seqs", "8", "--max-num-batched-tokens", "64")
Run = Callable[..., list[str]]


def with_our_imports(source: str) -> str:
    """Returns a script with another package's name in its import lines, and nowhere else."""
    return re.sub(r"^(from|import) vllm\b", r"\1 jax_paged", source, flags=re.MULTILINE)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a script as `python SCRIPT ARGUMENTS` would; returns the lines that it prints.

    Engines compile as few programs as possible, which changes no output.
    """
    monkeypatch.setattr(plan_steps, "plan_buckets", largest_buckets)

    def run(name: str, *arguments: str) -> list[str]:
        path = SCRIPTS / name
        monkeypatch.setattr(sys, "argv", [str(path), *arguments])
        code = compile(with_our_imports(path.read_text(encoding="utf-8")), str(path), "exec")
        variables = {"__name__": "__main__", "__file__": str(path)}
        out = io.StringIO()
        with contextlib.redirect_stdout(out), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "EngineArgs ignores|AsyncEngineArgs ignores")
            exec(code, variables)
        variables.clear()
        gc.collect()  # scripts close no engine
        return out.getvalue().splitlines()

    return run


def test_only_import_lines_differ() -> None:
    scripts = sorted(SCRIPTS.glob("*.py"))
    assert len(scripts) == 10
    for path in scripts:
        source = path.read_text(encoding="utf-8")
        assert "jax_paged" not in source
        before, after = source.splitlines(), with_our_imports(source).splitlines()
        changed = [new for old, new in zip(before, after, strict=True) if old != new]
        assert changed, path
        assert all(isinstance(ast.parse(line).body[0], ast.ImportFrom) for line in changed if "(" not in line)
        assert not re.search(r"\bvllm\b", "\n".join(after[1:])), path


def test_offline_basic(run: Run) -> None:
    lines = run("offline_basic.py", "pagelet")
    assert lines[0] == "Prompt: 'def add(a, b):\\n    '"
    assert [line.split(":")[0] for line in lines[:-1:3]] == ["Prompt"] * 4
    outputs = [ast.literal_eval(line.removeprefix("Output: ")) for line in lines[1::3]]
    assert len(outputs) == len(set(outputs)) == 4


def test_chat(run: Run) -> None:
    lines = run("chat.py", "pagelet")
    assert lines[:2] == ["one: 12 + 30 = 42.", "several: 20 + 22 = 42."]
    block_table = "A block table is the list of the block ids of one sequence"
    assert lines[2].startswith(f"several: {block_table}")
    assert lines[3].startswith("several: Copy-on-write lets sequences share a block")
    assert lines[4].startswith(f"template: {block_table}")
    assert lines[5].startswith("continued:  is the list of the block ids of one sequence")


def test_sampling(run: Run) -> None:
    lines = run("sampling.py", "pagelet")
    found = [re.fullmatch(r"([\w ,]+): (\d+) tokens, (\w+) (\w+): (.*)", line) for line in lines[:-1]]
    rows = [match.groups() for match in found if match]
    assert len(rows) == len(lines) - 1 == 14
    texts: dict[str, list[str]] = {}
    for name, _, _, _, text in rows:
        texts.setdefault(name, []).append(ast.literal_eval(text))
    (greedy,) = texts["greedy"]
    assert len(set(texts["three samples"])) == 3
    assert len({*texts["top_k"], *texts["min_p"], *texts["penalties"], greedy}) == 4
    assert [row[2:4] for row in rows if row[0].startswith("stop")] == [("stop", "class")] * 2
    (cut,), (shown,), (longer,) = texts["stop"], texts["stop, shown"], texts["min_tokens"]
    assert shown == cut + "class"
    assert greedy.startswith(cut)
    assert longer.startswith(greedy)
    assert "class" in greedy
    assert not re.search("class|file", texts["bad words"][0])
    allowed = [Tokenizer(str(PAGELET)).decode([token_id]) for token_id in (300, 301, 302)]
    assert re.fullmatch("|".join(map(re.escape, allowed)).join(("(", "){16}")), texts["allowed tokens"][0])
    assert texts["no text"] == [""]
    num_tokens = {name: int(count) for name, count, *_ in rows}
    assert num_tokens["min_tokens"] == 24
    assert num_tokens["no text"] == 4
    assert 200 < num_tokens["to the end"] < 256  # the rest of max_model_len
    assert lines[-1] == "changed: [2, 5]"


@pytest.mark.thorough
def test_prefix_caching(run: Run) -> None:
    same, cached, salted, unread = run("prefix_caching.py", "pagelet")
    assert same == "same outputs: True"
    numbers = ast.literal_eval(cached.removeprefix("cached tokens: "))
    assert len(numbers) == 3
    assert all(n >= 32 and n % 16 == 0 for n in numbers)
    assert salted == "cached tokens with a salt of its own: 0"
    assert unread == "cached tokens when it is not read: 0"


def test_beam_search(run: Run) -> None:
    lines = run("beam_search.py", "pagelet")
    assert len(lines) == 10
    for first, start in ((0, "def main():\n"), (5, "import ")):
        assert lines[first].startswith("Prompt: {'prompt")
        beams = [line.strip().split(" ", 1) for line in lines[first + 1 : first + 5]]
        scores, texts = [float(score) for score, _ in beams], [ast.literal_eval(text) for _, text in beams]
        assert len(set(texts)) == 4
        assert all(text.startswith(start) for text in texts)
        assert max(scores) < 0


def test_async_streaming(run: Run) -> None:
    lines = run("async_streaming.py", "pagelet")
    streamed = [ast.literal_eval(line.removeprefix("streamed: ")) for line in lines[:2]]
    assert all(len(text) > 20 for text in streamed)
    assert lines[2:] == ["in 1 output: True", "cumulative: True", "aborted: abort"]


def test_encoder_decoder(run: Run, tmp_path: Path) -> None:
    for file in ("config.json", "model.safetensors"):
        shutil.copy(T5 / file, tmp_path / file)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[:250]
    pieces = ["<pad>", "</s>", *alphabet]
    backend = tokenizers.Tokenizer(models.BPE({p: i for i, p in enumerate(pieces)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "TokenizersBackend"}))
    lines = run("encoder_decoder.py", str(tmp_path))
    found = [
        re.fullmatch(r"Encoder: (.*) (\[.*\]), decoder: (.*) (\[.*\]), output: (\[.*\])", line)
        for line in lines
    ]
    rows = [[ast.literal_eval(value) for value in match.groups()] for match in found if match]
    assert len(rows) == len(lines) == 8
    assert [row[0] for row in rows] == ["a cat", "a cat", None, "a cat", None, "a cat", "one", "two"]
    assert [row[2] for row in rows] == [None] * 5 + ["so", "1", "2"]
    assert all(row[3][0] == 0 for row in rows)  # the start token
    assert [len(row[3]) for row in rows] == [1, 1, 1, 6, 1, 3, 2, 2]
    assert [len(row[4]) for row in rows] == [8] * 8
    assert rows[0] == rows[1]
    assert rows[2] == rows[4]


def test_logprobs(run: Run) -> None:
    lines = run("logprobs.py", "pagelet")
    prompt = [line for line in lines if line.startswith("prompt: ")]
    assert prompt[0] == "prompt: None"
    assert len(prompt) >= 2
    assert all(float(line.split()[1]) < 0 for line in prompt[1:])
    output = [line for line in lines if line.startswith("output: ")]
    assert len(output) == 3
    assert all(" rank 1 of 2, best " in line for line in output)
    assert lines[-3:] == [
        "sum is cumulative_logprob: True",
        "vocabulary: True",
        "probabilities sum to 1.000",
    ]


def test_engine_loop(run: Run) -> None:
    lines = sorted(run("engine_loop.py", "--model", "pagelet", "--max-model-len", "256", *BUDGET))
    assert [line.split(": ")[0] for line in lines] == ["0", "1", "2"]  # "3" is aborted
    assert lines[0].startswith("0: 'A robot may not' ['")
    assert len(ast.literal_eval(lines[2].removeprefix("2: 'What is the meaning' "))) == 2


def test_batch_file(run: Run, tmp_path: Path) -> None:
    questions = [f"What is {i} + {i + 10}?" for i in range(10, 40, 3)]
    bodies = [{"messages": [{"role": "user", "content": question}]} for question in questions]
    requests = [{"custom_id": f"sum-{i}", "body": body} for i, body in enumerate(bodies)]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(request) + "\n" for request in requests))
    (line,) = run("batch_file.py", "pagelet", str(source), str(target))
    assert line.startswith("10 answers, ")
    answers = [json.loads(line) for line in target.read_text().splitlines()]
    assert [answer["custom_id"] for answer in answers] == [f"sum-{i}" for i in range(10)]
    texts = [answer["choices"][0]["message"]["content"] for answer in answers]
    right = [f"{i} + {i + 10} = {2 * i + 10}." for i in range(10, 40, 3)]
    assert sum(a == b for a, b in zip(texts, right, strict=True)) >= 9  # pagelet's sums are 99% right
    assert all(answer["choices"][0]["finish_reason"] == "stop" for answer in answers)
