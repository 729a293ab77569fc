"""What a slot remembers: its tokens, and its caches alone and in a lane."""
