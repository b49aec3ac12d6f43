"""The movie of a pool: what its frames hold, and that the drawing says the same."""

import json
import re
from collections.abc import Iterator

import pytest

from jax_paged import LLM, SamplingParams
from jax_paged.lab.movie import Movie, movie_of, watch

PROMPTS = ["a b c d e f g h", "one two three", "what"]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """Room for too few tokens, so that samples are swapped out."""
    with LLM(num_gpu_blocks_override=24, block_size=4, max_num_seqs=8, max_model_len=64) as llm:
        yield llm


@pytest.fixture(scope="module")
def movie(llm: LLM) -> Movie:
    params = SamplingParams(n=2, max_tokens=24, ignore_eos=True, seed=3)
    with watch(llm.llm_engine) as movie:
        llm.generate(PROMPTS, params, use_tqdm=False)
    return movie


def drawn(movie: Movie) -> dict:
    html = movie._repr_html_()
    found = re.search(r'<script type="application/json">(.*?)</script>', html, re.DOTALL)
    assert found is not None
    return json.loads(found[1].replace("<\\/", "</"))


def test_every_step_is_a_frame(llm: LLM, movie: Movie) -> None:
    steps = [frame.output.step_id for frame in movie.frames]
    assert steps == list(range(steps[0], steps[0] + len(steps)))
    with watch(llm.llm_engine) as later:
        pass
    assert len(later) == 0
    assert not llm.llm_engine.observers


def test_the_drawing_tells_what_the_frames_hold(movie: Movie) -> None:
    data = drawn(movie)
    assert [caption for caption, _, _ in data["steps"]] == [frame.caption for frame in movie.frames]
    swaps = [len(frame.output.blocks_to_swap_out) for frame in movie.frames]
    assert sum(swaps) > 0
    for frame, (caption, _, arrows) in zip(movie.frames, data["steps"], strict=True):
        output = frame.output
        moves = (*output.blocks_to_swap_out, *output.blocks_to_swap_in, *output.blocks_to_copy)
        assert len(arrows) == len(moves)
        assert ("preempted" in caption) == bool(output.preempted)
    last = {}
    for _, changes, _ in data["steps"]:
        last |= dict(changes)
    cells = re.findall(r'<g transform="translate\(\d+ \d+\)">(.*?)</g>', movie._repr_html_(), re.DOTALL)
    assert len(cells) == len(last), "the last frame is there without the script"
    assert cells == [data["boxes"][last[i]] if last[i] >= 0 else "" for i in range(len(cells))]


def test_a_long_movie_keeps_every_other_step(llm: LLM) -> None:
    with watch(llm.llm_engine, max_frames=8) as movie:
        llm.generate(PROMPTS, SamplingParams(max_tokens=40, ignore_eos=True), use_tqdm=False)
    assert 4 <= len(movie) <= 8
    apart = {
        b.output.step_id - a.output.step_id for a, b in zip(movie.frames, movie.frames[1:], strict=False)
    }
    assert len(apart) == 1
    num_steps = movie.frames[-1].output.step_id - movie.frames[0].output.step_id + 1
    (noted,) = re.findall(r"KV pool</b>: (\d+) steps; shows", movie._repr_html_())
    assert num_steps <= int(noted) < num_steps + apart.pop()


def test_nothing_has_happened_yet() -> None:
    assert "no steps yet" in Movie()._repr_html_()


def test_a_recording_is_the_same_movie() -> None:
    lines: list[str] = []
    with LLM(num_gpu_blocks_override=24, block_size=4, max_num_seqs=8, max_model_len=64) as llm:
        llm.llm_engine.record(lines.append)
        with watch(llm.llm_engine) as movie:
            llm.generate(PROMPTS, SamplingParams(n=2, max_tokens=24, ignore_eos=True), use_tqdm=False)
    again = movie_of(lines)
    assert [frame.caption for frame in again.frames] == [frame.caption for frame in movie.frames]
    for a, b in zip(again.frames, movie.frames, strict=True):
        assert (a.pool.blocks["ref_count"] == b.pool.blocks["ref_count"]).all()
