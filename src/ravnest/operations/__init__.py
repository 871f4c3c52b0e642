"""Import paths of the documented API; the code is in ``ravnest.formation``."""
