"""StepTimes: durations of steps with and without draft tokens."""

from jax_paged.core.features.speculation.num_drafts import padded
from jax_paged.core.model_runner_output import ModelRunnerOutput
from jax_paged.core.scheduler_output import SchedulerOutput
from jax_paged.speculation import Speculation

# Weight of the newest duration in the moving average. Durations are clipped to _CLIP times the average. The
# average is used after _MIN_TIMES durations, and starts at the smallest of these.
_NEWEST, _CLIP, _MIN_TIMES = 0.2, 1.5, 3


class StepTimes:
    """Mean durations of steps by their size, computed from the times that are passed to the scheduler.

    Args:
        speculation: Settings that model the duration of steps until it has been measured.
    """

    def __init__(self, speculation: Speculation) -> None:
        self._speculation = speculation
        self._plain: dict[int, tuple[float, int]] = {}
        self._verifying: dict[tuple[int, int], tuple[float, int]] = {}

    def record(
        self, output: SchedulerOutput, result: ModelRunnerOutput, seconds: float, max_tokens: int
    ) -> None:
        """Records the duration of a step if all of its sequences decode.

        Args:
            output: The step.
            result: Its result.
            seconds: Its duration.
            max_tokens: Number of token rows in the largest step with draft tokens.
        """
        if len(output.samples) != len(output.scheduled) or output.new_sequences:
            return
        num_rows = output.num_batched_tokens
        num_drafts = max([sample.num_logits - 1 for sample in output.samples], default=0)
        if num_drafts and not output.scores_drafts:
            num_passes = num_drafts + 1 if result.drafts else 0
            self.record_verifying(padded(num_rows, max_tokens), num_passes, seconds)
        elif num_rows == len(output.scheduled) > 0:
            num_steps = max(map(len, result.token_ids)) if output.num_multi_step_tokens else 1
            self.record_plain(num_rows, seconds / max(1, num_steps))

    def record_plain(self, num_seqs: int, seconds: float) -> None:
        """Records the duration of a step in which each of `num_seqs` sequences receives one token."""
        size = _size(num_seqs)
        self._plain[size] = _mean(self._plain.get(size), seconds)

    def record_verifying(self, num_rows: int, num_passes: int, seconds: float) -> None:
        """Records the duration of a step with draft tokens.

        Args:
            num_rows: Number of token rows, including padding.
            num_passes: Number of draft model passes.
            seconds: Duration of the step.
        """
        self._verifying[num_rows, num_passes] = _mean(self._verifying.get((num_rows, num_passes)), seconds)

    def plain(self, num_seqs: int) -> float | None:
        """Returns the duration (seconds) of a step without draft tokens; None until it is known."""
        mean, num_times = self._plain.get(_size(num_seqs), (0.0, 0))
        return mean if num_times >= _MIN_TIMES else None

    def verifying(self, num_rows: int, num_passes: int, num_seqs: int) -> float:
        """Returns the duration (seconds) of a step with draft tokens. It is modeled until it is known."""
        mean, num_times = self._verifying.get((num_rows, num_passes), (0.0, 0))
        return mean if num_times >= _MIN_TIMES else self.modeled(num_rows, num_passes, num_seqs)

    def modeled(self, num_rows: int, num_passes: int, num_seqs: int) -> float:
        """Returns the modeled duration (seconds) of a step with draft tokens.

        The model scales the measured duration of a step without draft tokens. The target model takes time
        proportional to num_free_rows plus the number of token rows. Each pass of the draft model takes the
        fraction model_cost of the target model's time in a step without draft tokens. A step without draft
        tokens also includes one pass of the draft model.
        """
        plain, speculation = self.plain(num_seqs), self._speculation
        assert plain is not None, "the duration of steps without draft tokens is not known"
        free, share = speculation.num_free_rows, speculation.model_cost
        plain_cost = (free + num_seqs) * (1 + share)
        return plain * (free + num_rows + share * num_passes * (free + num_seqs)) / plain_cost


def _size(num_seqs: int) -> int:
    """Returns the index of the group with this number of sequences: 1, 2, 3 to 4, 5 to 8, and so on."""
    return (num_seqs - 1).bit_length()


def _mean(known: tuple[float, int] | None, seconds: float) -> tuple[float, int]:
    if known is None:
        return seconds, 1
    mean, num_times = known
    if num_times < _MIN_TIMES:
        return min(mean, seconds), num_times + 1  # the first executions of a program are slow
    seconds = min(seconds, _CLIP * mean)
    return mean + _NEWEST * (seconds - mean), num_times + 1
