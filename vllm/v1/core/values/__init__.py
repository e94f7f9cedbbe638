"""What the storeys above pass about: blocks, hits, a step's needs, what a cache is built from."""
