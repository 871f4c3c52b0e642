"""Exceptions that Ravnest raises on purpose.

RavnestError
├── SplitError (ValueError)          the model cannot be split as requested
│   ├── CaptureError                 its forward cannot be captured as a graph
│   ├── OperatorError                a graph uses an operator outside the allow-list
│   └── ExactnessError               the stages compute different results than the model
├── StageFormatError (ValueError)    a file is damaged, forged or of another format
├── StageInputError (ValueError)     inputs or parameters do not fit the stage
├── OperandError (ValueError)        a stage gives an operator arguments that it must not get
├── NodeConfigError (ValueError)     node_configs.json has a mistake
├── PlanError (ValueError)           the nodes cannot hold or run the model
├── FusionError (ValueError)         the saved stages do not form one model
├── SettingsError (ValueError)       an argument of Node or Trainer is invalid
├── LaunchError (ValueError)         nodes cannot be started on this machine
├── DataError (ValueError)           batches of Root and Leaf differ, or do not fit the model
├── JobError (ValueError)            a job cannot be submitted as given
├── JobEndedError                    a job ended without a trained model
├── RunError                         the run ended on all nodes; the message has the reason
│   └── RunInterruptedError          a node was lost; training can continue from a checkpoint
├── UnsafeFolderError (ValueError)   other users could read or change a folder of secrets
├── ServerError                      communication with the intermediary server failed
│   ├── ServerUnreachableError       no Ravnest server answers at its address
│   └── ServerRefusedError           the server rejected the request
├── WireError                        bytes from a peer are damaged, hostile or of another version
└── TransportError                   communication with a peer failed
    ├── UnreachableError             nothing answers at its address
    ├── RefusedError                 the peer rejected the connection
    │   └── WrongCertificateError    another machine answers, or one without a certificate of the plan
    ├── LinkClosedError              the link to the peer is closed or lost
    ├── AddressInUseError            a node cannot listen at its address
    └── RelayError                   a relay refused, or cannot forward

A message says what happened, why, and what to do. User mistakes are ``ValueError``; a failing
``assert`` is a bug in Ravnest.
"""


class RavnestError(Exception):
    """Base of all errors that Ravnest raises on purpose."""


class SplitError(RavnestError, ValueError):
    """The model cannot be split as requested."""


class CaptureError(SplitError):
    """The model's forward cannot be captured as a graph."""


class OperatorError(SplitError):
    """A graph uses an operator outside the allow-list."""


class ExactnessError(SplitError):
    """The stages compute different results than the model."""


class StageFormatError(RavnestError, ValueError):
    """A file of a stage, node or plan is damaged, forged or of another format."""


class StageInputError(RavnestError, ValueError):
    """Inputs or parameters do not fit the stage."""


class OperandError(RavnestError, ValueError):
    """A stage gives an operator sizes or values with which it would leave its tensors or not end."""


class NodeConfigError(RavnestError, ValueError):
    """The node configuration file has a mistake."""


class PlanError(RavnestError, ValueError):
    """The nodes cannot hold or run the model."""


class FusionError(RavnestError, ValueError):
    """The saved stages do not form one model."""


class SettingsError(RavnestError, ValueError):
    """An argument of Node or Trainer is invalid."""


class LaunchError(RavnestError, ValueError):
    """Nodes cannot be started on this machine."""


class DataError(RavnestError, ValueError):
    """Batches of Root and Leaf differ, or do not fit the model."""


class JobError(RavnestError, ValueError):
    """A job cannot be submitted as given."""


class JobEndedError(RavnestError):
    """A job ended without a trained model."""


class RunError(RavnestError):
    """The run ended on all nodes; the message has the reason."""


class RunInterruptedError(RunError):
    """A node was lost; training can continue from a checkpoint."""


class UnsafeFolderError(RavnestError, ValueError):
    """Other users could read or change a folder that holds secrets."""


class ServerError(RavnestError):
    """Communication with the intermediary server failed."""


class ServerUnreachableError(ServerError):
    """No Ravnest server answers at the address."""


class ServerRefusedError(ServerError):
    """The server rejected the request."""

    def __init__(self, message: str, status: int, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        """HTTP status code."""
        self.retry_after = retry_after
        """Seconds after which the server may accept the request; ``None`` if it did not say."""


class WireError(RavnestError):
    """Bytes from a peer are damaged, hostile or of another version; or a value cannot be encoded."""


class TransportError(RavnestError):
    """Communication with a peer failed."""


class UnreachableError(TransportError):
    """Nothing answers at the peer's address."""


class RefusedError(TransportError):
    """The peer rejected the connection."""


class WrongCertificateError(RefusedError):
    """The machine that answers has no certificate of the expected node."""


class LinkClosedError(TransportError):
    """The link to the peer is closed or lost."""


class AddressInUseError(TransportError):
    """A node cannot listen at its address."""


class RelayError(TransportError):
    """A relay refused a node, or cannot forward its bytes."""
