"""For people who test distributed code."""
