"""The ``ravnest`` command: one module a subcommand; ``app`` only registers them."""
