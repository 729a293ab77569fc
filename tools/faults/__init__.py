"""Faults made on purpose: real worker processes are killed, stopped, cut off and broken from inside, and watched."""
