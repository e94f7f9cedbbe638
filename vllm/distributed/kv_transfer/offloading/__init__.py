"""A tier of the prefix cache behind the pool: rows on a disk that outlive the process.

layout      which rows make an object, and how many bytes
settings    what an operator may say
identity    what the rows of a folder depend on
orders      what the connector's two sides tell each other
keeper      the store's one thread: opening, commits, room
tracking    what running requests have computed that is worth writing
restoring   which objects bring a prompt further than the pool does, and whether that pays
reporting   counts, KV events, news for routers
viewing     what people see of the tiers
worker      the worker's side: rows from the pool to the disk and back
connector   OffloadingConnector
"""
