"""Models that another server runs: its endpoints, and how they are asked."""
