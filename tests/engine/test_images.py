"""Models that read images, beside transformers; what is shared between requests, and what is refused."""

import base64
import dataclasses
import functools
import io
import json
import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers.pictures import drawn
from helpers.real_model import (
    TOLERANCE,
    drain,
    make_engine,
    make_executor,
    reschedule,
    reset,
    set_prefix_caching,
)
from PIL import Image

from jax_paged import LLM, BeamSearchParams, EngineArgs, LLMEngine, RequestOutput, SamplingParams
from jax_paged.config.multimodal import ImageSettings
from jax_paged.core.kv_cache.prefix_cache import PrefixCache
from jax_paged.engine.features.batch_invariance import invariance
from jax_paged.engine.features.multimodal import image_reader
from jax_paged.engine.features.multimodal.image_messages import Conversation, extract_images
from jax_paged.engine.features.multimodal.image_reader import (
    ImageReader,
    as_image,
    image_of_url,
    is_data_url,
    num_jpeg_scans,
)
from jax_paged.engine.replicas.prior_outputs import PriorOutput
from jax_paged.engine.text.tokenizer import Tokenizer
from jax_paged.models.families.idefics3 import Idefics3Config
from jax_paged.models.hf_format import ConfigReader
from jax_paged.models.image_inputs import ImageSpec
from jax_paged.worker.features.multimodal.image_encoder import EncodeImagesProgram, ImageEncoder

FIXTURES = Path(__file__).parents[1] / "models" / "image_fixtures"
FOLDER = FIXTURES / "smolvlm_tied"
SETTINGS: dict[str, Any] = {
    "few_buckets": True,
    "max_num_batched_tokens": 64,
    "max_num_seqs": 8,
    "num_gpu_blocks_override": 30,
}
GREEDY = SamplingParams(temperature=0, max_tokens=24, logprobs=1)
SHORT = SamplingParams(temperature=0, max_tokens=4)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    settings = {name: value for name, value in SETTINGS.items() if name != "few_buckets"}
    settings |= {
        "dtype": "float32",
        "matmul_backend": "xla",
        "async_scheduling": False,
        "num_scheduler_steps": 1,
    }
    with LLM(str(FOLDER), executor=make_executor(EngineArgs(str(FOLDER), **settings)), **settings) as llm:
        yield llm


@pytest.fixture
def engine(llm: LLM) -> LLMEngine:
    encoder_of(llm.llm_engine).clear()
    return reset(llm.llm_engine)


def encoder_of(engine: LLMEngine) -> ImageEncoder:
    return engine.executor.runner.features.image_encoder  # pyright: ignore[reportAttributeAccessIssue]


def prompt(text: str, *pictures: Any) -> dict[str, Any]:
    return {"prompt": text, "multi_modal_data": {"image": list(pictures)}}


def run(engine: LLMEngine, prompts: list[Any], params: Any = GREEDY) -> list[RequestOutput]:
    for i, each in enumerate(prompts):
        engine.add_request(str(i), engine.check_request(each, params))
    outputs = drain(engine)
    return [outputs[str(i)] for i in range(len(prompts))]


