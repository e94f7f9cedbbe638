"""The tiers of the prefix cache behind the pool: host memory and a disk that outlives the process.

An object is the rows of some tokens, or the state in which a prefix is resumed. Its life:

    kept       store/      an index and slots that cannot lie; in a folder, or in host memory
    written    writes/     what requests leave that is worth its bytes, on its way to the store
    found      lookups/    which objects bring a prompt further, and whether that pays
    restored   restores/   found objects on their way back into the pool, for requests or for none
    given up   store/      what was used least goes first, when the room is needed (evictions)

connector   OffloadingConnector: what the scheduler and the workers know of all this
tier        the scheduler's side: the parts above as one
worker      the workers' side: rows from the pool to the store and back; pool_rows finds them
orders      what the two sides tell each other, step by step
layout      which rows make an object, and how many bytes
settings    what an operator may say
identity    what the rows in a folder depend on
reports     counts, KV events, updates for routers
tier_view   what people see of the tiers
inspect     ``vllm cache``: a folder seen from outside
"""
