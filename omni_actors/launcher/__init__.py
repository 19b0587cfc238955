"""What one host runs: the launcher, its node agent, and the child processes they own."""
