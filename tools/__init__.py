"""Programs for people who work on Brigade: train and measure the bundled demo model."""
