"""Requests, their sessions, the scheduler and outputs. Pure."""
