"""lm-eval: tasks that generate, choose and measure perplexity, compared with the model itself."""

import json
import math
import re

import pytest
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from jax_paged import SamplingParams

pytestmark = pytest.mark.server

MAX_LENGTH = 256  # shorter than the last document: its windows roll
QUESTIONS = [
    {"question": "def add(a, b):\n    return a", "choices": [" + b", " import", " # no"], "answer": 0},
    {"question": "import", "choices": [" numpy", " )", "(("], "answer": 0},
    {"question": "for i in range(", "choices": ["class", "10", "def x"], "answer": 1},
]
DOCUMENTS = [
    {"text": "def fibonacci(n):\n    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)\n"},
    {"text": "A block table maps the blocks of a sequence to the blocks of the pool. It says: good! 🙂\n"},
    {"text": "\n".join(f"x_{i} = read(stream, {i * 37}) or default_{i % 7}" for i in range(30))},
]
TASKS = {
    "continue_code": {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{choices[answer]}}",
        "generation_kwargs": {"until": ["\n\n", ")"], "max_gen_toks": 12, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
    "choose_code": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_target": "answer",
        "doc_to_choice": "{{choices}}",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}],
    },
    "perplexity_of_documents": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [
            {"metric": "word_perplexity"},
            {"metric": "byte_perplexity"},
            {"metric": "bits_per_byte"},
        ],
    },
}


@pytest.fixture(scope="module")
def evaluated(url, llm, tmp_path_factory):
    """What lm-eval makes of the tasks."""
    folder = tmp_path_factory.mktemp("tasks")
    for name, task in TASKS.items():
        data = folder / f"{name}.jsonl"
        documents = DOCUMENTS if task["output_type"] == "loglikelihood_rolling" else QUESTIONS
        data.write_text("".join(json.dumps(document) + "\n" for document in documents), encoding="utf-8")
        where = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}}
        content = {"task": name, "test_split": "test", **where, **task}
        (folder / f"{name}.yaml").write_text(json.dumps(content), encoding="utf-8")  # JSON is YAML
    return simple_evaluate(
        model="local-completions",
        model_args={
            "model": "pagelet",
            "base_url": f"{url}/v1/completions",
            "tokenizer": llm.llm_engine.tokenizer.name,
            "tokenizer_backend": "huggingface",
            "max_length": MAX_LENGTH,
            "num_concurrent": 4,
        },
        tasks=list(TASKS),
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        log_samples=True,
        bootstrap_iters=0,
    )


def logprob_of(llm, context, continuation):
    """Returns the log-probability of tokens after others, and whether each is the likeliest."""
    params = SamplingParams(max_tokens=1, prompt_logprobs=1)
    prompt = {"prompt_token_ids": [*context, *continuation]}
    (output,) = llm.generate(prompt, params, use_tqdm=False)
    entries = output.prompt_logprobs[len(context) :]
    chosen = [entry[token] for entry, token in zip(entries, continuation, strict=True)]
    return sum(x.logprob for x in chosen), all(x.rank == 1 for x in chosen)


def test_generation(evaluated, llm):
    settings = TASKS["continue_code"]["generation_kwargs"]
    params = SamplingParams(temperature=0, max_tokens=settings["max_gen_toks"], stop=settings["until"])
    for sample in evaluated["samples"]["continue_code"]:
        (output,) = llm.generate(sample["doc"]["question"], params, use_tqdm=False)
        assert sample["resps"] == [[output.outputs[0].text]]


def test_multiple_choice(evaluated, llm):
    tokenizer = llm.llm_engine.tokenizer
    num_right = 0
    for sample in evaluated["samples"]["choose_code"]:
        document = sample["doc"]
        context = tokenizer.encode(document["question"])
        expected = []
        for choice in document["choices"]:
            whole = tokenizer.encode(document["question"] + choice)
            expected.append(logprob_of(llm, whole[: len(context)], whole[len(context) :]))
        for [(logprob, is_greedy)], (value, is_first) in zip(sample["resps"], expected, strict=True):
            assert float(logprob) == pytest.approx(value, abs=1e-4)
            assert is_greedy in (is_first, str(is_first))
        values = [value for value, _ in expected]
        num_right += values.index(max(values)) == document["answer"]
    assert evaluated["results"]["choose_code"]["acc,none"] == pytest.approx(num_right / len(QUESTIONS))


def test_perplexity_equals_that_of_prompt_logprobs(evaluated, llm):
    tokenizer = llm.llm_engine.tokenizer
    total = 0.0
    for document in DOCUMENTS:
        windows = get_rolling_token_windows(
            token_list=tokenizer.encode(document["text"]),
            prefix_token=tokenizer.eos_token_id,
            max_seq_len=MAX_LENGTH - 2,  # without the token that it generates, and without the context
            context_len=1,
        )
        total += sum(logprob_of(llm, *make_disjoint_window(window))[0] for window in windows)
    num_bytes = sum(len(document["text"].encode()) for document in DOCUMENTS)
    num_words = sum(len(re.split(r"\s+", document["text"])) for document in DOCUMENTS)
    result = evaluated["results"]["perplexity_of_documents"]
    assert result["byte_perplexity,none"] == pytest.approx(math.exp(-total / num_bytes), abs=1e-4)
    assert result["bits_per_byte,none"] == pytest.approx(-total / num_bytes / math.log(2), abs=1e-4)
    assert result["word_perplexity,none"] == pytest.approx(math.exp(-total / num_words), rel=1e-4)
