"""``python -m ravnest``: the same as the command ``ravnest``."""

from ravnest.cli.app import main

main()
