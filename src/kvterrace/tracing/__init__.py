"""Traces of a store's traffic: the recorder, and the format of its files (docs/reference/trace-format.md)."""

from kvterrace.tracing.recorder import TraceRecorder, TraceStats

__all__ = ["TraceRecorder", "TraceStats"]
