"""Which objects bring a prompt further than the pool does, and whether that pays.

tier_stores  the stores of both tiers: which of them answer, and how fast
ways         what can be loaded for a prompt, and the quickest of it
rates        whether restoring is quicker than computing, by what was measured
step_times   how long steps take that compute prompts
"""
