"""LoRA adapters, as far as the prefix cache must tell them apart."""
