"""Every refusal of this package, with the exit status that a command ends with.

A message is one line: what is wrong, with which input, and what to do about it.
"""

from __future__ import annotations

from rmsnorm_deploy.spoken import spoken

EXIT_OK = 0
EXIT_PARITY = 1
EXIT_INPUT = 2
EXIT_BACKEND = 3
EXIT_FAULT = 70  # as sysexits.h has it: an error in the program itself
EXIT_INTERRUPTED = 130  # as a shell gives it: 128 and the number of the signal
EXIT_PIPE = 141
EXIT_TERMINATED = 143


class DeployError(Exception):
    """Base of all refusals; ``exit_code`` is the status of a command that ends with it."""

    exit_code = EXIT_INPUT

    def __init__(self, message: str) -> None:
        super().__init__(spoken(message))


class InputError(DeployError):
    """The user's file, option or argument cannot be used as it is."""

    exit_code = EXIT_INPUT


class BackendUnavailable(DeployError):
    """A backend that was asked for by name is not on this machine."""

    exit_code = EXIT_BACKEND


class ParityError(DeployError):
    """A backend does not compute what the model computes."""

    exit_code = EXIT_PARITY
