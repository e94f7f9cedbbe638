"""Process groups, KV events and KV transfer."""
