"""LoRARequest: which adapter a request is computed with; the names are vLLM's."""

import dataclasses

from jax_paged.arguments.plain_values import make_plain
from jax_paged.arguments.suggestions import suggests_fields
from jax_paged.errors import Problems, check, check_int


@suggests_fields
@dataclasses.dataclass(frozen=True)
class LoRARequest:
    """An adapter, as a request names it.

    Args:
        lora_name: What it is called.
        lora_int_id: Its number, at least 1: one number is one adapter, until it is removed.
        lora_path: The folder that PEFT saved it to.

    Raises:
        ValueError: If a value is out of range.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str

    def __post_init__(self) -> None:
        make_plain(self)
        problems, note = Problems(), check
        for name in ("lora_name", "lora_path"):
            value = getattr(self, name)
            problems.note(note, isinstance(value, str) and bool(value), name, value, "a non-empty string")
        problems.note(check_int, "lora_int_id", self.lora_int_id, 1)
        problems.raise_if_any()

    @property
    def name(self) -> str:
        """lora_name."""
        return self.lora_name

    @property
    def adapter_id(self) -> int:
        """lora_int_id."""
        return self.lora_int_id

    @property
    def path(self) -> str:
        """lora_path."""
        return self.lora_path
