"""A node among others: the gRPC service, the stage's loop, the hop to the next one."""
