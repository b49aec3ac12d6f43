"""Other weights for a running engine, and what becomes of all that the old ones have computed."""

import uuid
from typing import TYPE_CHECKING, Any, Literal

from jax_paged.checks import check_choice
from jax_paged.engine import prefixes

if TYPE_CHECKING:
    from jax_paged.engine.llm_engine import LLMEngine

Running = Literal["error", "recompute", "keep"]


def update(engine: "LLMEngine", weights: Any, running: Running) -> None:
    """Exchanges the weights between two steps; see LLMEngine.update_weights."""
    check_choice("running", running, ("error", "recompute", "keep"))
    is_busy, manager = not engine.drain(), engine.scheduler.block_manager
    if is_busy and running == "error":
        raise RuntimeError(
            "requests are running; finish or abort them, or pass running='recompute' or 'keep'"
        )
    pinned = dict(manager.pinned)
    if pinned and is_busy:
        names = ", ".join(map(repr, pinned))
        raise RuntimeError(
            f"the prefixes {names} are pinned: unpin them, or let all requests finish, so that they can be "
            "computed again"
        )
    engine.settle()
    engine.executor.update_weights(weights)
    for name in pinned:
        manager.unpin(name)
    engine.scheduler.forget_prefixes(uuid.uuid4().hex if running == "keep" else None)
    for name, prefix in pinned.items():
        prefixes.pin(engine, name, prefix.token_ids, prefix.salt)
