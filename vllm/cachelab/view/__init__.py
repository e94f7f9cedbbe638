"""What people may see of the cache while it works: a tree of prefixes, and no token of them."""
