"""Payload encodings: bytes to bytes. See `base` for what a codec promises, `registry` to look one up."""
