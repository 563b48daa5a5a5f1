"""What tests of several rooms share: models, workers, launchers, devices."""
