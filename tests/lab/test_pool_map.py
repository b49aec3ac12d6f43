import xml.etree.ElementTree as ET
from collections import Counter

import numpy as np
import pytest

from jax_paged import BeamSearchParams, SamplingParams
from jax_paged.core.block_manager import BlockManager
from jax_paged.core.kv_cache.cache_group import CacheGroup
from jax_paged.core.request import Request, RequestFeatures, RequestMetrics, Sequence, SequenceGroup
from jax_paged.lab.pool_map import pool_map

SIZE = 4


class Pool:
    """A block manager and requests whose tokens are computed by hand."""

    def __init__(self, num_blocks=30, **settings):
        self.manager = BlockManager(num_blocks, SIZE, True, **settings)
        self.requests = []

    def add(self, token_ids, *, n=1, name=None, encoder=(), computed=None):
        seq = Sequence(list(token_ids))
        name = name or f"r{len(self.requests)}"
        params = SamplingParams(n=n, seed=0)
        features = RequestFeatures(encoder_token_ids=list(encoder)) if encoder else None
        values = Request(name, seq.prompt_token_ids, params, features=features)
        request = SequenceGroup(values, [seq], RequestMetrics(0.0))
        request.arrival = len(self.requests)
        self.requests.append(request)
        settings = {"use_cache": True, "num_reserved": 0}
        assert self.manager.allocate(seq, "", num_encoder_tokens=len(encoder), **settings)
        start = seq.num_computed_tokens
        assert self.manager.append_slots([(seq, len(seq) - start)]) == []
        seq.num_computed_tokens = len(seq) if computed is None else computed
        self.manager.cache_full_blocks(seq, "", start, seq.num_computed_tokens)
        for index in range(1, n):
            sample = seq.fork(index, 0)
            self.manager.fork(seq, sample, len(seq))
            request.sequences.append(sample)
        return request

    def map(self):
        self.manager.check_integrity()
        return pool_map(self.manager, self.requests)


def drawn(pool):
    """Returns the titles of the cells of each grid and all that is written outside of grids."""
    text = pool._repr_html_()
    for word in ("<script", "http", "url(", "href"):
        assert word not in text
    root = ET.fromstring(text)
    grids = [[cell.find("title").text for cell in svg.findall("g")] for svg in root.findall("svg")]
    return grids, "".join(root.itertext())


def test_counts_and_owners_are_the_block_managers():
    pool = Pool(num_swap_blocks=10)
    manager = pool.manager
    shared = list(range(2 * SIZE))
    pool.add([*shared, 50], n=3)
    pool.add([*shared, 60, 61, 62], name="other", computed=2 * SIZE + 2)
    manager.pin("prefix-0", shared, "")
    ended = pool.add(range(100, 100 + SIZE + 1))
    manager.free(ended.sequences[0])
    pool.requests.remove(ended)
    swapped = pool.add(range(200, 206), n=2, name="away")
    manager.swap_out(swapped.sequences)

    m = pool.map()
    assert m.blocks["block_id"].tolist() == list(range(30))
    assert m.blocks["ref_count"].tolist() == manager.pool.ref_counts
    assert np.bincount(m.owners["block_id"], minlength=30).tolist() == manager.pool.ref_counts
    assert np.bincount(m.host_owners["block_id"], minlength=11).tolist() == manager.swap_pool.ref_counts
    assert Counter(m.blocks["state"].tolist()) == {"null": 1, "pinned": 2, "used": 2, "cached": 2, "free": 23}

    table = manager.block_tables[pool.requests[0].sequences[0]][0]
    assert m.blocks["ref_count"][table].tolist() == [5, 5, 3]  # 3 samples, the other request, the pin
    assert m.blocks["num_tokens"][table].tolist() == [4, 4, 1]
    first = [
        tuple(o) for o in m.owners[["request_id", "index", "position"]][m.owners["block_id"] == table[1]]
    ]
    assert sorted(first) == [("other", 0, 1), ("prefix-0", -1, 1), *(("r0", i, 1) for i in range(3))]
    own = manager.block_tables[pool.requests[1].sequences[0]][0][2]
    assert m.blocks[own].item() == (own, "used", 0, 1, 2)
    cached = m.blocks[m.blocks["state"] == "cached"]
    assert cached["num_tokens"].tolist() == [SIZE, SIZE]
    assert m.host_blocks[["state", "ref_count", "num_tokens"]].tolist() == [("used", 2, 4), ("used", 2, 2)]
    assert set(m.host_owners["request_id"]) == {"away"}

    (cells, host), text = drawn(m)
    assert len(cells) == 30
    assert len(host) == 2
    assert cells[own].splitlines() == [
        f"block {own}: used, 2 of 4 tokens",
        "other, sequence 0: block 2 of its table",
    ]
    assert "pinned prefix-0: block 1 of its table" in cells[table[1]]
    for part in (
        "4 of 29 blocks in use, and sharing saves 10 more; 11 of their 16 slots hold tokens (69%)",
        "pinned: 2",
        "shared by two or more sequences: 3",
        "r0: 3 sequences, 3 blocks",
        "other: 3 blocks",
        "away: 2 sequences, 2 blocks",
    ):
        assert part in text
    assert repr(m) == (
        "<KV pool: 4 of 29 blocks in use, and sharing saves 10 more; 11 of their 16 slots hold tokens (69%); "
        "2 blocks in host memory>"
    )


