"""Links between nodes: gRPC, an in-memory implementation, and certificates."""

import os

# gRPC writes to stderr when a connection closes, which happens at the end of every run. It reads this
# variable when it is imported, and only this package imports it.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
