"""What a process asks of its host: other processes, clocks, files, shared memory, addresses, and Ray."""
