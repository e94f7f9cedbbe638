"""Objects on their way back into the pool.

tier_restores  asked for, ordered, ended: for requests, or for none
warm_file      the list for the next start, as a small file
warm_start     what the last life used most, and the prefixes with names, before anybody asks
"""
