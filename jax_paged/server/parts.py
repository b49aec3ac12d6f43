"""Objects within the bodies of requests."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Part(BaseModel):
    """An object within a body."""

    model_config = ConfigDict(extra="allow", strict=True)


class StreamOptions(Part):
    """What a streamed answer holds in addition to its choices."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = Field(None, description="true is an error.")


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
