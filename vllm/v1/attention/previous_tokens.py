"""Where the tokens before each of a step's are: among the step's own, or before them."""

from collections.abc import Sequence

import numpy as np
import torch

from vllm.utils.uploads import upload
from vllm.v1.attention.step_tables import PreviousTokens, RequestSlice


def find_previous(slices: Sequence[RequestSlice], device: torch.device) -> PreviousTokens | None:
    """Returns the tokens before each of a step's; None: nobody reads them.

    Of a request whose step begins at s, where N tokens before each are read:

        ids before  | s - N | .. | s - 1 |      step's rows  | s | s + 1 | .. |

    Args:
        slices: Requests with tokens, in flat-batch order.
        device: Where the tables are used.
    """
    known = [item.previous_ids for item in slices if item.previous_ids is not None]
    if not known:
        return None
    before = np.array(known, dtype=np.int64)
    num_requests, distance = before.shape
    counts = np.array([item.num_tokens for item in slices], dtype=np.int64)
    request = np.repeat(np.arange(num_requests), counts)[:, None]
    first_rows = np.cumsum(counts) - counts
    rows = np.arange(int(counts.sum()))[:, None]
    # Counted from the step's first token of the request: negative before it.
    places = rows - first_rows[request] - np.arange(1, distance + 1)
    ids = before.reshape(-1)
    index = np.where(
        places >= 0, len(ids) + first_rows[request] + places, (request + 1) * distance + places
    )
    index[(places < 0) & (ids[np.minimum(index, len(ids) - 1)] < 0)] = -1
    return PreviousTokens(upload(ids, device), upload(index, device))
