"""EngineFeature: the base class of features that add methods to LLMEngine."""

from jax_paged.config.engine_args import EngineArgs
from jax_paged.engine.engine_core import EngineCore
from jax_paged.engine.input_processor import InputProcessor
from jax_paged.engine.synchronized import Synchronized
from jax_paged.engine.text.tokenizer import Tokenizer


class EngineFeature(Synchronized):
    """Base class of features that add methods to LLMEngine. LLMEngine inherits from all of them.

    Attributes:
        args: The arguments that the engine was made from.
        tokenizer: The model's tokenizer; None if the engine has none.
        input_processor: Checks requests.
    """

    args: EngineArgs
    tokenizer: Tokenizer | None
    input_processor: InputProcessor
    _core: EngineCore

    def _forget_prefixes(self, kept_salt: str | None) -> None:
        """Empties the prefix cache, because the weights or the KV cache have changed.

        PinnedPrefixes extends this method: it also recomputes the pinned prefixes.

        Args:
            kept_salt: A salt that no request has used. Running requests keep their computed tokens under
                this cache salt, so that other requests do not share them. None recomputes running requests
                instead.
        """
        self._core.scheduler.forget_prefixes(kept_salt)