@pytest.fixture
def num_encoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tiles each call of the encoder was given."""
    counts: list[int] = []
    encoded = ImageEncoder._encoded

    def count(self: ImageEncoder, run: Any, weights: Any, tiles: list[Any]) -> list[np.ndarray]:
        counts.append(len(tiles))
        return encoded(self, run, weights, tiles)

    monkeypatch.setattr(ImageEncoder, "_encoded", count)
    return counts


@pytest.mark.thorough
@pytest.mark.parametrize(
    "folder", [FOLDER, pytest.param(FIXTURES / "idefics3", marks=pytest.mark.slow)], ids=lambda f: f.name
)
def test_equals_transformers(folder: Path) -> None:
    """In chunks, beside plain text, preempted, from the cache, and where no vector is kept for others."""
    cases = json.loads((folder / "reference.json").read_text())["cases"]
    prompts = [prompt(case["text"], *(drawn(*p) for p in case["pictures"])) for case in cases]
    with make_engine(folder, **SETTINGS) as engine:
        batched = run(engine, prompts)
        engine.scheduler.max_num_batched_tokens = 24
        encoder_of(engine).clear()
        encoder_of(engine)._max_bytes = 0
        chunked = run(engine, prompts[::-1])[::-1]
    for outputs in (batched, chunked):
        for output, case in zip(outputs, cases, strict=True):
            (answer,) = output.outputs
            assert output.prompt_token_ids == case["prompt_token_ids"]
            assert list(answer.token_ids) == case["token_ids"]
            rows = zip(answer.logprobs or [], answer.token_ids, case["logprobs"], strict=True)
            assert all(abs(row[token].logprob - value) < TOLERANCE for row, token, value in rows)
    if folder == FOLDER:  # the other one's prompts are so long that they hardly run together
        assert sum(output.metrics.num_preemptions for output in batched + chunked) > 0
        assert sum(output.num_cached_tokens for output in chunked) > 0


def test_smaller_images_have_fewer_tiles() -> None:
    tokenizer, config = Tokenizer(str(FOLDER)), json.loads((FOLDER / "config.json").read_text())
    vision, picture = Idefics3Config.from_hf(config), drawn(70, 70, 1)
    side = vision.vision.num_patches_per_side // vision.scale_factor
    spec = ImageSpec(vision.image_token_id, side**2, vision.vision.image_size)
    for edge, num_tiles in ((76, 5), (38, 1)):  # four and the whole, or the whole alone
        given = {"size": {"longest_edge": edge}}
        settings = ImageSettings.of(EngineArgs(str(FOLDER), mm_processor_kwargs=given), spec)
        _, placeholder_data = ImageReader(settings, tokenizer).read([spec.token_id], {"image": picture})
        assert len(placeholder_data) == num_tiles
    for bad in ({"size": 64}, {"size": {"longest_edge": 0}}, [], {"do_resize": False}):
        with pytest.raises(ValueError, match=r"`mm_processor_kwargs.*` must be .*got"):
            EngineArgs(str(FOLDER), mm_processor_kwargs=bad)


def test_a_model_without_images_refuses_one_in_every_form() -> None:
    without: Any = SimpleNamespace(images=None)
    content = [{"type": "text", "text": "a"}, {"type": "image"}]
    with pytest.raises(
        ValueError,
        match=r"`messages\[1\].content` must be text because the model does not support images, got",
    ):
        extract_images([{"role": "user", "content": "a"}, {"role": "user", "content": content}], without)
    messages = [{"role": "user", "content": content[:1]}]
    assert extract_images(messages, without).messages is messages


def test_photos_are_turned_upright() -> None:
    """Cameras write the rows of their sensors, and which side is up beside them."""
    upright = Image.fromarray(np.repeat(np.arange(0, 240, 10, dtype=np.uint8), 3).reshape(6, 4, 3))
    file = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned to the right
    upright.transpose(Image.Transpose.ROTATE_90).save(file, "PNG", exif=exif)
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    np.testing.assert_array_equal(np.asarray(as_image(image_of_url(url))), np.asarray(upright))
    file = io.BytesIO()
    upright.save(file, "PNG", exif=b"Exif\0\0no such data")
    file = Image.open(io.BytesIO(file.getvalue()))
    np.testing.assert_array_equal(np.asarray(as_image(file)), np.asarray(upright))


@pytest.mark.parametrize("folder", [FOLDER, FIXTURES / "idefics3"], ids=lambda f: f.name)
def test_placeholders_equal_transformers(folder: Path) -> None:
    config = Idefics3Config.from_hf(json.loads((folder / "config.json").read_text()))
    side = config.vision.num_patches_per_side // config.scale_factor
    spec = ImageSpec(config.image_token_id, side**2, config.vision.image_size)
    tokenizer = Tokenizer(str(folder))
    reader = ImageReader(ImageSettings(spec, 8, 0), tokenizer)
    for case in json.loads((folder / "reference.json").read_text())["cases"]:
        pictures = [drawn(*p) for p in case["pictures"]]
        token_ids, placeholder_data = reader.read(tokenizer.encode(case["text"]), {"image": pictures})
        assert token_ids == case["prompt_token_ids"]
        covered = [i for s in placeholder_data for i in range(s.start, s.stop)]
        assert covered == [i for i, token in enumerate(token_ids) if token == spec.token_id]


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [{"tensor_parallel_size": 2}, {"matmul_backend": "auto"}, {"speculative_config": {"method": "ngram"}}],
)
def test_on_two_devices_packed_and_with_drafts(settings: dict[str, Any]) -> None:
    cases = json.loads((FOLDER / "reference.json").read_text())["cases"]
    prompts = [prompt(case["text"], *(drawn(*p) for p in case["pictures"])) for case in cases]
    with make_engine(FOLDER, **SETTINGS, **settings) as engine:
        outputs = run(engine, prompts)
    assert [list(output.outputs[0].token_ids) for output in outputs] == [c["token_ids"] for c in cases]


def cached_tokens(engine: LLMEngine) -> list[int]:
    """Reads two images under one text, the first of them twice; returns what was cached of each prompt."""
    text = "This text is longer than a block of the pool.<image>"
    first, second = drawn(38, 38, 1), drawn(38, 38, 2)
    prompts = [prompt(text, picture) for picture in (first, second, first)]
    outputs = [run(engine, [each])[0] for each in prompts]
    set_prefix_caching(engine, False)
    alone = [run(engine, [each])[0] for each in prompts[:2]]
    set_prefix_caching(engine, True)
    assert alone[0].outputs[0].token_ids != alone[1].outputs[0].token_ids, "the image changes nothing"
    for output, expected in zip(outputs, (alone[0], alone[1], alone[0]), strict=True):
        assert output.outputs[0].token_ids == expected.outputs[0].token_ids
    return [output.num_cached_tokens for output in outputs]


def test_only_equal_images_share_blocks(engine: LLMEngine) -> None:
    # 32 of 45 characters fill blocks, and 96 of 106 tokens.
    assert cached_tokens(engine) == [0, 32, 96]


def test_a_cache_that_compares_placeholders_alone_is_noticed(
    engine: LLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PrefixCache, "_salt", lambda self, seq, i, salt: salt)
    with pytest.raises(AssertionError):
        cached_tokens(engine)


def test_an_image_is_encoded_once(engine: LLMEngine, num_encoded: list[int]) -> None:
    set_prefix_caching(engine, False)
    picture = drawn(60, 50, 3)
    three = SamplingParams(n=3, temperature=1, seed=1, max_tokens=6)
    several = run(engine, [prompt("a<image>", picture), prompt("<image>b", picture)], three)
    assert all(len(output.outputs) == 3 for output in several)
    beams = BeamSearchParams(beam_width=3, max_tokens=6)
    (found,) = run(engine, [prompt("a<image>", picture)], beams)
    run(engine, [prompt("<image><image>", picture, picture)])
    assert sum(num_encoded) == 5  # four tiles, and the whole
    assert len(found.outputs) == 3
    # An image whose keys and values are cached is not encoded at all.
    set_prefix_caching(engine, True)
    text = "<image>" + "and a text that fills blocks behind it"
    run(engine, [prompt(text, picture)])
    encoder_of(engine).clear()
    run(engine, [prompt(text, picture)])
    assert sum(num_encoded) == 5


def test_the_vectors_used_last_are_kept(engine: LLMEngine, num_encoded: list[int]) -> None:
    encoder, pictures = encoder_of(engine), [drawn(20, 20, seed) for seed in range(3)]
    set_prefix_caching(engine, False)
    run(engine, [prompt("<image>", pictures[0])], SHORT)
    kept, encoder._max_bytes = encoder._max_bytes, 2 * encoder._num_bytes
    try:
        for i in (1, 0, 2, 0, 1):
            run(engine, [prompt("<image>", pictures[i])], SHORT)
    finally:
        encoder._max_bytes = kept
    # A small picture is enlarged, and all have as many tiles: 0 was used after 1 when 2 came.
    assert sum(num > 0 for num in num_encoded) == 4
    assert encoder._num_bytes == sum(x.nbytes for x in encoder._cache.values())


def test_an_image_that_can_not_be_encoded_ends_its_own_request(
    engine: LLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other requests of the step go on, the engine too, and nothing of the failure is kept."""
    bad, good = drawn(20, 20, 1), drawn(20, 20, 2)
    text = "This text is longer than a block of the pool.<image>"
    prompts = [prompt(text, bad), prompt(text, good), "plain text"]
    runner: Any = engine.executor.runner  # pyright: ignore[reportAttributeAccessIssue]
    reader: Any = engine.input_processor._prompts._read_feature_prompt.args[1]  # pyright: ignore
    pixels = reader.read([spec_of_engine(engine).token_id], {"image": bad})[1][0].data.pixels
    execute, images = runner._run, []

    def fail(program: Any, *args: Any) -> Any:
        if isinstance(program, EncodeImagesProgram):
            images.append(program)
            if any(np.array_equal(tile, pixels) for tile in args[1]):
                raise RuntimeError("no memory")
        return execute(program, *args)

    expected = run(engine, prompts, SHORT)
    for is_async in (False, True):
        encoder_of(engine).clear()
        set_prefix_caching(engine, True)
        with monkeypatch.context() as patch:
            patch.setattr(runner, "_run", fail)
            patch.setattr(engine._core, "max_in_flight", 1 + is_async)
            failed, *others = run(engine, prompts, SHORT)
        (completion,) = failed.outputs
        assert (completion.finish_reason, list(completion.token_ids)) == ("abort", [])
        assert completion.stop_reason == "an image could not be encoded: no memory"
        for output, right in zip(others, expected[1:], strict=True):
            assert output.outputs[0].token_ids == right.outputs[0].token_ids
        again = run(engine, prompts, SHORT)
        assert [x.outputs[0].token_ids for x in again] == [x.outputs[0].token_ids for x in expected]
    assert images


