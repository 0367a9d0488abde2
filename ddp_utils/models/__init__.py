"""Floor 8, the model's side: wrapping, accumulating, saving and stopping."""
