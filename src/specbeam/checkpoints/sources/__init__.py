"""Where models come from: a hub, wheels, and what earlier loads have kept."""
