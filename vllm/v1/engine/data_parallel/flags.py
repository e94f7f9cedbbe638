"""Flags of several engine cores behind one front end."""

import argparse
from importlib.util import find_spec

from vllm.config.parallel import DATA_PARALLEL_BACKENDS, DATA_PARALLEL_ROUTINGS
from vllm.exceptions import ConfigError


def add_data_parallel_flags(group: argparse._ArgumentGroup) -> None:
    """Add the flags."""
    group.add_argument(
        "--data-parallel-size",
        "-dp",
        type=int,
        default=1,
        metavar="N",
        help="Engine cores behind this server, each with a model and a KV cache of its own. "
        "Default: 1.",
    )
    group.add_argument(
        "--data-parallel-size-local",
        "-dpl",
        type=int,
        metavar="N",
        help="The same number: cores on other machines take --data-parallel-backend ray.",
    )
    group.add_argument(
        "--data-parallel-backend",
        "-dpb",
        choices=DATA_PARALLEL_BACKENDS,
        default="mp",
        help="mp: processes; ray: actors of a ray cluster (needs the package ray).",
    )
    group.add_argument(
        "--data-parallel-address",
        "-dpa",
        default="127.0.0.1",
        metavar="HOST",
        help="Of this machine, as cores on a ray cluster's others reach it. Default: 127.0.0.1.",
    )
    group.add_argument(
        "--data-parallel-routing",
        choices=DATA_PARALLEL_ROUTINGS,
        default="prefix",
        help="Who gets a request: the core that caches most of its prompt, unless it has too much "
        "to do; or each in turn, to compare. Default: prefix.",
    )
    group.add_argument(
        "--data-parallel-fault-tolerance",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="A core that dies takes only its own requests along; else the server ends.",
    )
    group.add_argument(
        "--data-parallel-restarts",
        type=int,
        default=0,
        metavar="N",
        help="How often each core that died is started again, with fault tolerance. Default: 0.",
    )


def check_data_parallel_backend(backend: str, size: int) -> None:
    """Refuse a backend whose package is not installed.

    Raises:
        ConfigError: It is ray, and ray is not there.
    """
    if size > 1 and backend == "ray" and find_spec("ray") is None:
        raise ConfigError(
            "data_parallel_backend='ray' needs the package ray: install it (pip install ray), or "
            "use mp for cores on this machine."
        )
