"""What macOS tells of itself: a module per tool, each a parser of what it prints. None of it was run on a Mac yet."""
