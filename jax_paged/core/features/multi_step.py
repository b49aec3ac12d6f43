"""Bursts: several decode steps of all running sequences in one, without the host in between."""

from jax_paged.core.batch_slots import Row
from jax_paged.core.block_manager import BlockManager
from jax_paged.core.request_queues import RequestQueues
from jax_paged.core.step_builder import StepBuilder
from jax_paged.core.stop_conditions import StopConditions


class BurstPlanner:
    """Decides whether the next step is a burst, and gives the sequences the blocks of all its tokens.

    A sequence that a burst does not end has used all of these blocks; one that ends gives back those that it
    has not used with the others, and they are held back while the burst is in flight. So a burst may follow
    another one whose results are not there yet, and so may any other step.

    Args:
        block_manager: Owner of the blocks.
        queues: Owner of the requests.
        stop_conditions: Say which sequences can go on without the host, and for how long.
        size: Maximum decode steps of a burst; 1 for no bursts.
    """

    def __init__(
        self, block_manager: BlockManager, queues: RequestQueues, stop_conditions: StopConditions, size: int
    ) -> None:
        self.size = size
        self._manager = block_manager
        self._queues = queues
        self._stop_conditions = stop_conditions

    def plan(self, step: StepBuilder) -> bool:
        """Makes an empty step a burst of all running sequences, if nobody waits for anything.

        Returns:
            Whether it is one; if not, nothing but windows has changed.
        """
        queues, stop_conditions, tables = self._queues, self._stop_conditions, self._manager.block_tables
        if self.size == 1 or queues.waiting or queues.swapped:
            return False
        rows: list[Row] = []
        for group in queues.running.values():
            for seq in group.unfinished:
                num_left = stop_conditions.num_left(group, seq)
                if num_left <= 0:
                    continue  # it ends with the tokens that are being drawn
                decodes = seq.has_output and seq.num_new_tokens == 1 and seq in tables
                if not decodes or not stop_conditions.can_burst(group, seq):
                    return False
                rows.append((group, seq, min(self.size, num_left), (seq,)))
        if len(rows) > step.budget or all(num_tokens == 1 for _, _, num_tokens, _ in rows):
            return False
        copies = self._manager.append_slots([(seq, num_tokens) for _, seq, num_tokens, _ in rows])
        if copies is None:
            return False
        step.is_burst = True
        step.rows_of_one += rows
        step.copies += copies
        step.budget -= len(rows)
        return True
