"""Support for tests, examples and benchmarks: tiny checkpoints, the real engine, tables of pages. Not installed."""
