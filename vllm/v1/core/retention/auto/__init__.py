"""The retention policy that learns from the traffic what pays."""
