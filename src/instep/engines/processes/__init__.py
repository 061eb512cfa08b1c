"""The processes engine: this process is replica 0, every other replica lives in a worker process of its own."""
