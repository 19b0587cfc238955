"""Command-line tools: one module per subcommand of `omni-actors`."""
