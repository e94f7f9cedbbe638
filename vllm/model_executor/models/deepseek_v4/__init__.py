"""DeepSeek-V4: configuration, cache geometry and the model itself."""
