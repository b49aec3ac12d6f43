"""Connects the scheduler with its features.

Apart from type annotations, no other module of core/ imports from core/features/.

- lora: device slots of LoRA adapters.
- multi_step: several decode steps in one step.
- speculation: steps that verify draft tokens.
- beam_search: selects the beams that continue after each step.
- interactive: edits of requests between steps, and of steps before they are executed.

Other modules import the class and the function of `interactive` from here. For each other feature, a function
creates its main object. It returns None if the feature is switched off; beam search is always available.
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
from jax_paged.core.result_updater import StepTokens
from jax_paged.core.scheduler_output import SchedulerOutput
from jax_paged.core.step_builder import StepPlanner
from jax_paged.core.stop_conditions import StopConditions
from jax_paged.speculation import Speculation


def build_adapter_slots(max_loras: int, queues: RequestQueues) -> AdapterSlots | None:
    """Returns the owner of the device slots of LoRA adapters; None without LoRA."""
    return AdapterSlots(max_loras, queues) if max_loras else None


def build_multi_step(
    block_manager: BlockManager, queues: RequestQueues, stop_conditions: StopConditions, num_steps: int
) -> MultiStepPlanner | None:
    """Returns the planner of multi-step decoding; None if it is switched off."""
    if num_steps == 1:
        return None
    return MultiStepPlanner(block_manager, queues, stop_conditions, num_steps=num_steps)


def build_beam_search(block_manager: BlockManager, stop_conditions: StopConditions) -> BeamSearch:
    """Returns the object that selects the beams of beam searches."""
    return BeamSearch(block_manager, stop_conditions)


def build_draft_planner(
    block_manager: BlockManager,
    queues: RequestQueues,
    stop_conditions: StopConditions,
    speculation: Speculation | None,
    max_num_batched_tokens: int,
) -> DraftPlanner | None:
    """Returns the planner of steps that verify draft tokens; None without speculative decoding."""
    if speculation is None:
        return None
    return DraftPlanner(block_manager, queues, stop_conditions, speculation, max_num_batched_tokens)


def read_planned(
    output: SchedulerOutput, result: ModelRunnerOutput, slots: Mapping[int, BatchSlot]
) -> StepTokens:
    """Returns the sampled tokens of a multi-step or of a step that verifies draft tokens."""
    if output.num_multi_step_tokens:
        return multi_step.sampled_tokens(output, result, slots)
    return acceptance.sampled_tokens(output, result)


def set_request_flags(group: SequenceGroup, planners: Iterable[StepPlanner]) -> None:
    """Sets the flags of a request that depend on the features it uses.

    `needs_tokens_on_host` is set if the host chooses the next token or prepares the choice. This is the case
    for beam searches, structured output, bad words, and logits processors that run in Python. The planners
    set the other flags.
    """
    group.needs_tokens_on_host = group.sampling_params.needs_tokens_on_host
    if group.request.features is not None:
        group.needs_tokens_on_host |= group.beam_params is not None
    for planner in planners:
        planner.set_flag(group)
