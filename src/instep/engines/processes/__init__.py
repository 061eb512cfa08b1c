"""The engine whose replicas live in worker processes; this process is the first replica and holds the truth."""
