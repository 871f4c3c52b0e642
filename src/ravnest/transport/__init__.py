"""How nodes reach each other, and how they know whom they reached."""
