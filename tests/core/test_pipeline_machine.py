"""Random requests on the schedulers of a pipeline, whose stages run steps in order, as late as they may."""

import collections
import random
from typing import Any, ClassVar

from helpers.scheduling import result_of
from helpers.toy_device import EOS, reference_sample, root
from helpers.value_device import ValueDevice
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from jax_paged.core.block_manager import BlockManager
from jax_paged.core.kv_cache.cache_group import CacheGroup
from jax_paged.core.replicas.router import ReplicaRouter
from jax_paged.core.request import Request, SequenceGroup, SequenceStatus
from jax_paged.core.scheduler import Scheduler
from jax_paged.core.scheduler_output import SchedulerOutput
from jax_paged.sampling_params import SamplingParams

MAX_MODEL_LEN = 60


class Engine:
    """A scheduler with its share of the blocks, and what each stage has of them.

    Args:
        manager: Its blocks.
        settings: Of its scheduler.
        num_stages: Of the pipeline.
        root_of: As ValueDevice takes it.
    """

    def __init__(self, manager: BlockManager, num_stages: int, root_of: Any, **settings: Any) -> None:
        self.scheduler = Scheduler(block_manager=manager, eos_token_ids=frozenset({EOS}), **settings)
        sizes = manager.pool.num_blocks, manager.swap_pool.num_blocks, manager.block_size
        self.stages = [ValueDevice(*sizes, manager.groups, root_of) for _ in range(num_stages)]
        self.in_flight: collections.deque[SchedulerOutput] = collections.deque()
        self.drawn: collections.deque[tuple[SchedulerOutput, Any]] = collections.deque()

    @property
    def may_dispatch(self) -> bool:
        if not self.scheduler.has_unfinished:
            return False
        return not self.in_flight or (len(self.in_flight) < 2 and self.scheduler.can_run_ahead)