def spec_of_engine(engine: LLMEngine) -> Any:
    settings = engine.config.images
    assert settings is not None
    return settings.spec


def test_new_weights_encode_anew(engine: LLMEngine, num_encoded: list[int]) -> None:
    each = [prompt("<image>", drawn(20, 20, 1))]
    before = run(engine, each)
    engine.update_weights(FOLDER)
    assert run(engine, each)[0].outputs[0].token_ids == before[0].outputs[0].token_ids
    assert len(num_encoded) == 2


# A bias that makes a model draw placeholders of images, and text between them.
PLACEHOLDERS = {260: 8.0}


def test_a_model_may_draw_placeholders(engine: LLMEngine) -> None:
    """They are tokens like any other: preempted, from the cache, in a state, and continued elsewhere."""
    params = SamplingParams(temperature=1, seed=4, n=2, max_tokens=24, logit_bias=PLACEHOLDERS, logprobs=0)
    prompts = [
        prompt("a<image>", drawn(20, 20, 1)),
        "plain text",
        prompt("<image>b<image>", *[drawn(9, 9, 2)] * 2),
    ]
    alone = [run(engine, [each], params)[0] for each in prompts]
    tokens = [[list(x.token_ids) for x in output.outputs] for output in alone]
    assert all(1 < row.count(260) < 24 for rows in tokens for row in rows)
    reschedule(engine, num_blocks=20)  # too few for all
    together = run(engine, prompts, params)
    assert sum(output.metrics.num_preemptions for output in together) > 0
    assert [[list(x.token_ids) for x in output.outputs] for output in together] == tokens
    reschedule(engine)
    for each, output in zip(prompts, alone, strict=True):
        begun = tuple(PriorOutput(x.token_ids[:9], x.logprobs[:9]) for x in output.outputs if x.logprobs)
        checked = dataclasses.replace(engine.check_request(each, params), prior_outputs=begun)
        engine.add_request("a", checked)
        last = drain(engine)["a"]
        assert [list(x.token_ids) for x in last.outputs] == [list(x.token_ids) for x in output.outputs]
    engine.add_request("a", engine.check_request(prompts[1], params))
    for _ in range(5):
        engine.step()
    state = engine.state()
    reset(engine).load_state(state)
    assert [list(x.token_ids) for x in drain(engine)["a"].outputs] == tokens[1]


