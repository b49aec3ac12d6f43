"""Generation call: the checked requests of one HTTP request, with everything needed for its response."""

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
    """One HTTP request that has been checked and tokenized, ready to run.

    Args:
        requests: One request per prompt, at least one.
        num_outputs: Number of outputs per prompt in the response.
        head: Fields of the response, or of every chunk, besides `choices`. The request ids are derived from
            its "id".
        choice: Makes a choice of the response from an output.
        record: Record of the HTTP request for the access log.
        client: Name of the client. Clients take turns in the waiting queue.
        with_prompt_logprobs: Whether the choices have the field `prompt_logprobs`, as in vLLM.
        counts_output: Whether the response contains the generated tokens. If not, as for a completion request
            with echo and max_tokens=0, the usage counts no output tokens, and each list of output token ids
            is empty.
        token_ids_in: Where the prompt's token ids are returned: in each choice ("choice"), or in the response
            next to the choices ("answer"). Each choice then also has the token ids of its output. None
            returns no token ids.
        journal: Journal of a response that another replica may have begun or may continue. None if there are
            no other replicas.
    """

    requests: Sequence[CheckedRequest]
    num_outputs: int
    head: dict[str, Any]
    choice: MakeChoice
    record: RequestRecord
    client: str = ""
    with_prompt_logprobs: bool = False
    counts_output: bool = True
    token_ids_in: Literal["choice", "answer"] | None = None
    journal: Journal | None = None

    @property
    def has_begun(self) -> bool:
        """Whether the client already has a part of the response, from another replica."""
        return self.journal is not None and self.journal.has_begun

    def prompt_ids(self, where: Literal["choice", "answer"], output: RequestOutput) -> dict[str, Any]:
        """Returns a dict with the prompt's token ids if they belong at `where`; otherwise an empty dict."""
        if self.token_ids_in != where:
            return {}
        return {"prompt_token_ids": output.encoder_prompt_token_ids or output.prompt_token_ids}

    def output_ids(self, completion: CompletionOutput) -> dict[str, Any]:
        """Returns a dict with the token ids of an output or a part of it; empty if not requested."""
        if self.token_ids_in is None:
            return {}
        return {"token_ids": list(completion.token_ids) if self.counts_output else []}

    def continues_elsewhere(self, error: ApiError) -> bool:
        """Returns whether another replica continues the response after an error of this one."""
        return self.journal is not None and isinstance(error.__cause__, EngineDeadError)
