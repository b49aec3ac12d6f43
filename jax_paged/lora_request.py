"""LoRARequest: the adapter that a request uses; the names are vLLM's."""

import dataclasses

from jax_paged.arguments.plain_values import make_plain
from jax_paged.arguments.suggestions import suggests_fields
from jax_paged.errors import Problems, check, check_int


@suggests_fields
@dataclasses.dataclass(frozen=True)
class LoRARequest:
    """Adapter that a request uses, such as a LoRA adapter saved by PEFT.

    Example:
        >>> adapter = LoRARequest("sql", 1, "path/to/adapter")
        >>> llm.generate("SELECT", lora_request=adapter)  # needs LLM(..., enable_lora=True)

    Args:
        lora_name: Name of the adapter.
        lora_int_id: Id of the adapter, at least 1. An id refers to the same adapter until that adapter is
            removed.
        lora_path: The folder that PEFT saved the adapter to.

    Raises:
        ValueError: If a value is out of range.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str

    def __post_init__(self) -> None:
        make_plain(self)
        problems = Problems()
        for name in ("lora_name", "lora_path"):
            value = getattr(self, name)
            problems.note(check, isinstance(value, str) and bool(value), name, value, "a non-empty string")
        problems.note(check_int, "lora_int_id", self.lora_int_id, 1)
        problems.raise_if_any()

    @property
    def name(self) -> str:
        """The adapter's name, lora_name."""
        return self.lora_name

    @property
    def adapter_id(self) -> int:
        """The adapter's id, lora_int_id."""
        return self.lora_int_id

    @property
    def path(self) -> str:
        """The adapter's folder, lora_path."""
        return self.lora_path
