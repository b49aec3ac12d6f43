"""Objects inside request bodies."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


def _as_integer(value: Any) -> Any:
    """Returns a float without a fraction as an integer, because JSON does not distinguish 1.0 from 1."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def as_integers(values: Any) -> Any:
    """Returns a list with its floats without a fraction as integers, also in nested lists."""
    if not isinstance(values, list) or {float, list}.isdisjoint(map(type, values)):
        return values
    return [as_integers(value) if isinstance(value, list) else _as_integer(value) for value in values]


Integer = Annotated[int, BeforeValidator(_as_integer)]
Integers = Annotated[list[int], BeforeValidator(as_integers)]


class NestedObject(BaseModel):
    """Base class of objects inside request bodies."""

    model_config = ConfigDict(extra="allow", strict=True)


class StreamOptions(NestedObject):
    """Options of a streamed response."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = Field(None, description="true is not supported.")

    @property
    def has_any(self) -> bool:
        """Whether any option is set to true."""
        return bool(self.include_usage or self.continuous_usage_stats or self.include_obfuscation)


class Function(NestedObject):
    """A function that the model may call."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="JSON schema of the arguments.")
    strict: bool | None = None


class Tool(NestedObject):
    """A tool that the model may call. Only functions are supported."""

    type: Literal["function"]
    function: Function


class FunctionName(NestedObject):
    """The name of a function."""

    name: str


class NamedTool(NestedObject):
    """The function that the model must call."""

    type: Literal["function"]
    function: FunctionName
