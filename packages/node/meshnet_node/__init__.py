"""A node: it holds shards of models and runs frames through them."""
