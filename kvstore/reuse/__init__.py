"""What the radix tree's blocks are used for again, how soon, and what another pool would make of it."""
