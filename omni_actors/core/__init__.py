"""Pure decisions: no sockets, no event loop, no engine, no clock."""
