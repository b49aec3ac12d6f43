"""The next step before it runs: a value that can be displayed, edited and run."""

import dataclasses
import html
from collections.abc import Callable, Iterable
from typing import Self

from jax_paged.arguments.shown_values import Text, shown
from jax_paged.core.features.interactive.step_edits import select_sequences
from jax_paged.core.request import Sequence, SequenceGroup
from jax_paged.core.scheduler_output import ScheduledSequence, SchedulerOutput
from jax_paged.engine.feature import EngineFeature
from jax_paged.engine.output_processor import step_outputs
from jax_paged.errors import ArgumentError, check
from jax_paged.outputs import RequestOutput

# Height of a line of the picture, positions and widths of its columns, and width of the picture (SVG units).
_ROW_HEIGHT, _BAR_LEFT, _BAR_WIDTH, _TEXT_LEFT, _WIDTH = 24, 150, 260, 422, 760


@dataclasses.dataclass(frozen=True)
class RowOwner:
    """Request and sequence that an entry of SchedulerOutput.scheduled belongs to.

    Args:
        request_id: The request.
        index: Index of the sample or beam in the request.
        num_prompt_tokens: Tokens of the prompt.
    """

    request_id: str
    index: int
    num_prompt_tokens: int


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """A step that is scheduled and has not run. Notebooks display it as a picture.

    Args:
        output: The scheduled step.
        owners: The owner of each entry of output.scheduled.
        dropped: Ids of the requests that were removed from the plan.
    """

    output: SchedulerOutput
    owners: tuple[RowOwner, ...]
    dropped: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, output: SchedulerOutput, find: Callable[[int], tuple[SequenceGroup, Sequence] | None]
    ) -> Self:
        """Returns the plan of a step that was just scheduled.

        Args:
            output: The step.
            find: Scheduler.find, which returns the request and the sequence of a sequence id.
        """
        owners = []
        for row in output.scheduled:
            found = find(row.seq_id)
            assert found is not None, f"scheduled sequence {row.seq_id} belongs to no request"
            group, seq = found
            owners.append(RowOwner(group.request_id, group.sequences.index(seq), len(seq.prompt_token_ids)))
        return cls(output, tuple(owners))

    @property
    def request_ids(self) -> list[str]:
        """The requests that compute tokens in the step, in the order in which they first appear."""
        return list(dict.fromkeys(owner.request_id for owner in self.owners))

    def without(self, *request_ids: str) -> Self:
        """Returns the plan without some requests. They get the same tokens when they run later.

        Raises:
            ValueError: If a request is not part of the plan.
        """
        for request_id in request_ids:
            allowed = f"a request in the plan, {shown(self.request_ids)}"
            check(request_id in self.request_ids, "request_id", request_id, allowed)
        return self.only([r for r in self.request_ids if r not in request_ids])

    def only(self, request_ids: Iterable[str]) -> Self:
        """Returns the plan with only the given requests, in the given order.

        Sequences that compute one token stay before sequences that compute several, because the kernels
        require this order.

        Raises:
            ValueError: If a request is not part of the plan, or is named twice.
        """
        wanted = list(request_ids)
        order = {request_id: place for place, request_id in enumerate(wanted)}
        ok = order.keys() <= set(self.request_ids) and len(order) == len(wanted)
        check(ok, "request_ids", wanted, f"distinct requests of the plan, {shown(self.request_ids)}")
        rows = [i for i, owner in enumerate(self.owners) if owner.request_id in order]
        rows.sort(key=lambda i: (self.output.scheduled[i].num_tokens > 1, order[self.owners[i].request_id]))
        dropped = [request_id for request_id in self.request_ids if request_id not in order]
        return dataclasses.replace(
            self,
            output=select_sequences(self.output, rows),
            owners=tuple(self.owners[i] for i in rows),
            dropped=(*self.dropped, *dropped),
        )

    def rows_of(self, plan: "StepPlan") -> list[int]:
        """Returns, for each scheduled sequence of an edited plan, its index in this plan.

        Raises:
            ValueError: If `plan` is not this plan with requests removed or reordered.
        """
        places = {row.seq_id: i for i, row in enumerate(self.output.scheduled)}
        rows = [places.get(row.seq_id, -1) for row in plan.output.scheduled]
        left_out = {owner.request_id for i, owner in enumerate(self.owners) if i not in rows}
        ok = -1 not in rows and select_sequences(self.output, rows) == plan.output
        ok = ok and left_out.isdisjoint(self.owners[i].request_id for i in rows)
        check(ok, "plan", plan, "the plan that schedule() returned, modified only with without() and only()")
        return rows

    def __repr__(self) -> str:
        parts = [f"{o.request_id}: {_description(r, o, n)}" for r, o, n in self._rows()] + self._other_parts()
        return f"<step {self.output.step_id}: {'; '.join(parts) or 'nothing to compute'}>"

    def _rows(self) -> list[tuple[ScheduledSequence, RowOwner, int]]:
        """Returns each scheduled sequence, its owner, and the maximum number of tokens that it computes."""
        rows = self.output.scheduled
        num_tokens = self.output.num_multi_step_tokens or [row.num_tokens for row in rows]
        return list(zip(rows, self.owners, num_tokens, strict=True))

    def _other_parts(self) -> list[str]:
        """Returns descriptions of everything that the step does besides computing tokens."""
        output = self.output
        counts = {
            "blocks are copied": len(output.blocks_to_copy),
            "blocks are swapped out": len(output.blocks_to_swap_out),
            "blocks are swapped in": len(output.blocks_to_swap_in),
            "encoder inputs are computed": len(output.encoder_inputs),
        }
        named = {"preempted": output.preempted, "ended": output.ended, "removed": self.dropped}
        parts = [f"{count} {what}" for what, count in counts.items() if count]
        return parts + [f"{what}: {', '.join(ids)}" for what, ids in named.items() if ids]

    def _repr_html_(self) -> str:
        """Returns an inline SVG picture, without scripts and external resources."""
        rows, step = self._rows(), self.output
        longest = max((row.start + n for row, _, n in rows), default=1)
        drawn = "".join(_row_svg(i, *row, _BAR_WIDTH / longest) for i, row in enumerate(rows))
        height = _ROW_HEIGHT * len(rows) + 2
        picture = (
            f'<svg viewBox="0 0 {_WIDTH} {height}" style="display:block;width:100%;max-width:{_WIDTH}px" '
            f'font-size="12" fill="currentColor">{drawn}</svg>'
        )
        kind = "multi-step decoding" if step.num_multi_step_tokens else f"{step.num_batched_tokens} tokens"
        head = f"<b>Step {step.step_id}</b>: {kind}, {len(rows)} sequences, {len(step.samples)} samples"
        legend = f"{_legend(_bar(0, 14, 'cached'))} cached &ensp; {_legend(_bar(0, 14, 'new'))} computed now"
        foot = "".join(f"<div>{html.escape(part)}</div>" for part in self._other_parts())
        return (
            f'<div style="font-size:12px;line-height:1.7"><div>{head} &ensp; {legend}</div>'
            f"{picture if rows else ''}{foot}</div>"
        )


