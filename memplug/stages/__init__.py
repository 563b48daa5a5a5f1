"""How a session gets from what its steps run to a plan: stages, remembered programs, and plans that are tried."""
