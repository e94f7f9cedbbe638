"""Real packages against a real server: ``make clients``."""
