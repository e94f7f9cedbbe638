"""Kernels are interpreted here: triton asks once, when they are decorated."""

import os

os.environ["TRITON_INTERPRET"] = "1"

# Without the package these tests fail, on purpose: nothing else proves the kernels.
from tests.accelerators.interpreting import remember

remember()
