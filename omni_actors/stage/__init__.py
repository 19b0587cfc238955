"""A stage: an engine, the actor that drives it, and the process they live in."""
