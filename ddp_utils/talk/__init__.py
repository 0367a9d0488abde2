"""Floor 5, talking: collectives on trees, and the messages they are made of."""
