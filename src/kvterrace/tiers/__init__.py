"""Memory and files of the tiers."""
