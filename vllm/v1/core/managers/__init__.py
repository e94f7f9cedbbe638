"""One KV-cache group's block tables, by kind of attention."""
