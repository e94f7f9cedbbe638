"""Several engine cores behind one front end: what each one caches, and who gets a request."""
