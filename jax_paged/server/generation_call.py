"""Generation call: one HTTP request that generates text, ready to run."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

from jax_paged.engine.errors import EngineDeadError
from jax_paged.engine.input_processor import CheckedRequest
from jax_paged.outputs import CompletionOutput, RequestOutput
from jax_paged.server.observability.access import RequestRecord
from jax_paged.server.protocol.responses import ApiError, MakeChoice
from jax_paged.server.ray_serve.continuation import Journal


@dataclasses.dataclass(frozen=True)
class GenerationCall:
    """One HTTP request, ready to run.

    Args:
        requests: One request per prompt; at least one.
        num_outputs: Outputs per prompt that the client gets.
        head: Fields of the answer, or of every chunk of it, beside its choices. Its "id" names the requests.
        choice: Makes the choices of the answer.
        record: Notes what comes of the requests.
        client: Who asks: clients take turns where requests have to wait.
        with_prompt_logprobs: Whether the choices have the prompt's log-probabilities in vLLM's form.
        counts_output: Whether the client is told how many tokens were drawn.
        token_ids: Whether the answer has the token ids of the outputs, and where it has the prompt's: in each
            choice, or beside the choices. None leaves all of them out.
        journal: Of an answer that another replica may have begun, or may end; None if there is no other.
    """

    requests: Sequence[CheckedRequest]
    num_outputs: int
    head: dict[str, Any]
    choice: MakeChoice
    record: RequestRecord
    client: str = ""
    with_prompt_logprobs: bool = False
    counts_output: bool = True
    token_ids: Literal["choice", "answer"] | None = None
    journal: Journal | None = None

    @property
    def has_begun(self) -> bool:
        """Whether the client has a part of the answer already."""
        return self.journal is not None and self.journal.has_begun

    def prompt_ids(self, where: Literal["choice", "answer"], output: RequestOutput) -> dict[str, Any]:
        """Returns the field with the prompt's token ids, if the answer has it there."""
        if self.token_ids != where:
            return {}
        return {"prompt_token_ids": output.encoder_prompt_token_ids or output.prompt_token_ids}

    def output_ids(self, completion: CompletionOutput) -> dict[str, Any]:
        """Returns the field with the token ids of an output, or of a part of it, if the answer has it."""
        if self.token_ids is None:
            return {}
        return {"token_ids": list(completion.token_ids) if self.counts_output else []}

    def moves_on(self, error: ApiError) -> bool:
        """Returns whether another replica goes on where this one has failed."""
        return self.journal is not None and isinstance(error.__cause__, EngineDeadError)
