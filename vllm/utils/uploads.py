"""Arrays of the host on a device, without the host waiting for it."""

import numpy as np
import torch


def upload(values: np.ndarray, device: torch.device) -> torch.Tensor:
    """Return an array as a tensor on a device; on a CPU they may share memory.

    A GPU copies from pinned memory, which torch keeps until the copy was made: one from ordinary
    memory would have the host wait.
    """
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
