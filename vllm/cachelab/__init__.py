"""The cache lab: a running cache recorded, watched, replayed and simulated.

``trace`` writes down what decides about the cache, ``view`` shows a running one, ``twin`` replays
a recording and explains it, ``sim`` runs the server's own scheduler and cache under a clock of its
own. The cache itself (``vllm.v1.core``) knows none of it.
"""
