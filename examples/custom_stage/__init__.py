"""A stage with a custom engine; docs/extending.md walks through it."""
