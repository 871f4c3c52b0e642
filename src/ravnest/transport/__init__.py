"""How nodes reach each other, and how they know whom they reached."""

import os

# gRPC writes to stderr whenever a connection closes, as all do at the end of a run. It reads this
# when it is loaded, and only this package loads it.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
