"""Qwen3-VL, whose image tokens stand in rows and columns, beside transformers; and what shares its blocks."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.pictures import drawn
from helpers.real_model import TOLERANCE, drain, make_engine, make_executor, reset, set_prefix_caching

from jax_paged import LLM, BeamSearchParams, EngineArgs, LLMEngine, RequestOutput, SamplingParams
from jax_paged.config.multimodal import ImageSettings
from jax_paged.core.kv_cache.prefix_cache import PrefixCache
from jax_paged.core.request import PlaceholderData
from jax_paged.core.scheduler_output import NewSequence
from jax_paged.engine.features.multimodal import image_reader
from jax_paged.engine.features.multimodal.image_reader import ImageReader
from jax_paged.engine.text.tokenizer import Tokenizer
from jax_paged.models.families.qwen3_vl import Qwen3VLConfig, Qwen3VLForConditionalGeneration
from jax_paged.models.image_inputs import MAX_PATCHES, ImageSpec, Patches, PatchSpec
from jax_paged.worker.features.feature_rows import FeatureRows
from jax_paged.worker.features.multimodal.image_encoder import (
    EncodePatchesProgram,
    _encode_patches,
    check_images_can_be_encoded,
    plan_images,
)
from jax_paged.worker.features.multimodal.mrope import mrope_positions
from jax_paged.worker.loading import weights

FIXTURES = Path(__file__).parents[1] / "models" / "image_fixtures"
FOLDER = FIXTURES / "qwen3_vl_tied"
FOLDERS = [FOLDER, FIXTURES / "qwen3_vl"]
MERGE3 = FIXTURES / "qwen3_vl_merge3"
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
SETTINGS: dict[str, Any] = {
    "few_buckets": True,
    "max_model_len": 128,
    "max_num_batched_tokens": 64,
    "max_num_seqs": 8,
    "num_gpu_blocks_override": 20,
}
GREEDY = SamplingParams(temperature=0, max_tokens=24, logprobs=1)
SHORT = SamplingParams(temperature=0, max_tokens=4)


def spec_of(folder: Path) -> PatchSpec:
    config = Qwen3VLConfig.from_hf(json.loads((folder / "config.json").read_text()))
    return PatchSpec(config.image_token_id, config.vision.patch_size, config.vision.spatial_merge_size, ())


def reader_of(folder: Path) -> tuple[ImageReader, Tokenizer]:
    tokenizer = Tokenizer(str(folder))
    return ImageReader(ImageSettings(spec_of(folder), 8, 0), tokenizer), tokenizer


def cases_of(folder: Path) -> list[dict[str, Any]]:
    return json.loads((folder / "reference.json").read_text())["cases"]


def prompt(text: str, *pictures: Any) -> dict[str, Any]:
    return {"prompt": text, "multi_modal_data": {"image": list(pictures)}}


def prompts_of(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [prompt(case["text"], *(drawn(*p) for p in case["pictures"])) for case in cases]


def run(engine: LLMEngine, prompts: list[Any], params: Any = GREEDY) -> list[RequestOutput]:
    for i, each in enumerate(prompts):
        engine.add_request(str(i), engine.check_request(each, params))
    outputs = drain(engine)
    return [outputs[str(i)] for i in range(len(prompts))]


def assert_right(outputs: list[RequestOutput], cases: list[dict[str, Any]]) -> None:
    for output, case in zip(outputs, cases, strict=True):
        (answer,) = output.outputs
        assert output.prompt_token_ids == case["prompt_token_ids"]
        assert list(answer.token_ids) == case["token_ids"]
        rows = zip(answer.logprobs or [], answer.token_ids, case["logprobs"], strict=True)
        assert all(abs(row[token].logprob - value) < TOLERANCE for row, token, value in rows)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "folder", [FOLDERS[1], pytest.param(FOLDER, marks=pytest.mark.slow)], ids=lambda f: f.name
)
def test_equals_transformers(folder: Path) -> None:
    """In chunks, beside plain text, preempted, from the cache, and where no vector is kept for others."""
    cases = cases_of(folder)
    prompts = prompts_of(cases)
    with make_engine(folder, **SETTINGS) as engine:
        batched = run(engine, prompts)
        engine.scheduler.max_num_batched_tokens = 24  # images have up to 64 or 100 tokens
        encoder: Any = engine.executor.runner.features.image_encoder  # pyright: ignore[reportAttributeAccessIssue]
        encoder.clear()
        encoder._max_bytes = 0
        chunked = run(engine, prompts[::-1])[::-1]
    assert_right(batched, cases)
    assert_right(chunked, cases)
    assert sum(output.metrics.num_preemptions for output in batched + chunked) > 0
    assert sum(output.num_cached_tokens for output in chunked) > 0


@pytest.mark.slow
def test_tokens_of_nine_patches_and_images_that_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equals transformers; and if an image can't be encoded, its request ends and no other does."""
    cases = cases_of(MERGE3)
    with make_engine(MERGE3, **SETTINGS) as engine:
        assert_right(run(engine, prompts_of(cases)), cases)
        runner: Any = engine.executor.runner  # pyright: ignore[reportAttributeAccessIssue]
        runner.features.image_encoder.clear()
        set_prefix_caching(engine, True)
        execute, large = runner._run, EncodePatchesProgram(513)

        def fail(program: Any, *args: Any) -> Any:
            if program == large:
                raise RuntimeError("RESOURCE_EXHAUSTED: no memory")
            return execute(program, *args)

        with monkeypatch.context() as patch:
            patch.setattr(runner, "_run", fail)
            outputs = run(engine, prompts_of(cases))
        failed = [output.outputs[0] for output in outputs if "large" in (output.prompt or "")]
        assert [(x.finish_reason, x.stop_reason, list(x.token_ids)) for x in failed] == [
            ("abort", "an image could not be encoded: RESOURCE_EXHAUSTED: no memory", [])
        ]
        others = [(o, c) for o, c in zip(outputs, cases, strict=True) if "large" not in c["text"]]
        assert_right(*map(list, zip(*others, strict=True)))
        # No block of the request that failed is shared.
        assert_right(run(engine, prompts_of(cases)), cases)


