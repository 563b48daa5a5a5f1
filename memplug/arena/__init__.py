"""The planned arena: its plan as tables, when it serves, and the façade over the native one."""
