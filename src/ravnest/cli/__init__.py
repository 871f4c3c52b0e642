"""The ``ravnest`` command: one module per subcommand; ``app`` registers them."""
