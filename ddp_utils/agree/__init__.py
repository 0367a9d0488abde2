"""Floor 6, agreeing: sections of one rank, seeds, and checks that ranks are alike."""
