"""Support code shared by the tests of several rooms: models, workers, launchers, devices."""
