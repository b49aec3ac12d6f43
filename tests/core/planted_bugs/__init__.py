"""The bugs that mutations.py plants."""

from planted_bugs.blocks import BLOCKS
from planted_bugs.mutation import Mutation
from planted_bugs.request_edits import REQUEST_EDITS
from planted_bugs.scheduling import SCHEDULING
from planted_bugs.states import STATES
from planted_bugs.worker import WORKER

__all__ = ["MUTATIONS", "REQUEST_EDITS", "Mutation"]
MUTATIONS = [*BLOCKS, *STATES, *SCHEDULING, *WORKER, *REQUEST_EDITS]
