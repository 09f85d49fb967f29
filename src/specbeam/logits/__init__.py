"""Scores before a token is chosen: processors, bans, selection requests, and when a sequence ends."""
