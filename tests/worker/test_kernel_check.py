"""The check behind `auto` on a GPU, with stand-ins for its kernels: a CPU has everything else of it."""

import argparse
import dataclasses
import functools
import json
import logging
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_paged import LLM, EngineArgs, SamplingParams
from jax_paged.pallas_kernels import native
from jax_paged.pallas_kernels.self_check import runner
from jax_paged.pallas_kernels.self_check.expert_check import ExpertShape
from jax_paged.pallas_kernels.self_check.runner import Suite, Variant
from jax_paged.server.launch.cli import main
from jax_paged.worker.loading import kernel_check
from jax_paged.worker.loading.kernel_check import Verdict, check, choose_backend, suites_of

SUITE = Suite((Variant(2, 0.2),), kv_heads=1, head_dim=32, page_size=16, dtype="float32", max_len=96)
TWO = (
    Variant(4, 0.2, window=40, soft_cap=5.0, has_sinks=True),
    Variant(4, 1.0, has_bias=True),
)
ALL = Suite(TWO, kv_heads=2, head_dim=32, page_size=16, dtype="bfloat16", max_len=200)
STAND_IN = "helpers.kernel_stand_ins."
ROWS = ({"case": "a", "what": "error", "value": 0.1, "limit": 1.0},)
PASSED = Verdict("passed", "correct on this device", 1.0, ROWS)


def cases_of(verdict):
    return [row["case"].split(",")[0] for row in verdict.rows]


@pytest.mark.thorough
def test_right_and_faster(tmp_path):
    verdict = check(ALL, tmp_path, candidate="xla", baseline=STAND_IN + "slow")
    assert verdict.outcome == "passed", verdict
    moves, attention = ["write_kv", "copy_blocks"], ["paged_decode"] * 2 + ["ragged_attention"] * 2
    assert cases_of(verdict) == [*moves, *attention, *(f"write_kv + {op}" for op in attention)]
    assert [row["what"] for row in verdict.rows] == ["error"] * 6 + ["us"] * 4
    assert all(row["value"] <= row["limit"] for row in verdict.rows)
    assert verdict.seconds < 60
    times = []
    for _ in range(5):
        start = time.perf_counter()
        assert check(ALL, tmp_path, candidate="xla", baseline=STAND_IN + "slow") == verdict
        times.append(time.perf_counter() - start)
    assert min(times) < 0.05, "the kept verdict is read, and nothing is run"
    assert "passed: correct on this device" in verdict.table()


@pytest.mark.slow
def test_quantised_pools_are_checked_too(tmp_path):
    (suite,) = suites_of(EngineArgs(kv_cache_dtype="fp8_e4m3", max_model_len=100))
    assert suite.kv_cache_dtype == "fp8_e4m3"
    suite = dataclasses.replace(SUITE, kv_cache_dtype=suite.kv_cache_dtype)
    verdict = check(suite, tmp_path, candidate="xla", baseline="xla")
    assert verdict.outcome in ("passed", "slower"), verdict
    assert [row["what"] for row in verdict.rows] == ["error"] * 4 + ["us"] * 2


@pytest.mark.thorough
def test_one_element_that_is_wrong(tmp_path):
    verdict = check(SUITE, tmp_path, candidate=STAND_IN + "wrong")
    assert verdict.outcome == "wrong"
    assert cases_of(verdict) == ["write_kv", "copy_blocks", "paged_decode", "ragged_attention"]
    assert verdict.reason.startswith("paged_decode, 2 heads (error 0.0")
    assert "ragged" not in verdict.reason
    assert verdict.table().count("TOO LARGE") == 1
    assert check(SUITE, tmp_path, candidate=STAND_IN + "wrong") == verdict


@pytest.mark.thorough
def test_a_crash(tmp_path):
    verdict = check(SUITE, tmp_path, candidate=STAND_IN + "crash")
    assert (verdict.outcome, cases_of(verdict)[-1]) == ("crashed", "paged_decode")
    assert verdict.reason == "ragged_attention, 2 heads: the process ended with SIGSEGV"
    assert check(SUITE, tmp_path, candidate=STAND_IN + "crash") == verdict


