"""Coverage-guided fuzzing of all that reads a caller's bytes: ``python -m fuzz TARGET`` (requirements/fuzz.txt)."""
