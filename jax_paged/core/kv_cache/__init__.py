"""Blocks and state slots: free lists, reference counts and the prefix cache.

`BlockPool` tracks the blocks of one memory, `PrefixCache` finds the cached prefix of a sequence, `CacheGroup`
describes which layers share block tables, and `StateSlots` manages the slots of recurrent states.
`BlockManager` (core/block_manager.py) owns the pools, slots and caches. Other modules change them
only through it.
"""