@pytest.mark.slow
def test_a_process_that_hangs_ends_even_when_nobody_waits(tmp_path):
    """The engine may be killed before its check is."""
    program = (
        "import sys; sys.path[:] = eval(sys.argv[1]); from pathlib import Path\n"
        "from jax_paged.worker.loading.kernel_check import *; from test_kernel_check import *\n"
        "check(SUITE, Path(sys.argv[2]), candidate=STAND_IN + 'hang', limit_s=8)"
    )
    pids = tmp_path / "pids"
    path = repr([str(Path(__file__).parent), *sys.path])
    command = [sys.executable, "-c", program, path, str(tmp_path)]
    process = subprocess.Popen(command, env={**os.environ, "STAND_IN_PIDS": str(pids)})
    deadline = time.monotonic() + 60
    while not pids.exists() or not pids.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.kill()
    process.wait()
    child, sleeper = map(int, pids.read_text().split())
    try:
        while (state := Path(f"/proc/{child}/stat")).exists() and " Z " not in state.read_text():
            assert time.monotonic() < deadline
            time.sleep(0.1)
    finally:
        os.kill(sleeper, 9)


@pytest.mark.slow
def test_right_but_slower(tmp_path):
    verdict = check(SUITE, tmp_path, candidate=STAND_IN + "slow")
    assert verdict.outcome == "slower"
    assert "paged_decode" in verdict.reason
    assert verdict.table().count("TOO LARGE") == 2
    assert check(SUITE, tmp_path, candidate=STAND_IN + "slow") == verdict


EXPERTS = dataclasses.replace(SUITE, experts=(ExpertShape(2, 6, 64, 64),))


@pytest.mark.slow
def test_experts_that_are_right(tmp_path):
    candidate, baseline = STAND_IN + "interpreted_experts", STAND_IN + "slow_experts"
    verdict = check(EXPERTS, tmp_path, candidate=candidate, baseline=baseline)
    rows = [row for row in verdict.rows if row["case"].startswith("grouped_matmul")]
    names = [f"grouped_matmul, {n} rows, 6 x 64 x 64" for n in (66, 1026, 64, 1024)]
    assert [row["case"] for row in rows] == names
    assert [row["what"] for row in rows] == ["error", "error", "us", "us"]
    assert all(row["value"] <= row["limit"] for row in rows[:2])


@pytest.mark.slow
def test_experts_that_are_wrong(tmp_path):
    verdict = check(EXPERTS, tmp_path, candidate=STAND_IN + "wrong_experts")
    assert verdict.outcome == "wrong"
    assert verdict.reason.startswith("grouped_matmul, 66 rows, 6 x 64 x 64 (error ")


@pytest.mark.slow
def test_experts_that_are_slow(tmp_path):
    verdict = check(EXPERTS, tmp_path, candidate=STAND_IN + "slow_experts", baseline="xla")
    assert verdict.outcome == "slower"
    assert "grouped_matmul, 64 rows, 6 x 64 x 64 (us " in verdict.reason


@pytest.mark.slow
def test_experts_without_a_kernel_are_not_checked(tmp_path):
    """On a GPU without wgmma they are the same loop in both backends, and either could be the slower one."""
    verdict = check(EXPERTS, tmp_path, candidate="xla", baseline=STAND_IN + "slow")
    assert verdict.outcome == "passed"
    assert not any("grouped_matmul" in row["case"] for row in verdict.rows)


@pytest.mark.parametrize(
    ("name", "experts"),
    [
        ("mixtral", (ExpertShape(2, 4, 32, 64), ExpertShape(2, 4, 64, 32))),
        ("qwen3_moe_and_mlps", (ExpertShape(3, 6, 32, 24), ExpertShape(3, 6, 24, 32))),
        ("gpt_oss_old_config", (ExpertShape(3, 6, 32, 32), ExpertShape(3, 6, 16, 32))),
        ("mistral_window", ()),
    ],
)
def test_experts_of_a_model(name, experts):
    model = Path(__file__).parents[1] / "models" / "fixtures" / name
    assert suites_of(EngineArgs(str(model)))[0].experts == experts


@pytest.mark.thorough
def test_experts_that_the_kernels_refuse(tmp_path):
    narrow = dataclasses.replace(SUITE, head_dim=64, experts=(ExpertShape(2, 6, 64, 96),))
    verdict = check(narrow, tmp_path, candidate="pallas_interpret")
    assert verdict.outcome == "unsupported"
    assert (
        "the number of columns of `kernels` must be a multiple of 64 for grouped_matmul with backend 'pallas'"
        in verdict.reason
    )


@pytest.mark.thorough
@pytest.mark.skipif(jax.default_backend() == "gpu", reason="is about a machine without a GPU")
def test_kernels_that_refuse(tmp_path):
    verdict = check(SUITE, tmp_path)
    assert verdict.outcome == "unsupported"
    assert verdict.reason.endswith("got 'pallas', which needs an NVIDIA GPU")
    narrow = dataclasses.replace(SUITE, head_dim=48)
    verdict = check(narrow, tmp_path, candidate="pallas_interpret")
    assert verdict.outcome == "unsupported"
    assert "head_dim of `kv_pages` and `q` must be one of" in verdict.reason


