"""Objects on a disk that outlive their process, and in host memory. No torch, no engine.

file_calls      the few file calls that all of it goes through
cells           one object's entry in the index: 128 bytes that check themselves
records         what an object is: its key, its place; a batch on its way to the disk
cell_table      the index in memory: lookups, and which cell a new entry takes
eviction_order  which entries go first
free_slots      which slots of the rows' file are free
index_pass      the index taken over from its file, what is looked up first
rows_file       objects' bytes in slots, sealed by a digest
entries         what there is, and what follows when an entry comes, is used, or goes
room            how many slots there are, may be, and are wanted
reservations    what is on its way to the disk
store_state     these three under one lock; whether the store is read, and may be written
opening         a store is opened: the index is taken over, lookups meanwhile
object_store    any thread: find, pin, reserve; memory alone
writer          the files' thread: commit, make room, clear
evictions       what is given up when its room is needed
content         what there is, in numbers and lists
store_log       what changed between two questions, for runs that are recorded
host_store      the same in host memory, which no process outlives
folder          the root folder: who owns it, its hash root, one sub-folder for each identity
weights_digest  a digest of all bytes of a checkpoint, remembered between starts
keeper          the store's one thread: opening, commits, room
latched_disk    a disk that changes only when it is looked at
"""
