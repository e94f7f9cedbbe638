"""Objects on their way back into the pool.

tier_restores  for requests: asked for, ordered, ended
row_loads      rows without a state, above which windows are rebuilt
warm_start     for nobody yet: what the last life used most, and the prefixes with names
"""
