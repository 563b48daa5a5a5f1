"""Callbacks for other libraries' training loops; `launched.py` attaches in scripts that do not mention memplug."""
