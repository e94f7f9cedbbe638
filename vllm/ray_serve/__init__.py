"""A fleet of engine cores as an application of Ray Serve; see docs/fleet.md.

serve run vllm.ray_serve:app model=deepseek-v4 replicas=4 flags="--block-size 32"

arguments.py       what the builder takes, checked
application.py     the application: one ingress with all routes, replicas that are engine cores
replica.py         a replica: one engine core, its updates, its requests
ingress.py         the HTTP side: the server's own application over all replicas
cores.py           the replicas as one handle of engine cores, in the ingress
neighbours.py      what a replica pulls of others' caches, and hands on when it is removed
placement.py       who there is, and the router of -dp; nothing of Ray
request_router.py  Serve's seam that carries it
scaling.py         how many replicas a load needs
"""

from typing import Any

from vllm.ray_serve.arguments import FleetArgs

__all__ = ["FleetArgs", "app"]


def __getattr__(name: str) -> Any:
    # Late: what needs Ray loads when it is asked for.
    if name == "app":
        from vllm.ray_serve.application import app  # noqa: PLC0415

        return app
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
