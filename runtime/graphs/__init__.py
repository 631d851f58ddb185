"""Which graphs run a step, and how they come in."""
