"""Every error that Ravnest raises on purpose.

RavnestError
├── SplitError (ValueError)          the model cannot be split as asked
│   ├── CaptureError                 its forward cannot be captured as a graph
│   ├── OperatorError                a graph uses an operator outside the allow-list
│   └── ExactnessError               the stages compute something else than the model
├── StageFormatError (ValueError)    a stage on disk is damaged, forged or of another format
├── StageInputError (ValueError)     a stage was given inputs or parameters that do not fit it
├── NodeConfigError (ValueError)     node_configs.json has a mistake
├── PlanError (ValueError)           the nodes cannot hold or run the model
├── FusionError (ValueError)         the saved stages do not add up to one model
├── SettingsError (ValueError)       Node or Trainer was given something that does not fit
├── LaunchError (ValueError)         nodes cannot be started on this machine
├── DataError (ValueError)           batches of Root and Leaf differ, or do not fit the model
├── JobError (ValueError)            a job cannot be submitted as given
├── JobEndedError                    a job has ended without a trained model
├── RunError                         the run ended on all nodes, for the reason that it says
├── ServerError                      the intermediary server cannot be talked to
│   ├── ServerUnreachableError       nothing answers at its address, or it is another server
│   └── ServerRefusedError           it answered, and does not do what was asked
├── WireError                        bytes from a peer are damaged, hostile or of another version
└── TransportError                   a peer cannot be talked to
    ├── UnreachableError             nothing answers at its address
    ├── RefusedError                 it answered, and does not want to talk to this node
    ├── LinkClosedError              the link to it is closed or lost
    └── AddressInUseError            a node cannot listen at its address

A message says what happened, why, and what to do. User mistakes are ``ValueError``; a failing
``assert`` is a bug of ours.
"""


class RavnestError(Exception):
    """Base of all errors that Ravnest raises on purpose."""


class SplitError(RavnestError, ValueError):
    """The model cannot be split as asked."""


class CaptureError(SplitError):
    """The model's forward cannot be captured as a graph."""


class OperatorError(SplitError):
    """A graph uses an operator outside the allow-list."""


class ExactnessError(SplitError):
    """The stages compute something else than the model."""


class StageFormatError(RavnestError, ValueError):
    """A stage on disk is damaged, forged or of another format."""


class StageInputError(RavnestError, ValueError):
    """A stage was given inputs or parameters that do not fit it."""


class NodeConfigError(RavnestError, ValueError):
    """The node configuration file has a mistake."""


class PlanError(RavnestError, ValueError):
    """The nodes cannot hold or run the model."""


class FusionError(RavnestError, ValueError):
    """The saved stages do not add up to one model."""


class SettingsError(RavnestError, ValueError):
    """Node or Trainer was given something that does not fit."""


class LaunchError(RavnestError, ValueError):
    """Nodes cannot be started on this machine."""


class DataError(RavnestError, ValueError):
    """Batches of Root and Leaf differ, or do not fit the model."""


class JobError(RavnestError, ValueError):
    """A job cannot be submitted as given."""


class JobEndedError(RavnestError):
    """A job has ended without a trained model."""


class RunError(RavnestError):
    """The run ended on all nodes, for the reason that it says."""


class ServerError(RavnestError):
    """The intermediary server cannot be talked to."""


class ServerUnreachableError(ServerError):
    """Nothing answers at the server's address, or it is another server."""


class ServerRefusedError(ServerError):
    """The server answered, and does not do what was asked."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status
        """Of HTTP."""


class WireError(RavnestError):
    """Bytes from a peer are damaged, hostile or of another version; or a value cannot travel."""


class TransportError(RavnestError):
    """A peer cannot be talked to."""


class UnreachableError(TransportError):
    """Nothing answers at the peer's address."""


class RefusedError(TransportError):
    """The peer answered, and does not want to talk to this node."""


class LinkClosedError(TransportError):
    """The link to the peer is closed or lost."""


class AddressInUseError(TransportError):
    """A node cannot listen at its address."""
