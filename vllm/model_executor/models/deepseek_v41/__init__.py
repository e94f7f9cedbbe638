"""DeepSeek-V4.1: what it has beside DeepSeek-V4's parts, from its configuration to its caches."""
