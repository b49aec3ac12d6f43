"""Errors of an engine that can't run requests, permanently or at the moment."""


class EngineDeadError(RuntimeError):
    """Error of an engine that has failed, was stopped, or is closed. The name is vLLM's."""


class EngineAsleepError(ValueError):
    """Error of an engine that sleeps, or is about to, and accepts no requests until it is woken up."""


# Errors that a valid request may receive because the engine is not running.
NOT_RUNNING = (EngineDeadError, EngineAsleepError)


def stopped_by(error: BaseException | None) -> EngineDeadError:
    """Returns a new EngineDeadError for an engine that has stopped because of `error`.

    Each caller gets its own error object, because raising one changes its traceback.
    """
    if isinstance(error, EngineDeadError):
        return EngineDeadError(str(error))
    stopped = EngineDeadError(f"the engine has stopped: {str(error) or repr(error)}")
    stopped.__cause__ = error
    return stopped
