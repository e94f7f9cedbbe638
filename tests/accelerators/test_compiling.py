"""Kernels as a card would compile them: the interpreter takes more than Triton's compiler does."""

import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

# Of these one program serves any number of rows, up to how numbers divide.
BY_ELEMENTS = {"_soft_cap_kernel", "_router_scores_kernel", "_decay_kernel", "_gate_heads_kernel"}
BY_VALUES = {"_select_kernel", "_score_kernel", "_copy_blocks_kernel", "_convolve_kernel"}


def test_triton_takes_every_kernel_and_makes_one_program_for_all_batches(tmp_path: Path) -> None:
    output = tmp_path / "found.json"
    # A process of its own: in this one kernels are interpreted.
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    del environment["TRITON_INTERPRET"]
    arguments = ["--quick", "--only", "ops", "packed", "rest", "--types", "bfloat16"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_compile", *arguments, "--output", str(output)],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    found = json.loads(output.read_text())["cuda:90"]
    programs: dict[tuple[str, ...], set[str]] = defaultdict(set)
    for item in found["kernels"]:
        fixed = [word for word in item["constants"].split() if not word.startswith(("int", "1"))]
        programs[item["kernel"], *fixed].add(item["program"])
    assert len({kernel for kernel, *_ in programs}) > 25
    several = {kernel for (kernel, *_), made in programs.items() if len(made) > 1}
    assert several <= BY_ELEMENTS | BY_VALUES