def test_a_model_whose_images_have_no_program_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise TypeError("cannot reshape array of shape (256, 16) into shape (-1, 144)")

    monkeypatch.setattr(Qwen3VLForConditionalGeneration, "encode_images", fail)
    with pytest.raises(ValueError, match=r"the model can't encode images: cannot reshape .*vision_config"):
        make_engine(MERGE3, **SETTINGS)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"num_scheduler_steps": 8},
        {"async_scheduling": True},
        {"async_scheduling": True, "num_scheduler_steps": 4},
        {"preemption_mode": "swap", "swap_space": 0.01},
        {"batch_invariant": True},
        {"tensor_parallel_size": 2},
        {"matmul_backend": "auto"},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
        {"speculative_config": {"model": str(FOLDER), "num_speculative_tokens": 2}},
        {"enable_prefix_caching": False, "enable_chunked_prefill": False, "max_num_batched_tokens": 512},
    ],
    ids=lambda settings: " ".join(f"{name}={value}" for name, value in settings.items())[:60],
)
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda f: f.name)
def test_equals_transformers_however_it_runs(folder: Path, settings: dict[str, Any]) -> None:
    if "model" in settings.get("speculative_config", {}) and folder != FOLDER:
        pytest.skip("a draft model of its own checkpoint is enough")
    cases = cases_of(folder)
    with make_engine(folder, **SETTINGS | settings) as engine:
        for _ in range(2):  # the second time from the cache
            assert_right(run(engine, prompts_of(cases)), cases)


@pytest.mark.parametrize("folder", [*FOLDERS, MERGE3], ids=lambda f: f.name)
def test_placeholders_and_positions_equal_transformers(folder: Path) -> None:
    reader, tokenizer = reader_of(folder)
    for case in cases_of(folder):
        pictures = [drawn(*p) for p in case["pictures"]]
        token_ids, placeholder_data = reader.read(tokenizer.encode(case["text"]), {"image": pictures})
        assert token_ids == case["prompt_token_ids"]
        covered = [i for s in placeholder_data for i in range(s.start, s.stop)]
        assert covered == [i for i, token in enumerate(token_ids) if token == spec_of(folder).token_id]
        if placeholder_data:
            known, offset = mrope_positions(placeholder_data)
            behind = np.arange(known.shape[1], len(case["positions"][0])) + offset
            positions = np.concatenate([known, np.tile(behind, (3, 1))], axis=1)
            assert positions.tolist() == case["positions"]


