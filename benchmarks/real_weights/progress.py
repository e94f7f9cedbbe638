"""Lines that say how far a run is, and since when."""

import sys
import time

_BEGIN = time.monotonic()


def tell(what: str) -> None:
    """Print a line behind the minutes and seconds since this program began."""
    minutes, seconds = divmod(int(time.monotonic() - _BEGIN), 60)
    print(f"{minutes:3d}:{seconds:02d} {what}", file=sys.stderr, flush=True)
