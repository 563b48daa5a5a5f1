"""Token-wise offloading and recomputation of regions: a technique."""
