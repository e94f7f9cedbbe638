"""What a request needs to resume at a boundary."""
