"""The coordinator's decisions: events in, instructions out. No sockets, no clocks, no event loop."""
