"""The doors that are no HTTP: a conversation in the terminal, JSON lines, batch files, the score of a text."""
