"""The checkpoint inside this package, and the script that makes it."""
