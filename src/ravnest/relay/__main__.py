"""``python -m ravnest.relay``: see ``ravnest.relay.program``."""

from ravnest.relay.program import main

main()
