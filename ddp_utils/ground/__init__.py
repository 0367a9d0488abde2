"""Floor 1, the ground: what every other room stands on."""
