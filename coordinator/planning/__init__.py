"""What goes where and what it costs: plans and measured times. Pure."""
