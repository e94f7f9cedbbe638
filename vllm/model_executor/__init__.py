"""The model, its layers and its weights."""
