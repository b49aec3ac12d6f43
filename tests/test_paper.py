"""The paper's evaluation: the baselines' memory, the lengths, and the figures that are kept."""

import json
import random

import numpy as np
import pytest
from helpers.real_model import VOCAB_SIZE
from hypothesis import given, settings
from hypothesis import strategies as st
from paper import figures, measured, published
from paper.buddy import BuddyAllocator, BuddyManager, Demand, Region
from paper.devices import A100_40, HOST_S, OPT_13B, OPT_66B, OPT_175B
from paper.figures import FIGURES, Row
from paper.lengths import ALPACA, SHAREGPT, WORKLOADS, draw_lengths, draw_trace
from paper.page import DOCS
from paper.picture import number
from paper.points import Point, batch, compute, highest_rate, sharing
from paper.runner import complete
from paper.store import RESULTS, Store
from paper.systems import ORCAS, SYSTEMS, make_scheduler, serve, serve_static

from jax_paged import BeamSearchParams, LLMEngine, SamplingParams
from jax_paged.core.request import Sequence
from jax_paged.lab.simulator import Request, simulate

pytestmark = pytest.mark.thorough


@given(st.integers(1, 300), st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_regions_never_overlap_and_merge_again(num_units: int, rng: random.Random) -> None:
    buddies = BuddyAllocator(num_units)
    whole = {size: set(starts) for size, starts in buddies.free.items()}
    held: list[Region] = []
    for _ in range(200):
        if held and rng.random() < 0.45:
            buddies.give_back(held.pop(rng.randrange(len(held))))
        else:
            wanted = rng.randint(1, num_units)
            region = buddies.take(wanted)
            if region is None:
                fits = [size for size, starts in buddies.free.items() if starts and size >= wanted]
                assert not fits, "a region was there"
            else:
                assert region.size >= wanted > region.size / 2
                assert region.start % region.size == 0
                held.append(region)
        units = [unit for start, size in held for unit in range(start, start + size)]
        units += [u for size, starts in buddies.free.items() for s in starts for u in range(s, s + size)]
        assert sorted(units) == list(range(num_units)), "each unit is held or free, and only once"
    for region in held:
        buddies.give_back(region)
    assert {size: starts for size, starts in buddies.free.items() if starts} == whole


@pytest.mark.quick
@pytest.mark.parametrize("reserve", ["max", "pow2", "oracle"])
@given(st.randoms(use_true_random=False), st.sampled_from([1, 4, 16]))
@settings(max_examples=25, deadline=None)
def test_a_buddy_manager_keeps_its_books(reserve: str, rng: random.Random, block_size: int) -> None:
    """A random life: requests of several sequences that are admitted, grow, fork, end one by one."""
    lengths: dict[Sequence, Demand] = {}
    manager = BuddyManager(513, block_size, reserve, 64, lambda seq: lengths[seq])
    requests: list[list[Sequence]] = []
    for _ in range(120):
        choice = rng.random()
        if choice < 0.4:
            seq = Sequence([0] * rng.randint(1, 30))
            lengths[seq] = Demand(rng.randint(1, 30), rng.randint(1, 4))
            if manager.allocate(seq, "", use_cache=False, num_reserved=0):
                seq.num_computed_tokens = len(seq.prompt_token_ids)
                requests.append([seq])
        elif requests:
            group = rng.choice(requests)
            seq = rng.choice(group)
            first = group[0]
            if choice < 0.6 and len(group) < lengths.get(first, Demand(0, 0)).num_seqs:
                child = seq.fork(len(group), 0)
                manager.fork(seq, child, seq.num_computed_tokens)
                group.append(child)
            elif choice < 0.8:
                before = {s: list(manager.block_tables[s][0]) for s in group}
                copies = manager.append_slots([(s, 1) for s in group])
                tables = [manager.block_tables[s][0] for s in group]
                assert len({table[0] for table in tables}) == len(group), "each has a region of its own"
                after = {s: manager.block_tables[s][0] for s in group}
                moved = {pair for s in group for pair in zip(before[s], after[s], strict=True)}
                assert set(copies) <= moved
                assert not {a for a, _ in copies} & {b for _, b in copies}
                for s in group:
                    num_written = manager.num_blocks_of(s.num_computed_tokens)
                    pairs = list(zip(before[s], after[s], strict=True))[:num_written]
                    assert before[s] == after[s] or set(pairs) <= set(copies)
            elif seq is not first or len(group) == 1:
                group.remove(seq)
                manager.free(seq)
                if not group:
                    requests.remove(group)
        manager.check_integrity()
        for table in (manager.block_tables[s][0] for group in requests for s in group):
            assert table == list(range(table[0], table[0] + len(table))), "contiguous"
    for group in requests:
        for seq in group:
            manager.free(seq)
    manager.check_integrity()
    assert manager.buddies.free[512] == {0}


@pytest.mark.quick
def test_the_parts_of_the_memory_sum_to_all_of_it() -> None:
    trace = draw_trace(SHAREGPT, 2.0, 60)
    for system, reserve in ORCAS.items():
        usages = serve(system, OPT_13B, trace, stop_s=60).usages
        assert len(usages) > 50
        assert {sum(usage) for usage in usages} == {15_700 // 16 * 16}
        assert all(min(usage) >= 0 for usage in usages)
        assert any(usage.internal for usage in usages) == (reserve != "oracle")


@pytest.mark.quick
def test_what_the_baselines_reserve() -> None:
    def reserved(reserve: str) -> list[int]:
        manager = BuddyManager(129, 16, reserve, 2048, lambda seq: Demand(1))
        return [
            manager.num_reserved_tokens(*lens) for lens in ((100, 33), (10, 1), (1000, 1048), (1500, 520))
        ]

    assert reserved("max") == [2048] * 4
    assert reserved("pow2") == [164, 11, 2048, 2048]
    assert reserved("oracle") == [133, 11, 2048, 2020]


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("several", [{}, {"n": 3}, {"beam_width": 3}])
def test_every_request_ends_and_all_memory_is_free_again(system: str, several: dict[str, int]) -> None:
    trace = draw_trace(ALPACA, 40.0, 2.0, **several)
    scheduler = make_scheduler(system, 2048, trace)
    result = simulate(trace, scheduler, OPT_13B.step_time())
    assert not np.isnan(result.requests["finished_time"]).any()
    scheduler.block_manager.check_integrity()
    assert scheduler.block_manager.num_free_blocks == 128
    if isinstance(scheduler.block_manager, BuddyManager):
        assert scheduler.block_manager.buddies.free[128] == {0}
        assert not result.requests["num_preemptions"].any()


@pytest.mark.parametrize("several", [1, 3])
@pytest.mark.parametrize("searches", [False, True])
def test_outputs_do_not_depend_on_the_memory(small_engine: LLMEngine, several: int, searches: bool) -> None:
    """A real engine under each manager: what is copied between regions is what it would have shared."""
    rng = random.Random(several)
    jobs = []
    for i in range(6):
        prompt = [
            *(rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 40))),
            measured.FIRST_REQUEST_TOKEN + i,
        ]
        output_len = rng.randint(2, 20)
        params = (
            BeamSearchParams(several, max_tokens=output_len, ignore_eos=True)
            if searches
            else SamplingParams(n=several, seed=i, max_tokens=output_len, ignore_eos=True)
        )
        jobs.append(measured.Job(prompt, params, Demand(output_len, several)))
    found = {}
    for system in SYSTEMS:
        scheduler = measured.scheduler_of(system, jobs)
        engine = LLMEngine(small_engine.args, small_engine.executor, scheduler=scheduler)
        for i, job in enumerate(jobs):
            engine.add_request(str(i), {"prompt_token_ids": job.prompt}, job.params)
        outputs = {}
        while engine.has_unfinished_requests():
            for output in engine.step():
                outputs[output.request_id] = [one.token_ids for one in output.outputs]
            engine.scheduler.block_manager.check_integrity()
        found[system] = outputs
        assert len(outputs) == 6
    assert all(outputs == found["vLLM"] for outputs in found.values())


