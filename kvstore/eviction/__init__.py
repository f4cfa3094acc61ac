"""Which cached blocks are forgotten first: one contract, and the policies behind it."""
