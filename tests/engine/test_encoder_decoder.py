"""T5 in the engine: the encoder runs once per request, and what it wrote is shared by samples and beams."""

import json
from pathlib import Path

import pytest
from helpers.real_model import assert_no_block_lost, make_executor, reschedule, steps_of
from helpers.wrapped_executor import WrappedExecutor

from jax_paged import LLM, BeamSearchParams, EngineArgs, SamplingParams

FOLDER = Path(__file__).parent.parent / "models" / "fixtures" / "t5_tied"
BLOCK_SIZE = 4
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def llm():
    args = EngineArgs(
        str(FOLDER),
        dtype="float32",
        skip_tokenizer_init=True,
        block_size=BLOCK_SIZE,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        num_gpu_blocks_override=400,
        num_scheduler_steps=8,
    )
    with LLM(str(FOLDER), skip_tokenizer_init=True, executor=make_executor(args)) as llm:
        reschedule(llm.llm_engine, num_scheduler_steps=1)
        yield llm


@pytest.fixture(scope="module")
def case():
    """A text for the encoder and what transformers answers greedily."""
    cases = json.loads((FOLDER / "reference.json").read_text(encoding="utf-8"))["cases"]
    return max(cases, key=lambda case: len(encoder_ids(case)))


def encoder_ids(case):
    return case.get("encoder_token_ids") or case["prompt_token_ids"]


@pytest.fixture
def encoded(llm, monkeypatch):
    """A list of the texts that the encoder reads."""
    texts, engine = [], llm.llm_engine

    def note(output):
        texts.extend(text.token_ids for text in output.encoder_inputs)

    monkeypatch.setattr(engine._core, "executor", WrappedExecutor(engine.executor, before=note))
    return texts


def test_a_plain_prompt_is_the_encoders(llm, case, encoded):
    (output,) = llm.generate({"prompt_token_ids": encoder_ids(case)}, GREEDY, use_tqdm=False)
    assert list(output.outputs[0].token_ids) == case["token_ids"]
    assert output.encoder_prompt_token_ids == encoder_ids(case)
    assert output.prompt_token_ids == [llm.llm_engine.config.decoder_start_token_id]
    assert encoded == [encoder_ids(case)]
    both = {"encoder_prompt": encoder_ids(case), "decoder_prompt": [0, *case["token_ids"][:5]]}
    (forced,) = llm.generate([both], GREEDY, use_tqdm=False)
    assert list(forced.outputs[0].token_ids)[:19] == case["token_ids"][5:]
    assert_no_block_lost(llm.llm_engine)


@pytest.mark.parametrize("depth", [1, 2])
def test_bursts_are_exact(llm, case, monkeypatch, depth):
    engine = llm.llm_engine
    prompts = [{"prompt_token_ids": encoder_ids(case)[i:]} for i in range(4)]
    params = [GREEDY, *(SamplingParams(seed=i, max_tokens=30, repetition_penalty=1.2) for i in range(3))]
    expected = llm.generate(prompts, params, use_tqdm=False)
    monkeypatch.setattr(engine._core, "max_in_flight", depth)
    reschedule(engine, num_scheduler_steps=8)
    steps = steps_of(engine, monkeypatch)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert sum(bool(step.num_multi_step_tokens) for step in steps) >= 3
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in expected]
    assert list(outputs[0].outputs[0].token_ids) == case["token_ids"]
    while engine.has_unfinished_requests():
        engine.step()
    assert_no_block_lost(engine)
    reschedule(engine, num_scheduler_steps=1)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(n=4, seed=1, max_tokens=20, ignore_eos=True),
        BeamSearchParams(4, max_tokens=20, ignore_eos=True),
    ],
)
def test_samples_and_beams_share_the_encoders_blocks(llm, case, encoded, params):
    engine = llm.llm_engine
    manager = engine.scheduler.block_manager
    cross = next(g for g, group in enumerate(manager.groups) if group.is_cross)
    num_cross = -(-len(encoder_ids(case)) // BLOCK_SIZE)
    engine.add_request("r", {"prompt_token_ids": encoder_ids(case)}, params)
    most = 0
    while engine.has_unfinished_requests():
        engine.step()
        manager.check_integrity()
        tables = [tables[cross] for tables in manager.block_tables.values()]
        assert all(len(table) == num_cross and table == tables[0] for table in tables)
        if tables:
            most = max(most, len(tables))
            assert manager.pool.ref_counts[tables[0][0]] == len(tables)
    assert most == 4
    assert len(encoded) == 1
    assert_no_block_lost(engine)


def test_each_sample_and_the_best_beam_are_those_of_requests_of_their_own(llm, case):
    prompt = {"prompt_token_ids": encoder_ids(case)}
    params = SamplingParams(n=3, seed=9, max_tokens=12, temperature=0.8, ignore_eos=True)
    (together,) = llm.generate(prompt, params, use_tqdm=False)
    for i, sample in enumerate(together.outputs):
        alone = SamplingParams(seed=params.seed_of(i), max_tokens=12, temperature=0.8, ignore_eos=True)
        assert llm.generate(prompt, alone, use_tqdm=False)[0].outputs[0].token_ids == sample.token_ids
    (beams,) = llm.beam_search(prompt, BeamSearchParams(1, max_tokens=24, ignore_eos=True), use_tqdm=False)
    assert beams.sequences[0].tokens[1:] == case["token_ids"]


def test_bad_prompts_say_what_is_allowed(llm, case):
    with pytest.raises(
        ValueError,
        match=r"`prompt` must be a dict with exactly the keys \['decoder_prompt', 'encoder_prompt'\]",
    ):
        llm.generate([{"encoder_prompt": [5]}], GREEDY, use_tqdm=False)
    too_long = [5] * (llm.llm_engine.config.max_model_len + 1)
    with pytest.raises(ValueError, match="the number of encoder tokens of `prompt` must be at most"):
        llm.generate([too_long], GREEDY, use_tqdm=False)
    with pytest.raises(ValueError, match="prefixes of encoder-decoder models can't be pinned"):
        llm.pin_prefix(encoder_ids(case))
