"""Floor 7, the data's side: which sample goes to which rank, and when."""
