"""Objects within the bodies of requests."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


def _as_integer(value: Any) -> Any:
    """Returns a float without a fraction as an integer: to JSON both are the same number."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def as_integers(values: Any) -> Any:
    """Returns a list in which floats without a fraction are integers, also within inner lists."""
    if not isinstance(values, list) or {float, list}.isdisjoint(map(type, values)):
        return values
    return [as_integers(value) if isinstance(value, list) else _as_integer(value) for value in values]


Integer = Annotated[int, BeforeValidator(_as_integer)]
Integers = Annotated[list[int], BeforeValidator(as_integers)]


class Part(BaseModel):
    """An object within a body."""

    model_config = ConfigDict(extra="allow", strict=True)


class StreamOptions(Part):
    """What a streamed answer holds in addition to its choices."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = Field(None, description="true is an error.")

    @property
    def asks_for_anything(self) -> bool:
        """True if an option is on."""
        return bool(self.include_usage or self.continuous_usage_stats or self.include_obfuscation)


class Function(Part):
    """A function that the model may call."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="A JSON schema of an object.")
    strict: bool | None = None


class Tool(Part):
    """A tool, which is a function."""

    type: Literal["function"]
    function: Function


class FunctionName(Part):
    """Names a function."""

    name: str


class NamedTool(Part):
    """The tool that has to be called."""

    type: Literal["function"]
    function: FunctionName