def placeholder(start: int, num_rows: int, num_columns: int) -> PlaceholderData:
    empty = np.zeros(0)
    image = Patches(empty, empty, empty, (num_rows, num_columns))
    return PlaceholderData(start, start + num_rows * num_columns, "", image)


def test_positions_depend_on_what_stands_before_alone() -> None:
    images = (placeholder(2, 2, 3), placeholder(8, 1, 4), placeholder(15, 5, 1))
    whole, offset = mrope_positions(images)
    assert whole[:, :12].tolist() == [
        [0, 1, *[2] * 6, *[5] * 4],
        [0, 1, 2, 2, 2, 3, 3, 3, *[5] * 4],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 7, 8],
    ]
    assert (whole[:, 12:15] == [9, 10, 11]).all()
    assert offset == 3 - 6
    for n in (1, 2):
        part, _ = mrope_positions(images[:n])
        assert (part == whole[:, : part.shape[1]]).all()


def test_the_programs_of_images() -> None:
    spec = PatchSpec(0, 16, 2, ())
    sizes = [str(program) for program in plan_images(spec, 300)]
    assert sizes == ["image of 256", "image of 512", "image of 1024", "image of 2048"]
    assert plan_images(spec, 16) == [EncodePatchesProgram(256)]
    assert plan_images(spec, 10**6)[-1] == EncodePatchesProgram(MAX_PATCHES)
    assert len(plan_images(ImageSpec(0, 9, 9), 10**6)) == 2


