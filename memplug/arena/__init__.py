"""The arena technique: plans addresses for a step's requests, and serves training from them."""