def test_nothing_is_kept_of_a_check_that_did_not_run(tmp_path, monkeypatch):
    monkeypatch.setattr(kernel_check, "_machine", lambda: {"device": "another"})
    verdict = check(SUITE, tmp_path, candidate="xla")
    assert (verdict.outcome, verdict.rows) == ("not run", ())
    assert verdict.reason.endswith(" instead of another")
    assert [file.name for file in tmp_path.iterdir()] == ["lock"]
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no python"))
    assert check(SUITE, tmp_path, candidate="xla").outcome == "not run"


@pytest.fixture
def runs(monkeypatch):
    """The checks that are run, none of them really."""
    runs = []
    monkeypatch.setattr(kernel_check, "_run", lambda task, limit_s: runs.append(task) or PASSED)
    return runs


def test_what_a_verdict_depends_on(tmp_path, monkeypatch, runs):
    machine = kernel_check._machine()
    assert set(machine) == {"device", "driver", "runtime", "versions", "kernels"}
    assert {"jax", "jaxlib"} <= set(machine["versions"])
    for _ in range(2):
        assert check(SUITE, tmp_path) == PASSED
        assert len(runs) == 1
    for name in machine:
        with monkeypatch.context() as patch:
            patch.setattr(kernel_check, "_machine", lambda name=name: {**machine, name: "another"})
            check(SUITE, tmp_path)
    assert len(runs) == 1 + len(machine)
    for change in ({"dtype": "bfloat16"}, {"page_size": 32}, {"variants": TWO}, {"max_len": 97}):
        check(dataclasses.replace(SUITE, **change), tmp_path)
    assert len(runs) == 5 + len(machine)
    check(SUITE, tmp_path, ignores_stored=True)
    assert len(runs) == 6 + len(machine)
    check(SUITE, tmp_path)
    assert len(runs) == 6 + len(machine)


def test_another_source_of_the_kernels_is_another_key(tmp_path, monkeypatch):
    before = kernel_check._machine()["kernels"]
    folder = Path(kernel_check.ops.__file__).parent
    shutil.copytree(folder, tmp_path, ignore=shutil.ignore_patterns("*.so", "*.cc"), dirs_exist_ok=True)
    monkeypatch.setattr(kernel_check.ops, "__file__", str(tmp_path / "ops.py"))
    assert kernel_check._machine()["kernels"] == before
    (tmp_path / "gpu" / "combine.py").write_text("# new\n")
    assert kernel_check._machine()["kernels"] != before


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"key": 1}', "null", "\x00", '{"verdict": {"outcome": "passed"}, "key": KEY}']
)
def test_a_file_that_holds_no_verdict(tmp_path, runs, caplog, text):
    check(SUITE, tmp_path)
    (file,) = tmp_path.glob("*.json")
    file.write_text(text.replace("KEY", json.dumps(json.loads(file.read_text())["key"])))
    assert check(SUITE, tmp_path) == PASSED
    assert len(runs) == 2
    assert check(SUITE, tmp_path) == PASSED
    assert len(runs) == 2


def test_a_folder_that_cannot_be_written_to(tmp_path, runs, caplog):
    (tmp_path / "file").write_text("")
    for _ in range(2):
        assert check(SUITE, tmp_path / "file" / "folder") == PASSED
    assert len(runs) == 2
    assert "so every start repeats them" in caplog.text


@pytest.mark.slow
def test_two_processes_at_once(tmp_path):
    program = (
        "import sys; sys.path[:] = eval(sys.argv[1])\n"
        "from pathlib import Path; from test_kernel_check import *\n"
        "verdict = check(SUITE, Path(sys.argv[2]), candidate='xla', baseline=STAND_IN + 'slow')\n"
        "print(json.dumps(dataclasses.asdict(verdict)))"
    )
    path = repr([str(Path(__file__).parent), *sys.path])
    command = [sys.executable, "-c", program, path, str(tmp_path)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(2)]
    first, second = (json.loads(process.communicate(timeout=100)[0]) for process in processes)
    # Times are never the same twice.
    assert first == second
    assert first["outcome"] == "passed"


def verdicts():
    for outcome in ("passed", "slower", "wrong", "crashed", "hung", "unsupported", "not run"):
        yield outcome, Verdict(outcome, "because", 1.0)


