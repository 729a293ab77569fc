"""Requests, their sessions, who steps next, and what came of them. Pure."""
