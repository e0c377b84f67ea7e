"""Programs to run from a checkout."""
