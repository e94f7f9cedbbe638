"""Prefill apart from decode: prefixes that one engine computed, handed over to another.

params      what a request says of its transfer, and what the prefilling engine answers
manifest    what both engines must have in common; fingerprint: of their weights
regions     which bytes travel; host_memory, staged_memory: where they lie
frames      bytes on a connection; messages: what control frames say
leases      what the prefilling engine holds, and for whom
serving     its side of one connection; pulling: the other's, with retries and deadlines
tcp         both over sockets
direct      rows written into the other's memory; mooncake: by the Mooncake transfer engine
orders      what the connector's two sides tell each other; worker: the worker's side
settings    what an operator may say; peers: comparing engines at start
requests    the scheduler's side of the connector: who loads what, who gives what
connector   the connector itself
"""