class PipelineMachine(RuleBasedStateMachine):
    """Requests go to the least loaded engine; engines dispatch, stages compute and results come in any order.

    A stage runs what it is given in order, each step after the stage before has run it. All stages see the
    same block tables: one that is late finds in its blocks what belongs there, and all draw the same tokens.
    """

    num_preempted: ClassVar[int] = 0
    num_ahead: ClassVar[int] = 0
    most_queued: ClassVar[int] = 0

    @initialize(
        num_stages=st.sampled_from([2, 3, 4]),
        share=st.sampled_from([32, 40]),
        num_swap_blocks=st.sampled_from([0, 30]),
        mode=st.sampled_from([None, "recompute", "swap"]),
        groups=st.sampled_from([(CacheGroup(),), (CacheGroup(), CacheGroup(window=5))]),
        caching=st.booleans(),
        budget=st.sampled_from([4, 16]),
        number=st.integers(0, 99),
    )
    def start(
        self,
        num_stages: int,
        share: int,
        num_swap_blocks: int,
        mode: Any,
        groups: tuple[CacheGroup, ...],
        caching: bool,
        budget: int,
        number: int,
    ) -> None:
        self.rng, self.now = random.Random(number), 0.0
        self.groups: dict[str, SequenceGroup] = {}
        limits = {"max_num_seqs": 6, "max_num_batched_tokens": budget, "max_model_len": MAX_MODEL_LEN}
        self.engines = []
        for _ in range(num_stages):
            # Room for the longest text, and not for two.
            manager = BlockManager(
                share * len(groups), 2, caching, groups=groups, num_swap_blocks=num_swap_blocks
            )
            engine = Engine(manager, num_stages, self.root_of, preemption_mode=mode, **limits)
            self.engines.append(engine)
        self.router = ReplicaRouter(map(str, range(num_stages)), max_lag=0)
        self.placed: dict[str, int] = {}
        self.queues: list[collections.deque[tuple[Engine, SchedulerOutput]]]
        self.queues = [collections.deque() for _ in range(num_stages)]
        self.computed: list[list[tuple[Engine, int]]] = [[] for _ in range(num_stages)]

    def root_of(self, request_id: str) -> int:
        return root(self.groups[request_id].cache_salt, [])

    @rule(
        shared=st.integers(0, 12),
        own=st.lists(st.integers(0, 1), min_size=1, max_size=14),
        max_tokens=st.integers(1, 20),
    )
    def add(self, shared: int, own: list[int], max_tokens: int) -> None:
        for place, engine in enumerate(self.engines):
            queues = engine.scheduler.queues
            self.router.set_load(str(place), len(queues.waiting), len(queues.running) + len(queues.swapped))
        loads = [self.router.load(str(place)) for place in range(len(self.engines))]
        place, number = int(self.router.choose()), len(self.groups)
        assert loads[place] == min(loads)
        params = SamplingParams(max_tokens=max_tokens, seed=number)
        prompt = [i % 3 for i in range(shared)] + own
        group = SequenceGroup.from_request(Request(f"r{number}", prompt, params), self.now)
        self.groups[group.request_id] = group
        self.placed[group.request_id] = place
        self.engines[place].scheduler.add(group)

    @rule(place=st.integers(0, 3))
    def dispatch(self, place: int) -> None:
        engine = self.engines[place % len(self.engines)]
        if not engine.may_dispatch:
            return
        self.now += 1
        type(self).num_ahead += bool(engine.in_flight)
        output = engine.scheduler.schedule(self.now)
        type(self).num_preempted += len(output.preempted)
        engine.in_flight.append(output)
        self.queues[0].append((engine, output))
        type(self).most_queued = max(type(self).most_queued, sum(map(len, self.queues)))

    @rule(stage=st.integers(0, 3))
    def compute(self, stage: int) -> None:
        """A stage runs the next step that it was given."""
        stage %= len(self.queues)
        if not self.queues[stage]:
            return
        engine, output = self.queues[stage].popleft()
        self.computed[stage].append((engine, output.step_id))
        drawn = engine.stages[stage].execute(output)
        if stage + 1 < len(self.queues):
            self.queues[stage + 1].append((engine, output))
        else:
            engine.drawn.append((output, drawn))

    @rule(place=st.integers(0, 3))
    def take_in(self, place: int) -> None:
        """An engine takes in the result of its oldest step; then nobody may read what it has given back."""
        engine = self.engines[place % len(self.engines)]
        if not engine.drawn:
            return
        output, (token_ids, logprobs) = engine.drawn.popleft()
        assert output is engine.in_flight.popleft(), "results come in the order of the steps"
        engine.scheduler.update(output, result_of(output, token_ids, logprobs), self.now)
        pool = engine.scheduler.block_manager.pool
        free = pool._free.keys()
        for stage in engine.stages:
            stage.spoil(lambda block: block in free and pool.contents[block] is None, self.rng)

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        running = [i for i, group in self.groups.items() if group.unfinished]
        if running and data.draw(st.integers(0, 2)) == 0:
            request_id = data.draw(st.sampled_from(running))
            self.engines[self.placed[request_id]].scheduler.abort(request_id)

    @invariant()
    def blocks_are_whole(self) -> None:
        for engine in getattr(self, "engines", ()):
            engine.scheduler.block_manager.check_integrity()

    @invariant()
    def all_stages_have_the_same_order(self) -> None:
        if hasattr(self, "computed"):
            for before, after in zip(self.computed, self.computed[1:], strict=False):
                assert before[: len(after)] == after

    def teardown(self) -> None:
        for _ in range(10_000):
            if not any(e.scheduler.has_unfinished or e.in_flight for e in getattr(self, "engines", ())):
                break
            for place in range(len(self.engines)):
                self.dispatch(place)
            for stage in range(len(self.queues)):
                while self.queues[stage]:
                    self.compute(stage)
            for place in range(len(self.engines)):
                self.take_in(place)
        for engine in getattr(self, "engines", ()):
            manager = engine.scheduler.block_manager
            assert not engine.scheduler.has_unfinished
            assert not manager.block_tables
            assert manager.pool.num_free == manager.pool.num_usable
            assert manager.swap_pool.num_free == manager.swap_pool.num_usable
        for group in getattr(self, "groups", {}).values():
            [sequence] = group.sequences
            params, base = group.sampling_params, self.root_of(group.request_id)
            limits = params.max_tokens, params.min_tokens, MAX_MODEL_LEN
            alone = reference_sample(base, sequence.prompt_token_ids, sequence.seed, *limits)
            drawn = sequence.output_token_ids
            assert drawn == alone[: len(drawn)]
            assert drawn == alone or sequence.status is SequenceStatus.FINISHED_ABORTED


def test_blocks_and_order_of_a_pipeline() -> None:
    machine = PipelineMachine
    seed(7)(machine)
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=100,
            stateful_step_count=60,
            deadline=None,
            database=None,
            phases=[Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
        ),
    )
    assert machine.num_preempted > 0
    assert machine.num_ahead > 0
    assert machine.most_queued > 2
