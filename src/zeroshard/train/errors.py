"""TrainingError: ends a run with a message that explains everything, so no stack trace is shown."""


class TrainingError(RuntimeError):
    """A run cannot continue. The message says what was got, what was expected and what to do."""


class AllRanksError(TrainingError):
    """An error that every rank raises at the same point, so that all ranks can end together."""
