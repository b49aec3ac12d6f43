"""The error of an engine that runs no more."""


class EngineDeadError(RuntimeError):
    """The engine has failed, was stopped, or is closed; the name is vLLM's."""
