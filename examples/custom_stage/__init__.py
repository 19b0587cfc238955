"""A stage with an engine of one's own; docs/extending.md walks through it."""
