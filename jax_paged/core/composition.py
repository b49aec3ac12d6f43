"""The features of the scheduler. No other module of core imports from core/features/.

- lora: device slots of LoRA adapters.
- multi_step: several decode steps in one.
- speculation: steps that verify draft tokens.
- beam_search: the continuations that go on after each step of a beam search.
- interactive: edits of requests between two steps, and of steps before they are computed.

Features that are always available are classes; a function returns None if its feature is switched off.
"""

from collections.abc import Iterable, Mapping

from jax_paged.core.batch_slots import BatchSlot
from jax_paged.core.block_manager import BlockManager
from jax_paged.core.features import multi_step
from jax_paged.core.features.beam_search import BeamSearch
from jax_paged.core.features.interactive.request_edits import RequestEditor as RequestEditor
from jax_paged.core.features.interactive.step_edits import edit_step as edit_step
from jax_paged.core.features.lora import AdapterSlots
from jax_paged.core.features.multi_step import MultiStepPlanner
from jax_paged.core.features.speculation import acceptance
from jax_paged.core.features.speculation.draft_planner import DraftPlanner
from jax_paged.core.model_runner_output import ModelRunnerOutput
from jax_paged.core.request import SequenceGroup
from jax_paged.core.request_queues import RequestQueues
from jax_paged.core.result_updater import DrawnTokens
from jax_paged.core.scheduler_output import SchedulerOutput
from jax_paged.core.step_builder import StepPlanner
from jax_paged.core.stop_conditions import StopConditions
from jax_paged.speculation import Speculation


def build_adapter_slots(max_loras: int, queues: RequestQueues) -> AdapterSlots | None:
    """Returns the owner of the device slots of LoRA adapters."""
    return AdapterSlots(max_loras, queues) if max_loras else None


def build_multi_step(
    block_manager: BlockManager, queues: RequestQueues, stop_conditions: StopConditions, num_steps: int
) -> MultiStepPlanner | None:
    """Returns what plans multi-step decoding."""
    if num_steps == 1:
        return None
    return MultiStepPlanner(block_manager, queues, stop_conditions, num_steps=num_steps)


def build_beam_search(block_manager: BlockManager, stop_conditions: StopConditions) -> BeamSearch:
    """Returns what selects the beams that go on after a step."""
    return BeamSearch(block_manager, stop_conditions)


def build_draft_planner(
    block_manager: BlockManager,
    queues: RequestQueues,
    stop_conditions: StopConditions,
    speculation: Speculation | None,
    max_num_batched_tokens: int,
) -> DraftPlanner | None:
    """Returns what plans steps that verify draft tokens."""
    if speculation is None:
        return None
    return DraftPlanner(block_manager, queues, stop_conditions, speculation, max_num_batched_tokens)


def read_planned(
    output: SchedulerOutput, result: ModelRunnerOutput, slots: Mapping[int, BatchSlot]
) -> DrawnTokens:
    """Returns what was drawn in a multi-step, or in a step that verifies drafts."""
    return multi_step.drawn(output, result, slots) if output.burst else acceptance.drawn(output, result)


def set_request_flags(group: SequenceGroup, planners: Iterable[StepPlanner]) -> None:
    """Derives from the features that a request uses what the scheduler may do with it.

    `needs_tokens_on_host`: The next token is chosen on the host, or the host prepares the choice: beams are
    selected there, the tokens that a grammar allows or that would complete a bad word are found there, and
    logits processors in Python run there.
    """
    group.needs_tokens_on_host = group.sampling_params.needs_tokens_on_host
    if group.request.features is not None:
        group.needs_tokens_on_host |= group.beam_params is not None
    for planner in planners:
        planner.set_flag(group)
