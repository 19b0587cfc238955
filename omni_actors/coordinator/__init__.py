"""The coordinator process, one per pipeline: sockets and clocks around the pure decisions in `core`."""
