"""Where models come from: a hub, and wheels."""
