"""Integer arithmetic."""


def cdiv(a: int, b: int) -> int:
    """Return ``a / b`` rounded up."""
    return -(-a // b)
