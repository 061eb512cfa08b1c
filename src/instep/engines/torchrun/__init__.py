"""The engine for ranks that a launcher such as torchrun has started: one replica per rank."""