@pytest.mark.thorough
@pytest.mark.parametrize("draws", [False, True], ids=["in prompts", "in outputs"])
def test_the_check_of_batch_invariance_has_no_images(
    engine: LLMEngine, monkeypatch: pytest.MonkeyPatch, draws: bool
) -> None:
    """Its random prompts hold no placeholders, though the model may draw some."""

    class Placeholders(random.Random):
        def choices(self, population: Any, *_: Any, k: int = 1, **__: Any) -> list[Any]:
            return [next(token_id for token_id in population if token_id >= 260)] * k

    if draws:
        params = functools.partial(SamplingParams, logit_bias=PLACEHOLDERS)
        monkeypatch.setattr(invariance, "SamplingParams", params)
    else:
        monkeypatch.setattr(invariance.random, "Random", Placeholders)
    problems = ""
    try:
        invariance.check_invariance(engine._core, engine.input_processor)
    except ValueError as error:
        problems = str(error)
    assert not problems or "`batch_invariant` must be False" in problems  # the engine was not made for it
    assert not engine.has_unfinished_requests()


def url_of(picture: np.ndarray | Image.Image, kind: str = "PNG") -> str:
    image = Image.fromarray(picture) if isinstance(picture, np.ndarray) else picture
    out = io.BytesIO()
    image.save(out, kind)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(out.getvalue()).decode()}"


