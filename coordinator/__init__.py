"""Plan, sessions, scheduler, the chain as seen from its head, and the command line."""
