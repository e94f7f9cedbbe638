"""Trained models that package registries ship, and what is checked on them."""