class StepPlans(EngineFeature):
    """Methods of LLMEngine that plan a step and run it."""

    _last_plan: StepPlan | None = None

    def schedule(self) -> StepPlan:
        """Plans the next step without running it. `run` runs the plan, and `step` runs it unchanged.

        The plan is made after the results of all previous steps have arrived. It replaces a plan that has not
        run.
        """
        self._core.check_can_run()
        self._last_plan = StepPlan.of(self._core.plan(), self._core.scheduler.find)
        return self._last_plan

    def run(self, plan: StepPlan) -> list[RequestOutput]:
        """Runs a plan, which may have been edited, and returns the same as `step`.

        Raises:
            ValueError: If `plan` is not the last plan, has already run, or was changed other than by
                `without` and `only`.
        """
        self._core.check_can_run()
        last = self._last_plan
        if (
            last is None
            or self._core.planned is not last.output
            or plan.output.step_id != last.output.step_id
        ):
            allowed = "the last plan that schedule() returned, not yet run or replaced"
            given, remedy = Text(f"a plan of step {plan.output.step_id}"), ". Call schedule() for a new one"
            raise ArgumentError("plan", given, allowed, remedy=remedy)
        rows = last.rows_of(plan)
        return step_outputs(self._core.run_planned(None if plan.output == last.output else rows))


def _description(row: ScheduledSequence, owner: RowOwner, num_tokens: int) -> str:
    """Returns a description of the tokens that a sequence computes in the step."""
    stop, length = row.start + num_tokens, owner.num_prompt_tokens
    if row.start >= length:
        return f"decodes up to {num_tokens} tokens" if num_tokens > 1 else f"decodes at position {row.start}"
    whole = "its prompt" if row.num_tokens == length else f"tokens {row.start} to {stop - 1} of {length}"
    return f"computes {whole}" + (f" of {length} tokens" if row.num_tokens == length else " of its prompt")


def _row_svg(i: int, row: ScheduledSequence, owner: RowOwner, num_tokens: int, scale: float) -> str:
    """Returns the i-th line of the picture as SVG: a request's name, its bar, and a description."""
    name = owner.request_id if len(owner.request_id) <= 18 else f"{owner.request_id[:17]}…"
    name += f" #{owner.index}" if owner.index else ""
    start, width = row.start * scale, max(num_tokens * scale, 3.0)
    bars = _bar(_BAR_LEFT, start, "cached") + _bar(_BAR_LEFT + min(start, _BAR_WIDTH - 3), width, "new")
    return (
        f'<g transform="translate(0 {i * _ROW_HEIGHT + 2})"><text x="0" y="14">{html.escape(name)}</text>'
        f'{bars}<text x="{_TEXT_LEFT}" y="14">{html.escape(_description(row, owner, num_tokens))}</text></g>'
    )


def _bar(left: float, width: float, kind: str) -> str:
    """Returns an SVG bar: an outline for cached tokens, a filled bar for tokens computed in this step."""
    paint = 'fill="none" stroke="currentColor"' if kind == "cached" else 'fill="hsl(210,70%,50%)"'
    return f'<rect x="{left:.1f}" y="4" width="{width:.1f}" height="12" {paint}/>' if width else ""


def _legend(bar: str) -> str:
    """Returns a small SVG picture of a bar for the legend."""
    return f'<svg viewBox="-1 0 17 20" width="15" height="16" style="vertical-align:-4px">{bar}</svg>'
