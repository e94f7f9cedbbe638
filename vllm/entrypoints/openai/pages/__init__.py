"""Pages for people, each one file without other assets."""
