"""What ends the script of a process of `tnt-jax tune` once its trials are done."""


class TrialsDone(BaseException):
    """Ends the script after the trials: its further lines count on a trained model.

    Not an `Exception`, so that the script's own handlers of errors let it pass.
    """
