"""Everything about KV memory: block ids, block tables, the radix tree, the pool's tensors, the prefix index."""
