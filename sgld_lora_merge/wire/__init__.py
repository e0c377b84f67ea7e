"""What travels between trainer and engine: schema, buckets, payloads, and the readers of both."""
