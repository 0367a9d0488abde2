"""Floor 9, starting ranks: processes, what travels to and from them, and how they end."""
