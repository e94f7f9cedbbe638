"""Named ops of a forward pass: the plain-torch reference and the table of names."""
