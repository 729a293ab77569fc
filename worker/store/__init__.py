"""Received shards on disk: pieces of models that another node has sent, kept for the next load."""
