"""The worker on an NPU: what differs from the core's."""