@pytest.fixture
def on_gpu(monkeypatch):
    """The module believes that this machine's device is a GPU."""
    device = jax.devices()[0]
    gpu = SimpleNamespace(platform="gpu", device_kind=device.device_kind, client=device.client)
    shapes = {"eval_shape": jax.eval_shape, "ShapeDtypeStruct": jax.ShapeDtypeStruct}
    fake = SimpleNamespace(devices=lambda: [gpu], config=jax.config, **shapes)
    monkeypatch.setattr(kernel_check, "jax", fake)
    monkeypatch.setattr(kernel_check, "resolve_backend", lambda backend, name: "xla")


@pytest.mark.parametrize(("outcome", "verdict"), verdicts())
def test_auto_goes_by_the_verdict(on_gpu, monkeypatch, caplog, outcome, verdict):
    monkeypatch.setattr(kernel_check, "check", lambda suite: verdict)
    caplog.set_level(logging.INFO)
    backend, reason = choose_backend(EngineArgs(), None, None)
    assert backend == ("pallas" if outcome == "passed" else "xla")
    assert "because" in reason
    assert reason.startswith("auto")
    (record,) = [r for r in caplog.records if r.name == kernel_check.__name__]
    assert "because" in record.message
    assert record.levelname == ("INFO" if outcome == "passed" else "WARNING")
    asks = "open an issue with the output of `jax-paged check-kernels --model pagelet`"
    assert (asks in record.message) == (outcome in ("slower", "wrong", "crashed", "hung"))
    assert ("for details" in record.message) == (outcome in ("unsupported", "not run"))


def test_the_command_that_is_named_checks_the_same(on_gpu, monkeypatch, caplog):
    monkeypatch.setattr(kernel_check, "check", lambda suite: Verdict("slower", "because", 1.0))
    args = EngineArgs(dtype="bfloat16", block_size=32, max_model_len=100, kv_cache_dtype="int8")
    choose_backend(args, None, None)
    options = "--model pagelet --dtype bfloat16 --block-size 32 --max-model-len 100 --kv-cache-dtype int8"
    assert f"`jax-paged check-kernels {options}`" in caplog.text
    parser = EngineArgs.add_cli_args(argparse.ArgumentParser())
    assert suites_of(EngineArgs.from_cli_args(parser.parse_args(options.split()))) == suites_of(args)


def test_a_device_that_has_no_kernels_is_unsupported(monkeypatch):
    def refuse(backend):
        raise ValueError("the device Tesla T4 has compute capability 7.5")

    monkeypatch.setattr(runner, "implementation_of", refuse)
    with pytest.raises(runner._CheckEnded, match=r"unsupported.*compute capability 7\.5"):
        runner.run(SUITE, "xla", "xla", lambda event: None)


def test_times_that_differ_by_noise_are_equal():
    row = {"case": "a", "what": "us", "limit": 100.0}
    assert [kernel_check._is_over(row | {"value": value}) for value in (99.0, 102.0, 104.0)] == [
        False,
        False,
        True,
    ]
    assert kernel_check._is_over(row | {"what": "error", "value": 101.0})


@pytest.mark.parametrize("outcome", ["passed", "wrong"])
def test_blackwell_has_to_pass_its_own_check(on_gpu, tmp_path, monkeypatch, outcome):
    """No GPU of that generation has run the kernels; what a Hopper has found says nothing of it."""
    machine, checked = kernel_check._machine(), []

    def run(task, limit_s):
        checked.append(task["device_kind"])
        return Verdict("passed" if task["device_kind"] == "NVIDIA H100" else outcome, "because", 1.0)

    monkeypatch.setattr(kernel_check, "_run", run)
    monkeypatch.setattr(kernel_check, "check", functools.partial(check, folder=tmp_path))
    expected = {"NVIDIA H100": "pallas", "NVIDIA B200": "pallas" if outcome == "passed" else "xla"}
    for device, backend in expected.items():
        monkeypatch.setattr(kernel_check, "_machine", lambda device=device: machine | {"device": device})
        assert choose_backend(EngineArgs(), None, None)[0] == backend
    assert checked == list(expected)


def test_what_is_not_checked(on_gpu, monkeypatch):
    monkeypatch.setattr(kernel_check, "check", None)
    assert choose_backend(EngineArgs(attention_backend="xla"), None, None) == ("xla", "requested")
    backend, reason = choose_backend(EngineArgs(), None, lambda *args, **options: args[0])
    assert (backend, reason) == ("xla", "auto, with a custom attend function")


