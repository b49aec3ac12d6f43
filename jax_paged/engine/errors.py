"""The errors of an engine that runs no more, or not now."""


class EngineDeadError(RuntimeError):
    """The engine has failed, was stopped, or is closed; the name is vLLM's."""


class EngineAsleepError(ValueError):
    """The engine sleeps, or is about to, and takes nothing to run until it is woken."""


# What a request may be told in place of an output, through no fault of its own.
NOT_RUNNING = (EngineDeadError, EngineAsleepError)


def stopped_by(error: BaseException | None) -> EngineDeadError:
    """Returns an error of its own for each who asks an engine that an error has stopped."""
    if isinstance(error, EngineDeadError):
        return EngineDeadError(str(error))
    stopped = EngineDeadError(f"the engine has stopped: {str(error) or repr(error)}")
    stopped.__cause__ = error
    return stopped