@pytest.mark.thorough
def test_chat(llm: LLM, engine: LLMEngine) -> None:
    picture = drawn(40, 40, 5)
    words = {"type": "text", "text": "What is <image>?"}
    forms = (
        {"type": "image_url", "image_url": {"url": url_of(picture), "detail": "auto"}},
        {"type": "image_pil", "image_pil": Image.fromarray(picture)},
        {"type": "image", "image": picture},
    )
    plain = [{"role": "user", "content": "Hi"}]
    chats = [[{"role": "user", "content": [form, words]}] for form in forms]
    *outputs, hello = llm.chat([*chats, plain], SHORT, use_tqdm=False)
    assert [o.prompt_token_ids for o in outputs] == [outputs[0].prompt_token_ids] * 3
    assert [o.outputs[0].token_ids for o in outputs] == [outputs[0].outputs[0].token_ids] * 3
    tokenizer = engine.tokenizer
    assert tokenizer is not None
    text = tokenizer.decode(outputs[0].prompt_token_ids, skip_special_tokens=False)
    assert text.startswith("<|im_start|>User:<fake_token_around_image><row_1_col_1>" + "<image>" * 9)
    # What a user types is text, and no place of an image.
    assert text.endswith("What is <image>?<end_of_utterance>\nAssistant:")
    assert outputs[0].prompt_token_ids.count(260) == 45
    shown = tokenizer.decode(hello.prompt_token_ids, skip_special_tokens=False)
    assert shown == "<|im_start|>User: Hi<end_of_utterance>\nAssistant:"
    form = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/a.png"}}
    with pytest.raises(
        ValueError,
        match=r"`image_url.url` must be a data:image/...;base64 URL because allowed_media_domains",
    ):
        llm.chat([{"role": "user", "content": [form]}], use_tqdm=False)


