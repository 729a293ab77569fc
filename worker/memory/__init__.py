"""The memory of a slot: its tokens, and its caches alone and in a lane."""
