"""Stages of several processes, with programs and messages in the places of processes."""

import queue
import socket
import threading
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jax_paged.worker.compilation.buckets import Bucket
from jax_paged.worker.compilation.feature_set import FeatureSet
from jax_paged.worker.compilation.programs import DeviceInputs, StageRole, StepState
from jax_paged.worker.distributed.channel import Channel
from jax_paged.worker.distributed.follower import Follower
from jax_paged.worker.distributed.leader import Followers, Leader
from jax_paged.worker.pipeline.stage_links import RemoteArray, StageLinks
from jax_paged.worker.pipeline.stage_runner import StageRunner
from jax_paged.worker.pipeline.stages import ProgramChain
from jax_paged.worker.traced_step import StepProgram

STEP = StepProgram(Bucket(num_tokens=2, num_seqs=2, is_decode=True))
OTHER_INPUTS = {"bias_ids": None, "bias_values": None, "token_mask": None, "adapters": []}


class Context:
    """What StageRunner reads of a first stage's."""

    stage, features = StageRole(is_last=False), FeatureSet()


class Programs:
    """Programs that return what they were given as last tokens, as hidden states."""

    programs: tuple[Any, ...] = ()

    def run(self, program: Any, weights: Any, pool: Any, tables: Any, packed: Any, given: Any) -> Any:
        return jnp.asarray(given) + 1, [jnp.asarray(x) for x in pool], jnp.asarray(tables)


class Engine:
    """The runner of an engine in the first process, as far as it runs steps."""

    def __init__(self, followers: Followers, engine: int) -> None:
        group, compiled, context = Leader(followers, engine), Programs(), Context()
        own = StageRunner(engine, followers.links, context, compiled)  # pyright: ignore[reportArgumentType]
        counts, tables, tokens = (jnp.zeros(2, jnp.int32) for _ in range(3))
        self.weights = [jnp.zeros(1)]
        self.state: StepState[Any] = StepState(
            kv_cache=[jnp.zeros(1), jnp.zeros(1)],
            token_counts=counts,
            block_tables=tables,
            last_tokens=tokens,
            processor_states=[],
            draft_states=[],
        )
        begin: Any = group.begin
        followers.wait = lambda: None
        self.run = begin(compiled, own.run, self.weights, self.state)

    def step(self) -> RemoteArray:
        packed = np.arange(3, dtype=np.int32)
        none = np.zeros(1, np.int32)
        inputs: Any = DeviceInputs(packed=packed, bias_ids=none, bias_values=none, token_mask=none)
        result, self.state = self.run(STEP, self.weights, self.state, inputs)
        return result.tokens


def state_of(first: int) -> dict[str, Any]:
    """Returns the code of a state whose arrays have numbers from `first` on."""
    names = ("kv_cache", "token_counts", "block_tables", "last_tokens")
    codes: dict[str, Any] = {name: first + i for i, name in enumerate(names)}
    return {"state": codes | {"processor_states": [], "draft_states": []}}


@pytest.fixture
def ends() -> Any:
    ours, theirs = socket.socketpair()
    channel, stage = Channel(ours), Channel(theirs)
    stage.set_limits(receiving_s=60)
    links = StageLinks(0, 2, channel.send, lambda error: pytest.fail(str(error)))
    yield Followers([channel], lambda reason: None, links), stage
    stage.close()
    channel.close()


def test_an_engine_waits_for_its_own_step_and_for_no_other(ends: Any) -> None:
    followers, stage = ends
    engines = [Engine(followers, i) for i in range(2)]
    first = engines[0].step()
    (engine, name, codes, _), arrays = stage.receive()
    assert (engine, name) == (0, "decode 2")
    # The buffer travels along; the other arrays have numbers.
    assert codes == ["weights", state_of(0), {"inputs": {"packed": None, **OTHER_INPUTS}}]
    np.testing.assert_array_equal(arrays[0], [0, 1, 2])
    assert stage.receive()[0] == {"stage": 1, "engine": 0}
    done: queue.SimpleQueue[RemoteArray] = queue.SimpleQueue()
    threading.Thread(target=lambda: done.put(engines[0].step()), daemon=True).start()
    engines[1].step()
    assert stage.receive()[0][0] == 1, "that of the other engine is announced while the first is under way"
    header, (hidden,) = stage.receive()
    assert header == {"stage": 1, "engine": 1}
    np.testing.assert_array_equal(hidden, [1, 1])
    assert done.empty()
    tokens, results = np.array([7, 8], np.int32), np.arange(8, dtype=np.int32).reshape(4, 2)
    followers._forward({"stage": 0, "engine": 0}, [tokens, results, results])
    np.testing.assert_array_equal(np.asarray(first), results)
    done.get(timeout=60)
    (engine, _, codes, _), _ = stage.receive()
    # Results, details and hidden states of the first step have the numbers 4 to 6.
    assert (engine, codes[1]) == (0, state_of(7))
    _, (hidden,) = stage.receive()
    np.testing.assert_array_equal(hidden, [8, 9], "the last tokens of its first step")


def test_followers_forget_what_the_leader_has_another_number_for(ends: Any) -> None:
    followers, stage = ends
    leader, follower = Leader(followers), Follower(stage)
    run = leader.in_all_processes("hand back", lambda *arrays: arrays)
    follower.in_all_processes("hand back", lambda kept, changed: (kept, changed + 1))
    arrays = jnp.zeros(1), jnp.zeros(1)
    leader._assign_ids(arrays)
    follower._assign_ids(arrays)
    for _ in range(20):
        arrays = run(*arrays)
        (_, name, codes, dropped), given = stage.receive()
        follower.run_announced(name, codes, dropped, given)
    assert [int(follower._arrays[code][0]) for code in codes] == [0, 19]
    assert len(follower._arrays) == 4  # what was given to the last call is forgotten with the next


def test_arrays_that_come_before_they_are_asked_for() -> None:
    links = StageLinks(1, 2, lambda *_: None, lambda _: None)
    later = links.receive(0)
    links.deliver(1, [np.array([1])])
    links.deliver(0, [np.array([2])])
    links.deliver(0, [np.array([3])])
    assert [int(x.result(60)[0][0]) for x in (later, links.receive(0), links.receive(1))] == [2, 3, 1]


def test_what_fails_while_it_is_computed_is_told() -> None:
    failed: queue.SimpleQueue[Exception] = queue.SimpleQueue()

    class Broken:
        def copy_to_host_async(self) -> None: ...

        def __array__(self, *_: Any, **__: Any) -> np.ndarray:
            raise RuntimeError("out of memory")

    array: Any = Broken()
    StageLinks(0, 2, lambda *_: None, failed.put).send(0, [array])
    assert str(failed.get(timeout=60)) == "out of memory"


def test_the_memory_of_a_chain_is_that_of_its_largest_part() -> None:
    def part(num_bytes: int | None) -> Any:
        memory = None if num_bytes is None else SimpleNamespace(temp_size_in_bytes=num_bytes)
        return SimpleNamespace(memory_analysis=lambda: memory)

    assert ProgramChain([part(3), part(5)], print).memory_analysis().temp_size_in_bytes == 5
    assert ProgramChain([part(3), part(None)], print).memory_analysis() is None
    assert ProgramChain([], print).memory_analysis() is None