def test_groups_of_layers():
    pool = Pool(groups=(CacheGroup(), CacheGroup(window=SIZE), CacheGroup(is_cross=True)))
    request = pool.add(range(3 * SIZE), encoder=range(6))
    (seq,) = request.sequences
    assert pool.manager.append_slots([(seq, 1)]) == []  # the window has passed the first blocks
    m = pool.map()
    full, window, cross = pool.manager.block_tables[seq]
    assert window[:2] == [0, 0]
    assert m.blocks["group"][full].tolist() == [0] * 4
    assert m.blocks["group"][window[2:]].tolist() == [1] * 2
    assert m.blocks["group"][cross].tolist() == [2] * 2
    assert m.blocks["num_tokens"][full].tolist() == [4, 4, 4, 0]
    assert m.blocks["num_tokens"][window[2:]].tolist() == [4, 0]
    assert m.blocks["num_tokens"][cross].tolist() == [4, 2]
    assert 0 not in m.owners["block_id"]
    (cells,), _ = drawn(m)
    assert cells[cross[1]].endswith("block 1 of its table, group 2")


@pytest.mark.parametrize("name", ["<b>&\"'", "\x00\ud800\n", "x" * 5000, ""])
def test_any_name_can_be_drawn(name):
    pool = Pool()
    pool.add([1, 2], name=name)
    (cells,), text = drawn(pool.map())
    assert len(max(cells, key=len)) < 150
    if name.startswith("<"):
        assert name in text


def test_an_empty_pool():
    m = Pool(num_blocks=2).map()
    assert len(m.owners) == len(m.host_blocks) == 0
    (cells,), text = drawn(m)
    assert cells == ["block 0: null", "block 1: free"]
    assert "0 of 1 blocks in use." in text


def test_large_pools_are_folded():
    pool = Pool(num_blocks=60_000)
    pool.add([1] * 9)
    (cells,), text = drawn(pool.map())
    assert [cell.splitlines()[0] for cell in cells] == [
        "block 1: used, 4 of 4 tokens",
        "block 2: used, 4 of 4 tokens",
        "block 3: used, 1 of 4 tokens",
    ]
    assert "Only the 3 blocks in use are drawn" in text
    for i in range(30):
        pool.add(np.random.default_rng(i).integers(0, 1000, 400).tolist(), n=2)
    (cells,), text = drawn(pool.map())
    assert len(cells) == 2000
    assert "Only the first 2,000 blocks in use are drawn" in text
    assert "and 15 more requests" in text


def test_colors_stay_with_their_requests():
    pool = Pool()
    for i in range(3):
        pool.add([i] * 3)

    def colors():
        root = ET.fromstring(pool.map()._repr_html_())
        return [r.get("fill") for cell in root.find("svg") for r in cell.findall("rect")[:-1]]

    before = colors()
    assert len(set(before)) == 3
    pool.manager.free(pool.requests.pop(0).sequences[0])
    assert colors() == before[1:]


def test_an_engine_draws_its_pool(small_engine):
    engine = small_engine
    assert not len(engine.pool_map().owners)
    name = engine.pin_prefix(list(range(20, 60)))
    engine.add_request(
        "samples", list(range(20, 70)), SamplingParams(n=4, seed=1, max_tokens=30, ignore_eos=True)
    )
    engine.add_request("beams", list(range(80, 100)), BeamSearchParams(4, max_tokens=30, ignore_eos=True))
    manager = engine.scheduler.block_manager
    while engine.has_unfinished_requests():
        m = engine.pool_map()
        counts = np.bincount(m.owners["block_id"], minlength=manager.pool.num_blocks).tolist()
        assert counts == manager.pool.ref_counts == m.blocks["ref_count"].tolist()
        for request in (state.group for state in engine._core.requests.values()):
            for index, seq in enumerate(request.sequences):
                is_own = (m.owners["request_id"] == request.request_id) & (m.owners["index"] == index)
                own = m.owners[is_own]
                table = manager.block_tables.get(seq, [[]])[0]
                assert own[np.argsort(own["position"])]["block_id"].tolist() == table
                assert own["num_tokens"].sum() == seq.num_computed_tokens * bool(table)
        drawn(m)
        engine.step()
    assert set(engine.pool_map().blocks["state"].tolist()) == {"null", "free", "cached", "pinned"}
    engine.unpin_prefix(name)
