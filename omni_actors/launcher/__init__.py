"""What runs on each host: the launcher, its node agent, and the child processes they own."""
