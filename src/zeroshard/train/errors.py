"""TrainingError: what ends a run for a reason that its message says wholly, so that no stack is shown."""


class TrainingError(RuntimeError):
    """A run that cannot go on: what was got, what was wanted, what to do."""


class AllRanksError(TrainingError):
    """One that every rank raises at the same place, so that all can end together."""
