"""Writers of DeepSeek-V4 checkpoints: the embedded one, its published spelling, quantised ones."""