@pytest.mark.parametrize(
    ("given", "params", "message"),
    [
        (
            prompt("<image>"),
            GREEDY,
            "the number of images in `multi_modal_data` must be 1, the number of image placeholders.*got 0",
        ),
        (
            {"prompt": "<image>"},
            GREEDY,
            "the number of images in `multi_modal_data` must be 1, the number of image placeholders.*got 0",
        ),
        (
            prompt("a", drawn(9, 9, 1)),
            GREEDY,
            "the number of images in `multi_modal_data` must be 0, .*got 1",
        ),
        (
            prompt("<image>" * 9, *[drawn(9, 9, 1)] * 9),
            GREEDY,
            "the number of images in `multi_modal_data` must be .*got 9",
        ),
        (prompt("<image>", "a.png"), GREEDY, "`image` must be a Pillow image or an array of uint8"),
        (prompt("<image>", drawn(9, 9, 1) / 255), GREEDY, "float64"),
        (
            prompt("<image>", drawn(9, 9, 1)[:0]),
            GREEDY,
            r"`image` must be a non-empty array of uint8 \[height, width, 3\], got uint8 \[0, 9, 3\]",
        ),
        (
            {"prompt": "<image>", "multi_modal_data": {"video": [1]}},
            GREEDY,
            "`multi_modal_data` must be a dict",
        ),
        (
            {"prompt": "<image>", "multi_modal_data": [1]},
            GREEDY,
            '`multi_modal_data` must be a dict .*"image".* got .1',
        ),
        (
            prompt("<image>", drawn(9, 9, 1)),
            SamplingParams(truncate_prompt_tokens=5),
            "truncate_prompt_tokens",
        ),
        ({"prompt_embeds": np.ones((3, 32), np.float32)}, GREEDY, "without enable_prompt_embeds"),
    ],
)
def test_bad_prompts(engine: LLMEngine, given: Any, params: SamplingParams, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        engine.check_request(given, params)


def test_bad_files(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = url_of(drawn(64, 64, 1))
    head, data = whole.split(",")
    cut = base64.b64encode(base64.b64decode(data)[:-400]).decode()
    for url, message in (
        (
            "file:///etc/passwd",
            "`image_url.url` must be a data:image/...;base64 URL because allowed_media_domains",
        ),
        (
            "https://example.com/a.png",
            "`image_url.url` must be a data:image/...;base64 URL because allowed_media_domains",
        ),
        (
            f"data:text/plain;base64,{data}",
            "`image_url.url` must be a data:image/...;base64 URL because allowed_media_domains",
        ),
        (f"{head},!", "`image_url.url` must be base64 .*got 'data:image/png;base64,!'"),
        (
            f"{head},{base64.b64encode(b'hello').decode()}",
            "`image_url.url` must be the URL of an image in one of the formats PNG",
        ),
        (
            url_of(drawn(9, 9, 1), "TIFF"),
            "`image_url.url` must be the URL of an image in one of the formats PNG",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            image_of_url(url)
    with pytest.raises(ValueError, match="an image can't be decoded"):
        as_image(image_of_url(f"{head},{cut}"))
    monkeypatch.setattr(image_reader, "MAX_PIXELS", 64 * 64 - 1)
    with pytest.raises(
        ValueError, match=r"the number of pixels of an `image` must be an integer in \[1, 4095\], got 4096"
    ):
        as_image(image_of_url(whole))


def _rgb(image: Image.Image) -> list[Any]:
    return np.asarray(as_image(image))[0].tolist()


def _of_mode(mode: str, *pixels: Any, **info: Any) -> Image.Image:
    image = Image.new(mode, (len(pixels), 1))
    for x, pixel in enumerate(pixels):
        image.putpixel((x, 0), pixel)
    image.info |= info
    return image


def _of_palette(mode: str, **info: Any) -> Image.Image:
    image = _of_mode(mode, *([0, 1] if mode == "P" else [(0, 255), (1, 0)]), **info)
    image.putpalette([10, 20, 30, 40, 50, 60])
    return image


def _of_uint16(mode: str, **info: Any) -> Image.Image:
    values = np.array([0, 128, 129, 32768, 65535], ">u2" if mode == "I;16B" else "<u2")
    image = Image.frombytes(mode, (5, 1), values.tobytes())
    image.info |= info
    return image


BLACK, WHITE, RED = [0] * 3, [255] * 3, [255, 0, 0]
# What transformers makes of an image of each of Pillow's modes, unless a comment says otherwise.
MODES: dict[str, tuple[Image.Image, list[Any]]] = {
    "1": (_of_mode("1", 0, 255), [BLACK, WHITE]),
    "L": (_of_mode("L", 0, 77), [BLACK, [77] * 3]),
    "L with a transparent gray": (_of_mode("L", 0, 77, transparency=77), [BLACK, WHITE]),
    "LA": (_of_mode("LA", (50, 255), (50, 0)), [[50] * 3, WHITE]),
    "La": (_of_mode("La", (50, 255), (0, 0)), [[50] * 3, WHITE]),  # not converted there
    "P": (_of_palette("P"), [[10, 20, 30], [40, 50, 60]]),
    "P with a transparent color": (_of_palette("P", transparency=1), [[10, 20, 30], WHITE]),
    "P with alphas": (_of_palette("P", transparency=b"\xff\0"), [[10, 20, 30], WHITE]),
    "PA": (_of_palette("PA"), [[10, 20, 30], WHITE]),
    # Cut off at 255 there.
    **{
        mode: (_of_uint16(mode), [BLACK, BLACK, [1] * 3, [128] * 3, WHITE])
        for mode in ("I;16", "I;16L", "I;16B", "I;16N")
    },
    "I;16 with a transparent gray": (
        _of_uint16("I;16", transparency=129),
        [BLACK] * 2 + [WHITE, [128] * 3, WHITE],
    ),
    "I of 16 bits": (_of_mode("I", -1, 0, 257, 65535, 2**31 - 1), [BLACK, BLACK, [1] * 3, WHITE, WHITE]),
    "I of 8 bits": (_of_mode("I", -9, 0, 77, 260), [BLACK, BLACK, [77] * 3, WHITE]),
    "F": (_of_mode("F", -1.0, 77.0, 300.0), [BLACK, [77] * 3, WHITE]),
    "RGB": (_of_mode("RGB", (255, 0, 0), (1, 2, 3)), [RED, [1, 2, 3]]),
    "RGB with a transparent color": (
        _of_mode("RGB", (255, 0, 0), (1, 2, 3), transparency=(1, 2, 3)),
        [RED, WHITE],
    ),
    "RGBA": (_of_mode("RGBA", (255, 0, 0, 255), (1, 2, 3, 0)), [RED, WHITE]),
    "RGBa": (_of_mode("RGBa", (255, 0, 0, 255), (0, 0, 0, 0)), [RED, WHITE]),
    "RGBX": (_of_mode("RGBX", (255, 0, 0, 0), (1, 2, 3, 0)), [RED, [1, 2, 3]]),
    "CMYK": (_of_mode("CMYK", (0, 255, 255, 0), (0, 0, 0, 255)), [RED, BLACK]),
    "YCbCr": (_of_mode("YCbCr", (0, 128, 128), (255, 128, 128)), [BLACK, WHITE]),
    "HSV": (_of_mode("HSV", (0, 255, 255), (0, 0, 0)), [RED, BLACK]),
}


@pytest.mark.parametrize("name", MODES)
def test_every_mode_becomes_rgb(name: str) -> None:
    image, expected = MODES[name]
    assert _rgb(image) == expected


def test_lab_images_keep_their_colors() -> None:
    black, white = _rgb(_of_mode("LAB", (0, 128, 128), (255, 128, 128)))
    assert max(black) < 10
    assert min(white) > 245


def test_the_modes_of_files() -> None:
    gray = np.array([[0, 128, 129, 32768, 65535]], np.uint16)
    for transparency, last in ((None, BLACK), (0, WHITE)):
        out, more = io.BytesIO(), {} if transparency is None else {"transparency": transparency}
        Image.fromarray(gray).save(out, "PNG", **more)
        url = f"data:image/png;base64,{base64.b64encode(out.getvalue()).decode()}"
        assert _rgb(image_of_url(url)) == [last, BLACK, [1] * 3, [128] * 3, WHITE]
    for kind, image in (("JPEG", MODES["CMYK"][0]), ("GIF", MODES["P"][0]), ("BMP", MODES["1"][0])):
        as_image(image_of_url(url_of(image, kind)))


def test_data_urls_as_browsers_read_them() -> None:
    whole = url_of(drawn(10, 9, 1))
    head, data = whole.split(",")
    assert data.endswith("=")
    expected = np.asarray(as_image(image_of_url(whole)))
    escaped = data.replace("+", "%2B").replace("/", "%2F").replace("=", "%3D")
    for url in (
        whole.replace("data:", "DATA:"),
        whole.replace("image/png", "Image/PNG"),
        whole.replace(";base64", ";BASE64"),
        whole.replace(";base64", ";charset=utf-8; base64"),
        f"{head},{data.rstrip('=')}",
        f" {head},{data[:40]}\n{data[40:]}\r\n",
        f"{head},{escaped}",
    ):
        assert is_data_url(url)
        assert not Conversation([], [url]).has_remote_images
        assert np.array_equal(np.asarray(as_image(image_of_url(url))), expected), url[:40]
    for bad in (f"{head},{data[:41]}", f"{head},\u00e9", f"{head},a-_b"):
        with pytest.raises(ValueError, match=r"`image_url\.url` must be base64 .*, got 'data:"):
            image_of_url(bad)


def test_errors_name_no_objects_of_python() -> None:
    for file in (b"hello", b"", b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF89a", b"BM", b"RIFF\4\0\0\0WEBP"):
        with pytest.raises(ValueError, match="image") as caught:
            as_image(image_of_url(f"data:image/png;base64,{base64.b64encode(file).decode()}"))
        assert " object at 0x" not in str(caught.value)


def _jpeg(**how: Any) -> bytes:
    out = io.BytesIO()
    Image.fromarray(drawn(50, 40, 1)).save(out, "JPEG", **how)
    return out.getvalue()


def test_the_scans_of_a_jpeg_are_those_of_its_picture() -> None:
    plain, progressive = _jpeg(), _jpeg(progressive=True)
    assert num_jpeg_scans(plain) == 1
    assert num_jpeg_scans(progressive) == progressive.count(b"\xff\xda") > 5
    video = b"\0\0\0\x18ftypmp42" + b"\xff\xda\0\2" * 500
    thumbnail = b"\xff\xe2" + (2 + 4 * 300).to_bytes(2) + b"\xff\xda\0\2" * 300
    for file in (plain + video, plain[:2] + thumbnail + plain[2:]):
        assert num_jpeg_scans(file) == 1
        url = f"data:image/jpeg;base64,{base64.b64encode(file).decode()}"
        assert np.array_equal(
            np.asarray(as_image(image_of_url(url))), np.asarray(Image.open(io.BytesIO(plain)))
        )
    # Neither what pads markers nor a marker without data hides scans.
    first = progressive.rindex(b"\xff\xda")
    for between in (b"", b"\xff\xff", b"\xff\0", b"\xff\2\xff\xff", b"\xff\xd3", b"\xff\1\xff"):
        many = progressive[:first] + (between + progressive[first:-2]) * 200 + progressive[-2:]
        assert num_jpeg_scans(many) >= 200
        with pytest.raises(
            ValueError,
            match=r"the number of scans of the JPEG in .* must be an integer in \[0, 100\], got 2\d\d",
        ):
            image_of_url(f"data:image/jpeg;base64,{base64.b64encode(many).decode()}")
    assert num_jpeg_scans(b"\xff\xd8" + b"\xff" * 2**22) == 0


def test_transparent_pixels_are_white() -> None:
    image = Image.new("RGBA", (2, 1), (10, 20, 30, 255))
    image.putpixel((1, 0), (10, 20, 30, 0))
    assert np.asarray(as_image(image_of_url(url_of(image)))).tolist() == [[[10, 20, 30], [255, 255, 255]]]
    assert np.asarray(as_image(Image.new("L", (1, 1), 7))).tolist() == [[[7, 7, 7]]]


def test_what_can_not_be_had(engine: LLMEngine) -> None:
    for name, value in (("enable_lora", True), ("limit_mm_per_prompt", 3), ("encoder_cache_gb", -1)):
        with pytest.raises(ValueError, match=name):
            make_engine(FOLDER, **SETTINGS, **{name: value})
    picture = prompt("a text that is longer than a block <image>", drawn(9, 9, 1))
    with pytest.raises(ValueError, match="`prompt` must be tokens because images can't be pinned"):
        engine.pin_prefix(picture)
    engine.add_request("a", engine.check_request(picture, GREEDY))
    engine.step()
    with pytest.raises(
        ValueError, match="the running requests with `multi_modal_data` must be none because an engine"
    ):
        engine.state()


def test_wrong_configs() -> None:
    config = json.loads((FOLDER / "config.json").read_text())
    assert Idefics3Config.from_hf(config).vision.num_patches == 81
    for change, message in (
        ({"scale_factor": 2}, "`scale_factor` must be a divisor of 9, the patches per side, got 2"),
        ({"image_token_id": 10**6}, "`image_token_id` must be .*got 1000000"),
        ({"text_config": config["text_config"] | {"model_type": "mistral"}}, "text_config.model_type"),
        ({"vision_config": config["vision_config"] | {"num_channels": 1}}, "vision_config.num_channels"),
        ({"vision_config": config["vision_config"] | {"patch_size": 39}}, "vision_config.patch_size"),
    ):
        with pytest.raises(ValueError, match=message):
            Idefics3Config.from_hf(config | change)
    assert ConfigReader({}, max_model_len=5).nested("a", {}).max_model_len == 5