def test_a_simulation_can_stop_early() -> None:
    trace = [Request(0.0, 10, 100), Request(0.1, 10, 2), Request(50.0, 10, 2)]
    scheduler = make_scheduler("vLLM", 2048, trace)
    result = simulate(trace, scheduler, OPT_13B.step_time(), stop_s=1.0)
    assert result.steps["time_s"].max() < 1.0 <= (result.steps["time_s"] + result.steps["step_s"]).max()
    assert np.isnan(result.requests["finished_time"]).tolist() == [True, False]


@pytest.mark.parametrize("name", sorted(WORKLOADS))
def test_lengths_have_the_published_means(name: str) -> None:
    workload = WORKLOADS[name]
    prompts, outputs = draw_lengths(workload, 5000)
    assert len(prompts) == len(outputs) == 5000
    assert prompts.mean() == pytest.approx(workload.prompt_mean, rel=0.01)
    assert outputs.mean() == pytest.approx(workload.output_mean, rel=0.01)
    assert min(prompts.min(), outputs.min()) >= 1
    assert (prompts + outputs).max() + workload.prefix_len <= 2048
    np.testing.assert_array_equal(draw_lengths(workload, 5000)[0], prompts)


def test_spreads_are_those_that_the_page_states() -> None:
    prompts, outputs = draw_lengths(ALPACA, 50_000)
    assert np.log(outputs).std() == pytest.approx(0.833, abs=0.03)
    assert outputs.std() / outputs.mean() == pytest.approx(1, abs=0.05)
    assert np.log(prompts).std() == pytest.approx(0.5, abs=0.02)


def test_arrivals_are_poisson() -> None:
    arrivals = np.array([request.arrival_s for request in draw_trace(ALPACA, 30.0, 200)])
    gaps = np.diff(arrivals)
    assert gaps.mean() == pytest.approx(1 / 30, rel=0.05)
    assert gaps.std() == pytest.approx(1 / 30, rel=0.05)


