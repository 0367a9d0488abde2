"""Floor 2, who and where: launchers, ranks and devices, as pure decisions."""