@pytest.mark.parametrize("merge", [1, 2, 3, 5, 6, 7, 17, 40])
def test_every_image_fits_a_program_of_whole_squares(merge: int) -> None:
    square = merge**2
    for max_model_len in (1, 3, 300, 10**6):
        programs = plan_images(PatchSpec(0, 16, merge, ()), max_model_len)
        used: list[Any] = []
        most = min(MAX_PATCHES // square, max_model_len)
        for num_tokens in {1, 2, 29, 57, 113, most // 2, most - 1, most} & set(range(1, most + 1)):
            image = Patches(np.zeros((num_tokens * square, 0)), *[np.zeros(3)] * 2, (1, num_tokens))

            def execute(program: Any, *args: Any, used: list[Any] = used) -> np.ndarray:
                used.append(program)
                assert len(args[1]) == program.num_patches
                return np.zeros((program.num_patches // square, 1))

            assert len(_encode_patches(execute, [], image)) == num_tokens
        assert set(used) <= set(programs)
        assert all(program.num_patches % square == 0 for program in used)


@pytest.mark.thorough
@pytest.mark.parametrize("folder", [FOLDER, MERGE3], ids=lambda f: f.name)
def test_every_program_of_a_model_can_be_traced(folder: Path) -> None:
    config = Qwen3VLConfig.from_hf(json.loads((folder / "config.json").read_text()))
    float32, context = (
        jnp.dtype("float32"),
        Mock(features=Mock(image_spec=spec_of(folder)), replicated=None, max_model_len=128),
    )
    graph, state = nnx.split(
        nnx.eval_shape(lambda: Qwen3VLForConditionalGeneration(config, dtype=float32, rngs=nnx.Rngs(0)))
    )
    context.weights, treedef = jax.tree.flatten(state)
    context.merge = lambda weights: nnx.merge(graph, jax.tree.unflatten(treedef, weights))
    context.shape = jax.ShapeDtypeStruct
    check_images_can_be_encoded(context.features.image_spec, context)
    for program in plan_images(spec_of(folder), 128):
        vectors: Any = program.trace(context).out_info
        assert isinstance(program, EncodePatchesProgram)
        assert vectors.shape[0] == program.num_patches // spec_of(folder).merge_size ** 2


def test_large_images_are_made_smaller() -> None:
    tokenizer = Tokenizer(str(FOLDER))

    def grid(**processor: int) -> tuple[int, int]:
        reader = ImageReader(ImageSettings(spec_of(FOLDER), 8, 0, processor=processor), tokenizer)
        _, (image,) = reader.read(tokenizer.encode(IMAGE), {"image": drawn(64, 32, 1)})
        return image.data.grid

    assert grid() == (4, 8)  # a token has 8 x 8 pixels
    assert grid(max_pixels=512) == (2, 4)
    assert grid(min_pixels=4096) == (6, 12)  # rounded up
    for limits in ({"max_pixels": 128}, {"min_pixels": 8192}):  # beside 256 to 6400 pixels in the file
        with pytest.raises(
            ValueError, match=r"`min_pixels` must be at most max_pixels, which is \d+, got \d+"
        ):
            grid(**limits)


def test_images_that_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, tokenizer = reader_of(FOLDER)
    token_ids = tokenizer.encode(IMAGE)
    with pytest.raises(ValueError, match="aspect ratio"):
        reader.read(token_ids, {"image": drawn(500, 2, 1)})
    monkeypatch.setattr(image_reader, "MAX_PATCHES", 63)
    with pytest.raises(ValueError, match="the number of patches of an `image` must be at most 63, got 64"):
        reader.read(token_ids, {"image": drawn(32, 32, 1)})
    spec = PatchSpec(spec_of(FOLDER).token_id, 4, 3, ())
    other = ImageReader(ImageSettings(spec, 8, 0), tokenizer)
    with pytest.raises(
        ValueError, match=r"`preprocessor_config\.json: merge_size` must be 3, as in config\.json, got 2"
    ):
        other.read(token_ids, {"image": drawn(32, 32, 1)})


def test_rows_and_columns_are_a_part_of_the_digest() -> None:
    reader, tokenizer = reader_of(FOLDER)
    wide, high = (np.full((h, w, 3), 99, np.uint8) for h, w in ((16, 48), (48, 16)))
    (first,), (second,) = (reader.read(tokenizer.encode(IMAGE), {"image": x})[1] for x in (wide, high))
    assert (first.data.pixels == second.data.pixels).all()
    assert (first.data.grid, second.data.grid) == ((2, 6), (6, 2))
    assert first.digest != second.digest


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    settings: dict[str, Any] = {name: value for name, value in SETTINGS.items() if name != "few_buckets"}
    settings |= {"dtype": "float32", "matmul_backend": "xla", "num_gpu_blocks_override": 60}
    settings |= {"async_scheduling": False, "num_scheduler_steps": 1}
    with LLM(str(FOLDER), executor=make_executor(EngineArgs(str(FOLDER), **settings)), **settings) as llm:
        yield llm


@pytest.fixture
def engine(llm: LLM) -> LLMEngine:
    llm.llm_engine.executor.runner.features.image_encoder.clear()  # pyright: ignore[reportAttributeAccessIssue]
    return reset(llm.llm_engine)


def cached_tokens(engine: LLMEngine) -> list[int]:
    """Reads images under one text, those of equal bytes and one of others, the first one twice.

    Returns what was cached of each prompt.
    """
    text = f"This text fills two blocks of it.{IMAGE}What is it?"
    pictures = [np.full((h, w, 3), 99, np.uint8) for h, w in ((24, 80), (80, 24))] + [drawn(80, 24, 1)]
    prompts = [prompt(text, picture) for picture in (*pictures, pictures[0])]
    outputs = [run(engine, [each])[0] for each in prompts]
    set_prefix_caching(engine, False)
    alone: list[RequestOutput] = []
    for each in prompts[:3]:
        engine.executor.runner.features.image_encoder.clear()  # pyright: ignore[reportAttributeAccessIssue]
        alone += run(engine, [each])
    set_prefix_caching(engine, True)
    logprobs = [output.outputs[0].cumulative_logprob or 0.0 for output in alone]
    assert min(abs(a - b) for i, a in enumerate(logprobs) for b in logprobs[:i]) > 1e-3, "nothing changes"
    for output, expected in zip(outputs, (*alone, alone[0]), strict=True):
        assert output.outputs[0].token_ids == expected.outputs[0].token_ids
        found, right = (x.outputs[0].cumulative_logprob or 0.0 for x in (output, expected))
        assert abs(found - right) < 24 * TOLERANCE
    return [output.num_cached_tokens for output in outputs]


@pytest.mark.slow
def test_only_equal_images_share_blocks(engine: LLMEngine) -> None:
    # The image begins behind 34 tokens; 64 of 76 fill blocks in front of the last token.
    assert cached_tokens(engine) == [0, 32, 32, 64]


def look_for_faults(engine: LLMEngine) -> None:
    cached_tokens(engine)
    cases = cases_of(FOLDER)
    assert_right(run(engine, prompts_of(cases)), cases)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["placeholders", "bytes", "positions"])
def test_wrong_sharing_and_wrong_positions_are_noticed(
    engine: LLMEngine, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    if fault == "placeholders":
        monkeypatch.setattr(PrefixCache, "_salt", lambda self, seq, i, salt: salt)
    elif fault == "bytes":
        hashed = image_reader.hashlib.sha256
        monkeypatch.setattr(image_reader.hashlib, "sha256", lambda data: hashed(data.partition(b")")[2]))
    else:  # rows and columns that later blocks do not see
        add = FeatureRows.add

        def add_without_positions(self: FeatureRows, batch_slot: int, new: NewSequence) -> None:
            add(self, batch_slot, new)
            self.mrope_stops[batch_slot] = self.mrope_offsets[batch_slot] = 0

        monkeypatch.setattr(FeatureRows, "add", add_without_positions)
    with pytest.raises(AssertionError):
        look_for_faults(engine)


@pytest.mark.slow
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(n=3, temperature=1, seed=1, max_tokens=12, logprobs=1),
        BeamSearchParams(beam_width=3, max_tokens=12),
    ],
    ids=["samples", "beams"],
)
def test_samples_and_beams_have_the_positions_of_one_text(engine: LLMEngine, params: Any) -> None:
    """Their log-probabilities are those of the same tokens as the end of a prompt."""
    tokenizer = engine.tokenizer
    assert tokenizer is not None
    picture, ids = drawn(60, 50, 3), tokenizer.encode(f"a{IMAGE}b")
    asked = {"prompt_token_ids": ids, "multi_modal_data": {"image": picture}}
    plain = prompt("plain text beside it")
    output, _ = run(engine, [asked, plain], params)
    assert len(output.outputs) == 3
    scored = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    for answer in output.outputs:
        token_ids = list(answer.token_ids)
        whole = {"prompt_token_ids": ids + token_ids, "multi_modal_data": {"image": picture}}
        (read,) = run(engine, [whole], scored)
        rows = (read.prompt_logprobs or [])[-len(token_ids) :]
        total = sum((row or {})[token].logprob for row, token in zip(rows, token_ids, strict=True))
        assert abs(total - (answer.cumulative_logprob or 0.0)) < len(token_ids) * TOLERANCE


@pytest.mark.slow
def test_chat(llm: LLM, engine: LLMEngine) -> None:
    parts = [{"type": "image", "image": drawn(40, 40, 5)}, {"type": "text", "text": "What is <|image_pad|>?"}]
    (output,) = llm.chat([{"role": "user", "content": parts}], SHORT, use_tqdm=False)
    tokenizer = engine.tokenizer
    assert tokenizer is not None
    text = tokenizer.decode(output.prompt_token_ids, skip_special_tokens=False)
    image = "<|vision_start|>" + "<|image_pad|>" * 25 + "<|vision_end|>"
    # What a user types is text, and no place of an image.
    assert text == f"<|im_start|>user\n{image}What is <|image_pad|>?<|im_end|>\n<|im_start|>assistant\n"
    assert output.prompt_token_ids.count(spec_of(FOLDER).token_id) == 25


@pytest.mark.slow
def test_vectors_of_a_text_and_new_weights(engine: LLMEngine) -> None:
    each = [prompt(f"a{IMAGE}", drawn(20, 20, 1))]
    before = run(engine, each)
    engine.update_weights(FOLDER)
    assert run(engine, each)[0].outputs[0].token_ids == before[0].outputs[0].token_ids
    cases = [case for case in cases_of(FOLDER) if not case["pictures"]]
    with make_engine(FOLDER, **SETTINGS, enable_prompt_embeds=True) as other:
        table = np.asarray(
            other.executor.runner.served.model.merge(  # pyright: ignore
                other.executor.runner.served.arrays  # pyright: ignore
            ).embed_tokens.embedding[...]
        )
        given = [{"prompt_embeds": table[case["prompt_token_ids"]]} for case in cases]
        outputs = run(other, [*given, *each])
    assert [list(o.outputs[0].token_ids) for o in outputs[:-1]] == [case["token_ids"] for case in cases]
    assert outputs[-1].outputs[0].token_ids == before[0].outputs[0].token_ids


@pytest.mark.slow
def test_a_state_with_weights_forgets_the_vectors_of_others(engine: LLMEngine) -> None:
    each = [prompt(f"a{IMAGE}", drawn(20, 20, 1))]
    (before,) = run(engine, each)
    state = reset(engine).state(weights=True)
    runner: Any = engine.executor.runner  # pyright: ignore[reportAttributeAccessIssue]
    weights, kept = runner.arrays["weights"], list(runner.arrays["weights"])
    runner.features.image_encoder.clear()
    try:
        weights[:] = [1.5 * weight for weight in weights]
        run(engine, each)
        engine.load_state(state)
        (after,) = run(engine, each)
    finally:
        weights[:] = kept
    found, right = (output.outputs[0].cumulative_logprob or 0.0 for output in (after, before))
    assert abs(found - right) < 24 * TOLERANCE


@pytest.mark.parametrize(
    "settings",
    [
        {"enable_lora": True},
        {"pipeline_parallel_size": 2},
        {"mm_processor_kwargs": {"longest_edge": 64}},
        {"mm_processor_kwargs": {"max_pixels": 0}},
        pytest.param(
            {"distributed_executor_backend": "mp", "tensor_parallel_size": 2}, marks=pytest.mark.slow
        ),
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_what_can_not_be_had(monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]) -> None:
    monkeypatch.setattr(weights, "load_stages", None)  # none are read
    with pytest.raises(ValueError, match=rf"`{next(iter(settings))}(\['max_pixels'\])?` must be .*, got "):
        LLMEngine(EngineArgs(str(FOLDER), **settings))


def test_arguments_of_another_processor() -> None:
    args = EngineArgs(str(FOLDER), mm_processor_kwargs={"size": {"longest_edge": 64}})
    with pytest.raises(
        ValueError, match="must be a dict with some of the keys min_pixels, max_pixels for this model"
    ):
        ImageSettings.of(args, spec_of(FOLDER))
    with pytest.raises(
        ValueError, match=r"`mm_processor_kwargs` must be None because Llama\w* does not accept im"
    ):
        LLMEngine(EngineArgs("pagelet", mm_processor_kwargs={"max_pixels": 512}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"image_token_id": 10**6}, "`image_token_id` must be .*got 1000000"),
        ({"text_config": {"model_type": "qwen3"}}, "text_config.model_type` must be .*got 'qwen3'"),
        ({"text_config": {"hidden_size": 32}}, "out_hidden_size` must be .*got 24"),
        (
            {"text_config": {"rope_scaling": {"mrope_section": [3, 5, 5]}}},
            "must be a list of three integers of at least 0 with the sum 12, half of head_dim",
        ),
        (
            {"text_config": {"rope_scaling": {"mrope_interleaved": False}}},
            "mrope_interleaved` must be .*got False",
        ),
        ({"vision_config": {"deepstack_visual_indexes": [0, 3]}}, "deepstack_visual_indexes"),
        ({"vision_config": {"deepstack_visual_indexes": [1, 0]}}, "deepstack_visual_indexes"),
        ({"vision_config": {"num_heads": 3}}, "vision_config.hidden_size` must be a multiple of .*, got 8"),
        ({"vision_config": {"in_channels": 1}}, "vision_config.in_channels` must be 3, got 1"),
    ],
)
def test_wrong_configs(change: dict[str, Any], message: str) -> None:
    config = json.loads((FOLDER / "config.json").read_text())
    for name, value in change.items():
        config[name] = config[name] | value if isinstance(value, dict) else value
    with pytest.raises(ValueError, match=message.replace("[", r"\[")):
        Qwen3VLConfig.from_hf(config)


def test_the_two_forms_of_a_config_and_its_defaults() -> None:
    own, published = (
        Qwen3VLConfig.from_hf(json.loads((folder / "config.json").read_text())) for folder in FOLDERS[::-1]
    )
    assert own.axes == [0, 1, 2, 0, 1, 2, 0, 0]
    assert published.axes == [0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2]
    config = {"architectures": ["Qwen3VLForConditionalGeneration"], "text_config": {}, "vision_config": {}}
    sizes = {"hidden_size": 3584, "intermediate_size": 8, "num_hidden_layers": 4, "num_attention_heads": 32}
    sizes |= {"vocab_size": 151936, "max_position_embeddings": 128000}
    default = Qwen3VLConfig.from_hf(config | {"text_config": sizes})
    assert default.head_dim == 128
    assert default.sections == (24, 20, 20)
    assert default.rope.frequencies[1] == pytest.approx(500000.0 ** (-2 / 128))
    assert default.axes[57:] == [0, 1, 2, 0, 0, 0, 0]
    assert default.vision.deepstack_visual_indexes == (8, 16, 24)
    assert len(default.vision.rope.frequencies) == 36
