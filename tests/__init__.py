"""The tests of memplug.

Tests train for few steps and wait for plans, so that each run adopts them at the same step. Only the tests of planning
beside training do not wait (tests/config/test_beside.py).
"""

from memplug.beside import Beside

made_as_users_do = Beside.__init__


def _waiting(self: Beside, waits: bool) -> None:
    made_as_users_do(self, waits=True)


Beside.__init__ = _waiting