def test_steps_take_what_a_data_sheet_says() -> None:
    step_time = OPT_13B.step_time()
    assert step_time.step_s(0, 1, 0, 0, 0) - HOST_S == pytest.approx(26e9 / 1.555e12)
    assert step_time.step_s(1000, 0, 0, 0, 0) - HOST_S == pytest.approx(2 * 13e9 * 1000 / 312e12)
    more = step_time.step_s(0, 1, 1000, 0, 0) - step_time.step_s(0, 1, 0, 0, 0)
    assert more == pytest.approx(1000 * 819_200 / A100_40.bytes_per_s)
    for setup, paper in ((OPT_13B, 12e9), (OPT_66B, 21e9), (OPT_175B, 264e9)):
        assert setup.num_slots * setup.bytes_per_token == pytest.approx(paper, rel=0.1)


def test_a_static_batch_runs_to_the_end_of_its_longest() -> None:
    trace = [Request(0.0, 10, 5), Request(0.0, 10, 50), Request(0.1, 10, 1)]
    finished = serve_static(OPT_13B, trace)
    assert finished[0] == finished[1] > 50 * 26e9 / 1.555e12
    assert finished[2] > finished[1]


def test_points_are_kept_and_not_worked_out_again(tmp_path: object) -> None:
    store = Store(tmp_path)
    points = [Point.of("recovery_ms", block_size=size, num_tokens=256) for size in (1, 16)]
    store[points[0]] = "as it was"
    complete(points, store, 1)
    again = Store(tmp_path)
    assert again[points[0]] == "as it was"
    assert again[points[1]] == compute(points[1])
    again.keep_only(points[1:])
    assert points[0] not in Store(tmp_path)


def test_small_runs_already_show_figures_2_13_and_15() -> None:
    found = {system: batch(system, "ShareGPT", 2.0, 150) for system in SYSTEMS}
    batched = [value["batched"] for value in found.values()]
    assert batched == sorted(batched)
    assert batched[0] == pytest.approx(7, abs=0.5)
    assert found["vLLM"]["memory"][0] > 95
    saved = [sharing("Alpaca", 150, n=n) for n in (2, 6)]
    assert 4 < saved[0] < saved[1] < 20


def test_a_rate_is_found_between_two_runs() -> None:
    found = highest_rate("Orca (Max)", "OPT-13B", "Alpaca", 60)
    below = [rate for rate, latency in found["runs"] if latency < 0.25]
    above = [rate for rate, latency in found["runs"] if latency >= 0.25]
    assert max(below) <= found["rate"] <= min(above)


@pytest.mark.quick
def test_errors_are_counted_from_the_paper() -> None:
    assert Row("", "", 11.0, 10.0).error == pytest.approx(0.1)
    assert Row("", "", 9.0, (10.0, 12.0)).error == pytest.approx(-0.1)
    assert Row("", "", 11.0, (10.0, 12.0)).error == 0
    assert Row("", "", 11.0, None).error is None


# The stored results.


@pytest.mark.parametrize("name", FIGURES)
def test_the_stored_figures_are_complete(name: str) -> None:
    store, figure = Store(RESULTS), FIGURES[name]
    assert all(point in store for point in figure.points), "make paper"
    content = json.loads((RESULTS / f"figure-{name}.json").read_text())
    expected = figure.rows(store)
    assert [row["ours"] for row in content["rows"]] == [row.ours for row in expected]
    svg = (DOCS / "paper" / f"figure-{name}.svg").read_text()
    assert "prefers-color-scheme: dark" in svg
    if figure.curves is None:
        labels = [f">{number(row.ours, figure.digits)}<" for row in expected]
        assert all(label in svg for label in labels), "values stand on the bars"
    assert f"](paper/figure-{name}.svg)" in (DOCS / "paper.md").read_text()


@pytest.mark.quick
def test_the_stored_figures_hold_what_they_must() -> None:
    store = Store(RESULTS)
    check_figure_13(figures.rows(13, store))
    for row in figures.rows(2, store):
        assert row.ours == pytest.approx(row.paper, abs=5), row
    for row in figures.rows(15, store):
        if row.panel == "Alpaca, samples":
            assert row.ours == pytest.approx(row.paper, abs=2), row


def check_figure_13(rows: list[Row]) -> None:
    errors = [abs(row.error or 0) for row in rows if not row.is_fitted]
    assert len(errors) == 7
    assert sum(error <= 0.15 for error in errors) >= 6, rows


@pytest.mark.slow
def test_figure_13_comes_out_again(tmp_path: object) -> None:
    """From nothing, at the length of the stored run; the fitted number is the fit."""
    store = Store(tmp_path)
    complete(FIGURES["13"].points, store)
    rows = figures.rows(13, store)
    check_figure_13(rows)
    (fitted,) = (row for row in rows if row.is_fitted)
    assert fitted.ours == pytest.approx(fitted.paper, rel=0.02)
    assert [row.ours for row in rows] == [row.ours for row in figures.rows(13, Store(RESULTS))]
    assert published.BATCHES["Alpaca"]["vLLM"] == fitted.paper
