"""The backends of an engine with batch_invariant: `auto` stands for backends that pass the check."""

import dataclasses
import logging
from typing import Any

import pytest
from helpers.scripted_engine import ScriptedExecutor, run

from jax_paged import LLM, EngineArgs, LLMEngine, SamplingParams
from jax_paged.core.model_runner_output import ModelRunnerOutput, TokenLogprobs
from jax_paged.core.scheduler_output import ScheduledSequence
from jax_paged.engine.replicas.replicated_engine import ReplicatedEngine
from jax_paged.worker import executor

pytestmark = pytest.mark.thorough

type Backends = tuple[str, str]
USUAL = {"attention_backend": "native", "matmul_backend": "onednn"}


class VariantExecutor(ScriptedExecutor):
    """Draws tokens by position; with some backends, log-probabilities depend on the size of the batch.

    Args:
        args: Limits and backends.
        failing: Pairs of attention and products whose results depend on the batch.
    """

    def __init__(self, args: EngineArgs, failing: set[Backends]) -> None:
        super().__init__(args)
        backend, products = (
            USUAL[name] if getattr(args, name) == "auto" else getattr(args, name) for name in USUAL
        )
        changes: dict[str, Any] = {"attention_backend": backend, "matmul_backend": products}
        self.config = dataclasses.replace(self.config, batch_invariant=args.batch_invariant, **changes)
        self._varies = (backend, products) in failing

    def result(self) -> ModelRunnerOutput:
        output = self._dispatched[0]
        logprob = -1.0 - self._varies * len(output.scheduled)
        result = super().result()
        entries = [[TokenLogprobs(logprob, 1, [], []) for _ in tokens] for tokens in result.token_ids]
        return dataclasses.replace(result, logprobs=entries)

    def _next(self, row: ScheduledSequence) -> list[int]:
        return [3 + row.start + row.num_tokens]


class Maker:
    """Makes executors, and keeps them."""

    def __init__(self, *failing: Backends) -> None:
        self.failing, self.made = set(failing), list[VariantExecutor]()

    def __call__(self, args: EngineArgs) -> VariantExecutor:
        self.made.append(VariantExecutor(args, self.failing))
        return self.made[-1]

    @property
    def num_open(self) -> int:
        return sum(made.num_closed == 0 for made in self.made)


def make_engine(maker: Maker, **settings: Any) -> LLMEngine:
    args = EngineArgs("scripted", skip_tokenizer_init=True, async_scheduling=False, **settings)
    return LLMEngine(args, maker)


@pytest.mark.parametrize(
    ("failing", "expected"),
    [
        ([], ("native", "onednn")),
        ([("native", "onednn")], ("native", "xla")),
        ([("native", "onednn"), ("native", "xla")], ("xla", "onednn")),
        ([("native", "onednn"), ("native", "xla"), ("xla", "onednn")], ("xla", "xla")),
    ],
)
def test_auto_chooses_backends_that_pass(
    failing: list[Backends], expected: Backends, caplog: pytest.LogCaptureFixture
) -> None:
    maker = Maker(*failing)
    with caplog.at_level(logging.WARNING), make_engine(maker, batch_invariant=True) as engine:
        assert (engine.config.attention_backend, engine.config.matmul_backend) == expected
        assert maker.num_open == 1, "the executors that failed are closed"
        lines = [record.getMessage() for record in caplog.records if "batch_invariant" in record.getMessage()]
        assert len(lines) == bool(failing)
        if failing:
            assert f"{expected[1]!r}" in lines[0]
            assert "attention_backend='native' and matmul_backend='onednn'" in lines[0]
        with make_engine(maker, batch_invariant=False) as other:
            for each in (engine, other):
                each.add_request("0", {"prompt_token_ids": [5]}, SamplingParams(max_tokens=2, temperature=1))
                assert run(each)["0"].outputs[0].token_ids
        # The attempts that failed have drawn no seeds.
        fresh = Maker(*failing)
        named = {"attention_backend": expected[0], "matmul_backend": expected[1]}
        with make_engine(fresh, batch_invariant=True, **named) as explicit:
            assert len(fresh.made) == 1
            explicit.add_request("0", {"prompt_token_ids": [5]}, SamplingParams(max_tokens=2, temperature=1))
            run(explicit)
            assert explicit.executor.seeds["0"] == engine.executor.seeds["0"]  # pyright: ignore
    assert maker.num_open == 0


@pytest.mark.quick
def test_a_named_backend_is_kept() -> None:
    maker = Maker(("native", "onednn"))
    with make_engine(maker, batch_invariant=True, matmul_backend="onednn") as engine:
        assert (engine.config.attention_backend, engine.config.matmul_backend) == ("xla", "onednn")


def test_the_error_of_named_backends_names_backends_that_pass() -> None:
    maker = Maker(("native", "onednn"), ("xla", "onednn"))
    with pytest.raises(
        ValueError,
        match=r"must be False for .*='onednn' because.* Pass matmul_backend='xla' to use batch_invariant$",
    ):
        make_engine(maker, batch_invariant=True, matmul_backend="onednn")
    assert maker.num_open == 0
    both = {"matmul_backend": "onednn", "attention_backend": "native"}
    with pytest.raises(ValueError, match=r"Pass matmul_backend='xla' to use batch_invariant$"):
        make_engine(maker, batch_invariant=True, **both)
    assert maker.num_open == 0


def test_without_a_backend_that_passes_the_error_is_that_of_the_check() -> None:
    maker = Maker(*((a, b) for a in ("native", "xla") for b in ("onednn", "xla")))
    with pytest.raises(ValueError, match="must be False for this model on this machine because results"):
        make_engine(maker, batch_invariant=True)
    assert len(maker.made) == 4
    assert maker.num_open == 0


def test_processes_of_a_launcher_are_not_started_again() -> None:
    maker = Maker(("native", "onednn"))
    with pytest.raises(ValueError, match="must be False for this model on this machine"):
        make_engine(maker, batch_invariant=True, distributed_executor_backend="external_launcher")
    assert len(maker.made) == 1


def test_engines_after_the_first_have_its_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    maker = Maker(("native", "onednn"))
    monkeypatch.setattr(executor, "LocalExecutor", lambda args, *parts, **options: maker(args))
    settings: dict[str, Any] = {"skip_tokenizer_init": True, "batch_invariant": True}
    with LLM("scripted", data_parallel_size=2, **settings):
        assert [made.config.matmul_backend for made in maker.made] == ["onednn", "xla", "xla"]
    engine = ReplicatedEngine(EngineArgs("scripted", data_parallel_size=2, **settings))
    engine.close()
    assert [made.config.matmul_backend for made in maker.made[3:]] == ["onednn", "xla", "xla"]
    assert maker.num_open == 0
