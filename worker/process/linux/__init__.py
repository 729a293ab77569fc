"""What Linux tells of itself, as far as it is there: files of sysfs, and systemd."""
