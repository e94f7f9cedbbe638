"""What requests leave that is worth its bytes, on its way to the tiers.

tracking        what running requests have computed: row groups as they fill, states at pauses
passing         what a prompt that comes by tells of objects: which are used, which are left
write_gate      what may go to the disk now
write_budget    how many bytes a day
turnover        how much may be written over what nobody has read
pending_writes  writes that were ordered and have not ended
tier_writes     the way of an object from the pool to host memory and to the disk
"""