@pytest.mark.slow
def test_an_engine_outlives_kernels_that_hang(on_gpu, tmp_path, monkeypatch):
    pids = tmp_path / "pids"
    monkeypatch.setenv("STAND_IN_PIDS", str(pids))
    hanging = functools.partial(check, folder=tmp_path, candidate=STAND_IN + "hang", limit_s=12)
    monkeypatch.setattr(kernel_check, "check", hanging)
    limits = {"max_model_len": 64, "max_num_seqs": 1, "num_gpu_blocks_override": 16, "max_compile_s": 0}
    with LLM(max_num_batched_tokens=16, **limits) as llm:
        why = "xla (auto; pallas hung: paged_decode, 4 heads: not done after 12 s)"
        assert f"backend {why}, " in repr(llm)
        assert llm.compile_plan().splitlines()[-1] == f"backend {why}"
        (output,) = llm.generate(["A block table"], SamplingParams(max_tokens=3, ignore_eos=True))
        assert len(output.outputs[0].token_ids) == 3
    for pid in pids.read_text().split():
        # What the kernels have started is killed too; who waits for it is the init process.
        state = Path(f"/proc/{pid}/stat")
        assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] in "ZX"
    start = time.monotonic()
    verdict = hanging(suites_of(EngineArgs(max_model_len=64))[0])
    assert time.monotonic() - start < 3, "a start hangs once"
    assert (verdict.outcome, cases_of(verdict)) == ("hung", ["write_kv", "copy_blocks"])


@pytest.mark.thorough
def test_shapes_of_a_model_that_is_not_loaded():
    (suite,) = suites_of(EngineArgs(dtype="bfloat16", block_size=32, max_model_len=100))
    (variant,) = suite.variants
    assert (suite.page_size, suite.dtype, suite.max_len) == (32, "bfloat16", 100)
    with LLM(max_num_seqs=1, max_num_batched_tokens=16, num_gpu_blocks_override=16, max_compile_s=0) as llm:
        context = llm.llm_engine.executor.runner.context
        layout, model = context.layout, context.merge(context.weights)
    assert (suite.kv_heads, suite.head_dim) == (layout.num_kv_heads, layout.head_dim)
    assert variant == Variant(model.config.num_attention_heads, layout.head_dim**-0.5)


def test_each_kind_of_error_is_seen():
    want = jnp.asarray(np.random.default_rng(0).standard_normal((3, 2, 64)), jnp.float32)
    want = want.at[2].set(0)
    error = functools.partial(runner.error_of, is_move=False)
    assert error(want, want) == 0
    assert error(want.at[1, 1, 5].add(0.01), want) > 0.005
    assert error(want.at[1, 1, 5].set(jnp.nan), want) == float("inf")
    assert error(want.at[2, 0, 0].set(1e-20), want) == float("inf")
    pool = want.at[0].set(jnp.nan)
    assert runner.error_of(pool, pool, is_move=True) == 0
    assert runner.error_of(pool.at[0, 0, 0].set(1), pool, is_move=True) > 0


def test_nobody_attends_to_what_is_dead():
    """The suite itself: contexts hold numbers, and all else is NaN, in and before a window."""
    pairs = [(50, 10), (5, 5), (0, 0), (33, 1)]
    case = runner.make_case(SUITE, Variant(2, 0.2, window=20), "ragged_attention", pairs, 3)
    q, pool, tables, lens, start = map(np.asarray, case.args)
    assert (lens.tolist(), start.tolist()) == ([50, 5, 0, 33], [0, 10, 15, 15, 16])
    assert np.isnan(q[16:]).all()
    assert not np.isnan(q[:16]).any()
    assert (~np.isnan(pool[:, 0, 0, :, 0])).sum() == (10 + 20 - 1) + 5 + 20
    slots = pool.swapaxes(1, 3)[case.slots // 16, case.slots % 16]
    assert len(slots) == 16
    assert not np.isnan(slots).any()
    assert tables.max() >= len(pool), "pages that nobody attends to may be anywhere"


@pytest.mark.thorough
@pytest.mark.skipif(not native.is_built(), reason=f"native: {native.problem()}")
def test_the_command(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for backend, code, line in (
        ("native", 0, "\npassed: correct on this device and "),
        ("auto", 1, "\nunsupported: `backend` must be one of 'auto', "),
    ):
        with pytest.raises(SystemExit) as ended:
            main(["check-kernels", "--attention-backend", backend, "--max-model-len", "64"])
        assert ended.value.code == code
        assert line in capsys.readouterr().out
    assert len(list((tmp_path / "jax-paged" / "kernel-checks").glob("*.json"))) == 2
