"""Bytes on disk: records, segments, recovery. Pure functions, no file handles. Layout: docs/design.md."""
