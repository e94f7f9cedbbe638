"""Model architectures and the table of those we serve."""
