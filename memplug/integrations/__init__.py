"""Callbacks for other libraries' training loops: they attach, mark steps and detach. Only users import them."""
