"""A fleet of engine cores as an application of Ray Serve; see docs/fleet.md.

serve run vllm.ray_serve:app model=deepseek-v4 replicas=4 flags="--block-size 32"

arguments.py    what the builder takes, checked
application.py  the application: one ingress with all routes, replicas that are engine cores
replica.py      a replica: one engine core, its news, its requests
ingress.py      the HTTP side: the server's own application over all replicas
cores.py        the replicas as one handle of engine cores, in the ingress
placement.py    Serve's request router, carrying the router of -dp
"""

from vllm.ray_serve.application import app
from vllm.ray_serve.arguments import FleetArgs

__all__ = ["FleetArgs", "app"]
