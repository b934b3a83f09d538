"""Changing a store that no process writes."""
