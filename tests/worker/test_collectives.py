"""What the devices of a divided model tell each other: as little as can be, and nothing of the pool."""

import collections
import re
from pathlib import Path

import pytest
from helpers.real_model import make_engine

from jax_paged.worker.traced_step import StepProgram

pytestmark = pytest.mark.thorough

FIXTURES = Path(__file__).parents[1] / "models" / "fixtures"
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "collective-permute", "all-to-all")


def found_in(program: str, names: tuple[str, ...], shape: str = "") -> collections.Counter[str]:
    """Counts operations of these names, or that begin them, whose results have a shape."""
    found = re.findall(rf"= ([^=]*?) ({'|'.join(names)})(?:-start)?\(", program)
    return collections.Counter(name for result, name in found if re.search(shape, result))


@pytest.mark.parametrize(
    ("name", "size", "by_expert"),
    [
        ("gqa4_llama3", 2, False),
        ("gqa4_llama3", 4, False),
        ("phi3_window", 4, False),
        ("gpt2_variants", 2, False),
        ("qwen3_moe_tied", 4, False),
        ("qwen3_moe_tied", 4, True),
    ],
)
def test_two_sums_a_layer_and_the_logits(name: str, size: int, by_expert: bool) -> None:
    settings = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 96, "swap_space": 0.01}
    with make_engine(
        FIXTURES / name,
        few_buckets=True,
        tensor_parallel_size=size,
        enable_expert_parallel=by_expert,
        num_gpu_blocks_override=77,
        skip_tokenizer_init=True,
        **settings,
    ) as engine:
        runner = engine.executor.runner  # pyright: ignore[reportAttributeAccessIssue]
        engine.executor.wait_until_compiled()
        layers = len(runner.context.layout.locations)
        pool = r"\w+\[77,2,[\d,]+\]"
        for program in runner.compiled.programs:
            text = runner.compiled[program].execute.as_text()
            counts = found_in(text, COLLECTIVES)
            if isinstance(program, StepProgram):
                assert counts == {"all-reduce": 2 * layers + 1, "all-gather": 1}, program
                rows = f"{program.bucket.num_logits},{engine.config.vocab_size}"
                assert found_in(text, ("all-gather",), rf"f32\[{rows}\]") == {"all-gather": 1}, program
            elif str(program) != "prompt logprobs":
                assert not counts, program
            assert not found_in(text, ("copy", "all-gather", "gather"), pool), program


@pytest.mark.parametrize("name", ["gqa4_llama3", "qwen3_moe_tied"])
def test_temporaries_do_not_grow(name: str) -> None:
    settings = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 128,
        "max_model_len": 96,
        "matmul_backend": "xla",
    }
    found = []
    for size in (1, 4):
        with make_engine(
            FIXTURES / name,
            few_buckets=True,
            tensor_parallel_size=size,
            num_gpu_blocks_override=77,
            skip_tokenizer_init=True,
            **settings,
        ) as engine:
            engine.executor.wait_until_compiled()
            compiled = engine.executor.runner.compiled  # pyright: ignore[reportAttributeAccessIssue]
            steps = [program for program in compiled.programs if isinstance(program, StepProgram)]
            found.append({str(step): compiled[step].memory.temp_size_in_bytes for step in steps})
    alone, divided = found
    assert alone.keys() == divided.keys()
    for step, num_bytes in divided.items():
        assert num_bytes <= 1.1 * alone[step], step


def test_the_count_notices_what_it_should() -> None:
    text = """
      %a = f32[77,2,2,16,8]{4,3,2,1,0} all-gather(f32[77,2,1,16,8] %b), channel_id=1
      %c = (f32[4,8], f32[4,8]) all-reduce-start(f32[4,8] %d)
      %e = f32[4,8]{1,0} collective-permute(f32[4,8] %f)
    """
    assert found_in(text, COLLECTIVES) == {"all-gather": 1, "collective-permute": 1, "all-reduce": 1}
    assert found_in(text, ("all-gather",), r"\w+\[77,2,[\d,]+\]") == {"all-gather": 1}
